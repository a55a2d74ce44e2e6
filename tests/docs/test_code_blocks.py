"""Every block of Python in the documentation runs, every block of TOML loads.

A comment before a block says what it takes for granted: `<!-- in: training -->` (see situations.py).
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

import infinity
from tests.docs.situations import SITUATIONS

ROOT = Path(infinity.__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- in: (?P<situation>[a-z ]+) -->\n+)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
_DRIVE = re.compile(r'"/mnt/(nvme\d)"')


@dataclass(frozen=True)
class Block:
    """A block of code, and where it stands."""

    document: Path
    line: int
    language: str
    situation: str | None
    code: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [
        Block(path, text.count("\n", 0, found.start("code")), language, found["situation"], found["code"])
        for path in DOCUMENTS
        for text in [path.read_text()]
        for found in _BLOCK.finditer(text)
        if found["language"] == language
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_blocks_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.situation is not None, f"{block}: say what it takes for granted, such as <!-- in: training -->"
    monkeypatch.chdir(tmp_path)
    for drive in ("nvme0", "nvme1"):
        (tmp_path / drive).mkdir()
    code = _DRIVE.sub(lambda found: repr(str(tmp_path / found[1])), block.code)
    with ExitStack() as stack:
        names = SITUATIONS[block.situation](tmp_path, stack)
        try:
            exec(compile("\n" * block.line + code, str(block.document), "exec"), names)
        finally:
            for value in list(names.values()):
                if isinstance(value, infinity.Engine):
                    value.close()


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml_blocks_load(block: Block, tmp_path: Path) -> None:
    (tmp_path / "infinity.toml").write_text(block.code)
    infinity.Config.load(tmp_path / "infinity.toml")


def test_blocks_are_found() -> None:
    assert len(blocks("python")) >= 10
    assert len(blocks("toml")) >= 1


def test_no_link_between_documents_is_dead() -> None:
    dead = [
        f"{path.relative_to(ROOT)} → {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert dead == []
