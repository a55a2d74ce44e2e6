"""What `infinity checkpoint` does, and how it shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from infinity.checkpoint.format import GRADIENT, Index, ParameterEntry, read_index
from infinity.checkpoint.reshard import reshard_checkpoint
from infinity.checkpoint.series import candidates
from infinity.checkpoint.verify import Verification, verify_checkpoint
from infinity.cli.console import can_redraw, make_console
from infinity.cli.files import check_files, write_json
from infinity.cli.values import positive_nbytes
from infinity.errors import CheckpointError, ConfigError
from infinity.sizes import format_nbytes
from infinity.weights.export import DTYPES, ExportOptions, export_checkpoint
from infinity.weights.importing import import_checkpoint

if TYPE_CHECKING:
    from infinity.cli.checkpoint import (
        ExportCommandOptions,
        ImportOptions,
        InspectOptions,
        ReshardOptions,
        VerifyOptions,
    )

OnFile = Callable[[str, int], None]


def run_inspect(options: InspectOptions) -> None:
    """Tables of what the index says."""
    check_files(json=options.json)
    folder = _newest(options.checkpoint)
    index = read_index(folder)
    summary = _summary(folder, index)
    console = make_console()
    console.print(_facts(summary))
    if index.optimizer:
        console.print(_optimizer_table(index))
    if options.parameters:
        console.print(_parameter_table(index))
    write_json(options.json, summary | {"parameters": {n: _described(e) for n, e in index.parameters.items()}})


def run_verify(options: VerifyOptions) -> None:
    """Everything that is wrong, and exit code 1, or that nothing is."""
    check_files(json=options.json)
    folder = _newest(options.checkpoint)
    console = make_console()
    total = sum(entry.nbytes for entry in read_index(folder).files.values())
    with _progress(console, "reading", total) as on_file:
        result = verify_checkpoint(folder, on_file)
    write_json(options.json, _verified(result))
    console.print(_verification_table(result))
    if not result.is_good:
        raise CheckpointError("\n".join(result.problems))
    console.print(f"{folder} is complete, and every byte is what was written ({format_nbytes(total)})", soft_wrap=True)


def run_export(options: ExportCommandOptions) -> None:
    """Write safetensors files."""
    check_files(json=options.json)
    folder = _newest(options.checkpoint)
    chosen = ExportOptions(
        dtype=None if options.dtype is None else _dtype(options.dtype),
        shard_nbytes=positive_nbytes("--shard-size", options.shard_size),
        config=options.config,
        adapter=options.adapter,
        merge=options.merge,
    )
    console = make_console()
    with _progress(console, "writing", None) as on_file:
        exported = export_checkpoint(folder, options.target, chosen, on_file)
    written = exported.written
    console.print(
        f"{exported.kind} of {folder}: {written.tensors} tensors, {format_nbytes(written.nbytes)}, in "
        f"{len(written.files)} file{'s' * (len(written.files) > 1)} of {options.target}"
        + (f", with {', '.join(exported.beside)}" if exported.beside else ""),
        soft_wrap=True,
    )
    content = {"files": list(written.files), "tensors": written.tensors, "bytes": written.nbytes}
    write_json(options.json, {"kind": exported.kind, **content, "beside": list(exported.beside)})


def run_reshard(options: ReshardOptions) -> None:
    """Write the checkpoint anew."""
    check_files(json=options.json)
    folder = _newest(options.checkpoint)
    size = positive_nbytes("--shard-size", options.shard_size)
    console = make_console()
    with _progress(console, "writing", None) as on_file:
        reshard_checkpoint(folder, options.target, file_nbytes=size, on_file=on_file)
    summary = _summary(options.target, read_index(options.target))
    console.print(_facts(summary))
    write_json(options.json, summary)


def run_import(options: ImportOptions) -> None:
    """Take over a checkpoint of another program."""
    check_files((options.source, options.optimizer, options.names), json=options.json)
    names = None if options.names is None else _lines(options.names)
    console = make_console()
    with _progress(console, "writing", None) as on_file:
        imported = import_checkpoint(
            options.source, options.target, optimizer=options.optimizer, names=names, on_file=on_file
        )
    console.print(
        f"{imported.kind}: {imported.parameters} tensors, {imported.numel:,} parameters, {imported.groups} parameter "
        f"groups, step {imported.step}, in {options.target}",
        soft_wrap=True,
    )
    for alias, name in imported.aliases.items():
        console.print(f"{alias} is tied to {name}", soft_wrap=True)
    console.print(f"not taken over: {', '.join(imported.left_out)}", soft_wrap=True)
    write_json(options.json, asdict(imported))


# Options -----------------------------------------------------------------------------------------------------------


def _newest(path: Path) -> Path:
    """The checkpoint itself, or the newest of a series."""
    return candidates(path)[0]


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--names {path}: cannot be read: {error.strerror or error}") from error


def _dtype(text: str) -> Any:
    if text not in DTYPES:
        raise ConfigError(f"--dtype {text}: allowed are {', '.join(DTYPES)}")
    return DTYPES[text]


@contextmanager
def _progress(console: Console, what: str, total_nbytes: int | None) -> Iterator[OnFile]:
    """A bar that grows with every file."""
    described = TextColumn("{task.description}", markup=False)
    columns = (described, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not can_redraw(console)) as progress:
        task = progress.add_task(what, total=total_nbytes)
        yield lambda name, nbytes: progress.update(task, advance=nbytes, description=f"{what} {name}")


# Tables ------------------------------------------------------------------------------------------------------------


def _summary(folder: Path, index: Index) -> dict[str, Any]:
    entries = index.parameters.values()
    numel = {True: 0, False: 0}
    for entry in entries:
        numel[entry.trains] += math.prod(entry.shape)
    moments = sorted(set[str]().union(*(entry.moments for entry in entries)))
    return {
        "folder": str(folder),
        "step": index.step,
        "precision": index.precision,
        "tensors": len(index.parameters),
        "trained_parameters": numel[True],
        "frozen_parameters": numel[False],
        "moments": moments,
        "gradients": sum(GRADIENT in entry.tensors for entry in entries),
        "ranks": len(index.rng),
        "optimizer_groups": None if index.optimizer is None else len(index.optimizer),
        "files": {name: entry.nbytes for name, entry in index.files.items()},
        "bytes": sum(entry.nbytes for entry in index.files.values()),
        "written_by": index.written_by,
    }


def _facts(summary: dict[str, Any]) -> Table:
    frozen = f" and {summary['frozen_parameters']:,} frozen" if summary["frozen_parameters"] else ""
    groups = summary["optimizer_groups"]
    rows = {
        "checkpoint": summary["folder"],
        "step": str(summary["step"]),
        "precision": summary["precision"],
        "parameters": f"{summary['trained_parameters']:,} trained{frozen}, in {summary['tensors']} tensors",
        "optimizer state": ", ".join(summary["moments"]) or "none",
        "optimizer settings": "not saved" if groups is None else f"{groups} parameter groups",
        "waiting gradients": f"of {summary['gradients']} tensors" if summary["gradients"] else "none",
        "ranks that saved it": str(summary["ranks"] or "none of this program: it was imported"),
        "size": f"{format_nbytes(summary['bytes'])} in {len(summary['files'])} files",
        "written by": ", ".join(f"{name} {version}" for name, version in summary["written_by"].items()),
    }
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _optimizer_table(index: Index) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title="optimizer", title_justify="left")
    table.add_column("group", justify="right")
    table.add_column("tensors", justify="right")
    table.add_column("settings", overflow="fold")
    for number, group in enumerate(index.optimizer or []):
        settings = ", ".join(f"{name}={value}" for name, value in group.settings.items())
        table.add_row(str(number), str(len(group.parameters)), Text(settings))
    return table


def _parameter_table(index: Index) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, title="parameters", title_justify="left")
    for column, justify in (("name", "left"), ("shape", "left"), ("dtype", "left"), ("updates", "right"), ("", "left")):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name, entry in index.parameters.items():
        shape = " × ".join(map(str, entry.shape)) or "scalar"
        table.add_row(Text(name), shape, entry.dtype, str(entry.step), "" if entry.trains else "frozen")
    return table


def _described(entry: ParameterEntry) -> dict[str, Any]:
    files = sorted({piece.file for pieces in entry.tensors.values() for piece in pieces})
    return {
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "trains": entry.trains,
        "step": entry.step,
        "kinds": list(entry.tensors),
        "files": files,
    }


def _verified(result: Verification) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "good": result.is_good,
        "files": [{"name": c.name, "bytes": c.nbytes, "problem": c.problem or None} for c in result.files],
        "problems": result.problems,
        "unknown_files": list(result.strangers),
    }


def _verification_table(result: Verification) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("", overflow="fold")
    for check in result.files:
        state = Text("damaged", style="red") if check.problem else Text("good", style="green")
        table.add_row(Text(check.name), format_nbytes(check.nbytes), state)
    for name in result.strangers:
        table.add_row(Text(name), "", Text("not of the checkpoint", style="dim"))
    return table
