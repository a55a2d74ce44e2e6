"""`infinity bench tier --compare-fio` on a directory, against fio at its best and fio as it comes.

    python benchmarks/fio_compare.py DIRECTORY [--rounds 9] [--seconds 1.5] [--json FILE]

The same file, block size (1 MiB), queue depth (8) and length on both sides, taking turns; medians over rounds. Our
transfers go through the engine that training takes after `infinity bench calibrate`, from memory in huge pages. At its
best fio has the fastest of its I/O engines for each mix, and its buffers in huge pages too; this is what is judged. As
it comes it has neither, and then a drive whose requests have few segments gets two for each block. On a machine that is
busy with other work several threads get more of its processors than fio's one: `load` in the result says how busy it
was, so repeat this on one that is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from infinity.bench.arguments import at_least, duration_s, made_folder, result_file
from infinity.bench.engines import BenchEngine
from infinity.bench.fio import FioSetup
from infinity.bench.fio_json import to_json
from infinity.bench.profiles import comparison
from infinity.bench.run import TierOptions, run_tier
from infinity.bench.tables import show
from infinity.cli.console import make_console
from infinity.sizes import parse_nbytes

_LEAST_RATIO, _MOST_CPU_RATIO = 0.95, 1.5


def main() -> int:
    """1 when a ratio to fio at its best misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=made_folder)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--seconds", type=duration_s, default=1.5)
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--json", type=result_file)
    arguments = parser.parse_args()
    console = make_console()
    reports: dict[str, Any] = {}
    for name, setup in (("best", None), ("as it comes", FioSetup())):
        options = TierOptions(
            paths=(arguments.directory,),
            profiles=(),
            engines=(BenchEngine.DIRECT,),
            repeats=arguments.rounds,
            seconds=arguments.seconds,
            file_nbytes=parse_nbytes(arguments.size),
            comparison=comparison(),
            comparison_repeats=arguments.rounds,
            fio=setup,
            measures_memory=False,
        )
        result = run_tier(options, lambda _: None)
        console.print(show(result))
        report = to_json(result)
        reports[name] = {part: report[part] for part in ("machine", "drives", "time", "compare_fio")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n")
    return 0 if _is_good(reports["best"]["compare_fio"]) else 1


def _is_good(compared: dict[str, Any]) -> bool:
    rows = [compared[name] for name in ("read", "write", "mixed")]
    return all(row["ratio"] >= _LEAST_RATIO and row["cpu_ratio"] <= _MOST_CPU_RATIO for row in rows)


if __name__ == "__main__":
    sys.exit(main())
