"""Every command line that the documentation or a help text shows is one that the program takes."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import infinity
from infinity.cli.main import app

ROOT = Path(infinity.__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
_LINE = re.compile(r"^ *(?:pip install [^&]*&& )?(infinity (?!-).*)$")


def parsed(line: str) -> Any:
    """What the program makes of a command line, without running it; an error where it does not take it."""
    command: Any = typer.main.get_command(app)
    _, *words = shlex.split(line, comments=True)
    while hasattr(command, "commands"):  # a group, of click or of the click inside typer
        command = command.commands[words.pop(0)]
    return command.make_context(line, words)


def commands_in(text: str, *, of_help: bool = False) -> Iterator[str]:
    """Those of one text; in a help text what it does stands behind it, two blanks apart."""
    for line in text.splitlines():
        if match := _LINE.match(line):
            for one in match[1].split("&&"):
                if one.strip().startswith("infinity "):
                    yield re.split(r" {2,}", one.strip())[0] if of_help else one.strip()


def shown_in_documents() -> list[str]:
    """Those that stand in blocks, which are indented or between fences."""
    found: list[str] = []
    for path in DOCUMENTS:
        text = path.read_text()
        fenced = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        indented = re.findall(r"^    .*$", text, re.MULTILINE)
        found += (line for block in [*fenced, *indented] for line in commands_in(block))
    return found


def shown_in_help(command: Any) -> list[str]:
    if hasattr(command, "commands"):
        return [line for one in command.commands.values() for line in shown_in_help(one)]
    return list(commands_in(inspect.getdoc(command.callback) or "", of_help=True))


@pytest.mark.parametrize("line", list(dict.fromkeys(shown_in_documents())))
def test_commands_in_the_documentation_are_taken(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize("line", shown_in_help(typer.main.get_command(app)))
def test_commands_in_help_texts_are_taken(line: str) -> None:
    parsed(line)


def test_they_are_found_and_wrong_ones_are_not_taken() -> None:
    assert len(shown_in_documents()) > 20
    assert len(shown_in_help(typer.main.get_command(app))) > 20
    with pytest.raises(Exception, match="No such option: --nvmes"):
        parsed("infinity train --nvmes /mnt/nvme0")
