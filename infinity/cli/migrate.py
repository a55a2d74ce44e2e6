"""`infinity migrate`: what another engine's settings become. Imports what parsing needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.failures import reported

if TYPE_CHECKING:
    from rich.console import RenderableType

    from infinity.migration.report import Migration

_STYLES = {
    "mapped": "green",
    "in your loop": "cyan",
    "better default": "green",
    "unneeded": "dim",
    "unsupported": "yellow",
    "unknown": "red",
}


def migrate(
    settings: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file.", show_default=False)],
    write: Annotated[
        Path | None, typer.Option(help="Write the settings to this .json file, for `infinity train --config`.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the whole report to this file.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Translate a DeepSpeed configuration: every setting of it, what it becomes, and the lines for the loop.

    \b
    infinity migrate ds_config.json
    infinity migrate ds_config.json --write infinity.json
    """
    with reported(debug=debug):
        import json as json_format

        from infinity.cli.console import make_console
        from infinity.errors import ConfigError
        from infinity.migration.deepspeed import read_deepspeed

        if write is not None and write.suffix.lower() != ".json":
            raise ConfigError(f"--write {write}: settings are written as JSON; give a name that ends in .json")
        migration = read_deepspeed(settings)
        make_console().print(_show(migration))
        report = migration.as_dict()
        if write is not None:
            write.write_text(json_format.dumps(report["config"], indent=2) + "\n", encoding="utf-8")
        if json is not None:
            json.write_text(json_format.dumps(report, indent=2) + "\n", encoding="utf-8")


def _show(migration: Migration) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.syntax import Syntax
    from rich.table import Table
    from rich.text import Text

    from infinity.migration.report import Outcome

    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("setting", "value", "becomes", ""):
        table.add_column(column, overflow="fold")
    for outcome in Outcome:
        for finding in migration.with_outcome(outcome):
            style = _STYLES[outcome.value]
            value = Text(repr(finding.value))
            table.add_row(Text(finding.key), value, Text(outcome.value, style=style), Text(finding.text))
    loop = Syntax("\n".join(migration.loop), "python", background_color="default", word_wrap=True)
    return Group(table, Text("in Python:"), loop)
