"""`infinity migrate`: what another engine's settings become. Imports what parsing needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.options import JsonFile, takes

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


@dataclass(frozen=True, slots=True)
class MigrateOptions:
    """The options as typed."""

    settings: Annotated[Path, typer.Argument(help="DeepSpeed's JSON file.", show_default=False)]
    write: Annotated[
        Path | None, typer.Option(help="Write the settings to this .json file, for `infinity train --config`.")
    ] = None
    json: JsonFile = None


@takes(MigrateOptions)
def migrate(options: MigrateOptions) -> None:
    """Translate a DeepSpeed configuration: every setting of it, what it becomes, and the lines for the loop.

    \b
    infinity migrate ds_config.json
    infinity migrate ds_config.json --write infinity.json
    """
    import json

    from infinity.cli.console import make_console
    from infinity.cli.files import check_files, write_json, write_text
    from infinity.errors import ConfigError
    from infinity.migration.deepspeed import read_deepspeed

    if options.write is not None and options.write.suffix.lower() != ".json":
        raise ConfigError(f"--write {options.write}: settings are written as JSON; give a name that ends in .json")
    check_files((options.settings,), write=options.write, json=options.json)
    migration = read_deepspeed(options.settings)
    make_console().print(_show(migration))
    report = migration.as_dict()
    if options.write is not None:
        write_text("--write", options.write, json.dumps(report["config"], indent=2) + "\n")
    write_json(options.json, report)


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
