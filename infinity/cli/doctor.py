"""`infinity doctor`: what this machine can do, and the line that repairs each problem. Imports what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.failures import EXIT_FAILURE
from infinity.cli.options import JsonFile, takes
from infinity.cli.stopping import deferred

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from infinity.doctor.check import Check

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """The options as typed."""

    paths: Annotated[
        tuple[Path, ...],
        typer.Argument(help="Directories for swap files. Default: where they would go.", show_default=False),
    ] = ()
    json: JsonFile = None


@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Look at kernel, memory, GPU and directories; say what is wrong and the line that repairs it.

    \b
    infinity doctor                            the machine and the default directory
    infinity doctor /mnt/nvme0 /mnt/nvme1

    Exit code 1 only if training is impossible.
    """
    with deferred():
        from infinity.cli.console import make_console
        from infinity.cli.files import check_files
        from infinity.doctor.check import Status
        from infinity.doctor.examine import examine
        from infinity.swap_directories import default_directory

    check_files(json=options.json)
    checks = examine(options.paths or [default_directory()])
    make_console().print(_show(checks))
    _write(options.json, checks)
    if any(check.status is Status.FAILURE for check in checks):
        raise typer.Exit(EXIT_FAILURE)


def _show(checks: Sequence[Check]) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for subject in dict.fromkeys(check.subject for check in checks):
        table = Table(title=subject or "machine", title_justify="left", box=box.SIMPLE, pad_edge=False)
        table.add_column("what", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("found", overflow="fold")
        for check in checks:
            if check.subject == subject:
                status = Text(check.status.value, style=_STYLES[check.status.value])
                table.add_row(check.name, status, Text(check.found))
        parts.append(table)
    fixes = [check for check in checks if check.fix]
    if fixes:
        parts.append(Text("what to do"))
    for check in fixes:
        about = f" of {check.subject}" if check.subject else ""
        parts += [Text(f"  {check.name}{about}:", style=_STYLES[check.status.value]), Text(f"    {check.fix}")]
    counts = {name: sum(check.status.value == name for check in checks) for name in ("warning", "failure")}
    parts.append(Text(f"{counts['failure']} failures, {counts['warning']} warnings"))
    return Group(*parts)


def _write(path: Path | None, checks: Sequence[Check]) -> None:
    from dataclasses import asdict

    from infinity.cli.files import write_json

    worst = max((list(_STYLES).index(check.status.value) for check in checks), default=0)
    report = {"status": list(_STYLES)[worst], "checks": [asdict(check) for check in checks]}
    write_json(path, report)
