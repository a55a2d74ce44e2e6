"""`infinity report`: one page about a run. Imports what parsing needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infinity.cli.failures import reported


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of `train --record` or of a RunRecorder, or file of `train --json`.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Write the page to this file.", show_default="RUN/report.html or RUN.html")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Make one HTML page of a run that needs no network: losses, step times, timeline, tiers, drives, stalls, wear.

    \b
    infinity train --record run1 && infinity report run1
    infinity train --json run.json && infinity report run.json --output run.html
    """
    with reported(debug=debug):
        from infinity.cli.console import make_console
        from infinity.cli.files import check_files, write_text
        from infinity.report.page import page
        from infinity.report.record import RunRecord

        target = output or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
        check_files(output=target)
        write_text("--output", target, page(RunRecord.load(run)))
        make_console().print(f"wrote {target}", soft_wrap=True)
