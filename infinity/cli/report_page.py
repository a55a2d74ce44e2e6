"""`infinity report`: one page about a run. Imports what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.options import takes


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options as typed."""

    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of `train --record` or of a RunRecorder, or file of `train --json`.", show_default=False
        ),
    ]
    output: Annotated[
        Path | None, typer.Option(help="Write the page to this file.", show_default="RUN/report.html or RUN.html")
    ] = None


@takes(ReportOptions)
def report(options: ReportOptions) -> None:
    """Make one HTML page of a run that needs no network: losses, step times, timeline, tiers, drives, stalls, wear.

    \b
    infinity train --record run1 && infinity report run1
    infinity train --json run.json && infinity report run.json --output run.html
    """
    from infinity.cli.console import make_console
    from infinity.cli.files import check_files, write_text
    from infinity.report.page import page
    from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE, RunRecord

    run = options.run
    target = options.output or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    check_files((run, *(run / name for name in (RUN_FILE, METRICS_FILE, TRACE_FILE))), output=target)
    write_text("--output", target, page(RunRecord.load(run)))
    make_console().print(f"wrote {target}", soft_wrap=True)
