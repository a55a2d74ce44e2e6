"""`infinity bench tier`: from the command line to the result."""

from __future__ import annotations

import json

from rich.markup import escape

from infinity.bench.engines import BenchEngine, parse_engines
from infinity.bench.fio import FioSetup
from infinity.bench.fio_json import to_files, to_json
from infinity.bench.html import to_html
from infinity.bench.profiles import DEFAULT_PROFILES, comparison, find_profiles
from infinity.bench.run import TierOptions, run_tier
from infinity.bench.sustained import plan_nbytes
from infinity.bench.tables import show
from infinity.cli.bench_options import TierArguments
from infinity.cli.console import make_console
from infinity.cli.files import check_files, make_folder, write_json, write_text
from infinity.cli.stopping import deferred
from infinity.cli.values import check_finite, positive_nbytes
from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.swap_directories import default_directory

_PAGE_NBYTES = 4096
_REPEATS, _COMPARISON_REPEATS = 3, 7


def run(arguments: TierArguments) -> None:
    """Measure, show, and write what was asked for.

    Raises:
        ConfigError: an option cannot work; nothing was measured.
        InfinityError, StorageError: a measurement failed; the test files are gone.
    """
    check_files(json=arguments.json, html=arguments.html)
    options = resolve(arguments)
    console = make_console()
    if options.sustained_nbytes is not None:
        for path in options.paths:
            file_nbytes = plan_nbytes(path, options.sustained_nbytes)
            console.print(
                f"--sustained will write {format_nbytes(options.sustained_nbytes)} "
                f"({options.sustained_nbytes:,} bytes) to {path}, in a file of {format_nbytes(file_nbytes)}; "
                "Ctrl-C stops it",
                soft_wrap=True,
            )
    if options.measures_memory:
        with deferred():
            import infinity.bench.memory  # noqa: F401  # with torch: now, and not in the middle of the measurements
    if arguments.fio_files is not None:
        make_folder("--fio-files", arguments.fio_files)
    with console.status("starting") as status:
        result = run_tier(options, lambda text: status.update(escape(text)))
    console.print(show(result))
    write_json(arguments.json, to_json(result))
    if arguments.fio_files is not None:
        for name, report in to_files(result).items():
            write_text("--fio-files", arguments.fio_files / name, json.dumps(report, indent=2) + "\n")
    if arguments.html is not None:
        write_text("--html", arguments.html, to_html(result))


def resolve(arguments: TierArguments) -> TierOptions:
    """What to measure.

    Raises:
        ConfigError: an option cannot be read.
    """
    check_finite(seconds=arguments.seconds)
    is_special = arguments.compare_fio or arguments.sustained is not None
    block_nbytes = _block(arguments.block)
    engines = parse_engines(arguments.engines) if arguments.engines is not None else ()
    profiles = find_profiles(arguments.profile)
    if not profiles and not is_special:
        profiles = DEFAULT_PROFILES
    measures_memory = arguments.memory if arguments.memory is not None else not arguments.profile and not is_special
    return TierOptions(
        paths=arguments.paths or (default_directory(),),
        profiles=profiles,
        engines=engines or (BenchEngine.DIRECT,),
        repeats=arguments.repeats or _REPEATS,
        seconds=arguments.seconds,
        file_nbytes=_nbytes("--size", arguments.size),
        comparison=comparison(block_nbytes, arguments.depth) if arguments.compare_fio else None,
        comparison_repeats=arguments.repeats or _COMPARISON_REPEATS,
        fio=_fio_setup(arguments),
        comparison_engine=next((engine for engine in engines if not engine.is_cached), None),
        sustained_nbytes=_nbytes("--sustained", arguments.sustained),
        measures_memory=measures_memory,
    )


def _nbytes(option: str, text: str | None) -> int | None:
    return None if text is None else positive_nbytes(option, text)


def _fio_setup(arguments: TierArguments) -> FioSetup | None:
    if arguments.fio_engine is not None:
        return FioSetup(arguments.fio_engine, arguments.fio_huge_pages)
    if arguments.fio_huge_pages:
        raise ConfigError("--fio-huge-pages belongs to --fio-engine; without that the best of both is taken anyway")
    return None


def _block(text: str) -> int:
    nbytes = positive_nbytes("--block", text)
    if nbytes % _PAGE_NBYTES:
        raise ConfigError(f"--block {text!r}: allowed: multiples of {_PAGE_NBYTES} bytes")
    return nbytes
