"""Text sources and batches."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from infinity.data.batches import Batches
from infinity.data.text import SHIPPED_NBYTES, Text, _docstrings, load_text, shipped_text
from infinity.errors import ConfigError


def test_python_ships_enough_text_and_always_the_same() -> None:
    first = shipped_text()
    shipped_text.cache_clear()
    second = shipped_text()
    assert second is not first
    assert SHIPPED_NBYTES <= len(first.tokens) < 2 * SHIPPED_NBYTES
    assert np.array_equal(first.tokens, second.tokens)
    assert b"yield" in first.tokens.tobytes()


def test_no_docstring_is_passed_over_and_none_changes_its_place(tmp_path: Path) -> None:
    source = """'''the module'''
class A:
    "A"
    def first(self): "A.first"
    if (lambda: "no docstring")():
        async def second(self): "A.second"
    else:
        def third(self): "A.third"
try:
    def fourth(): "fourth"
except OSError:
    def fifth(): "fifth"
finally:
    for _ in ():
        def sixth(): "sixth"
match 1:
    case 1:
        with open("x") as file:
            class B: "B"
"""
    (tmp_path / "source.py").write_text(source)
    expected = [
        text
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    assert list(_docstrings(tmp_path / "source.py")) == expected
    assert len(expected) == 9


def test_files_and_folders_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bbb")
    (tmp_path / "a.txt").write_text("aaa")
    (tmp_path / "none.txt").touch()
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "picture").write_bytes(b"\0\1\2")
    other = tmp_path / "sub"
    other.mkdir()
    (other / "c.txt").write_text("ccc")
    text = load_text([other / "c.txt", tmp_path], shortest_nbytes=5)
    assert text.tokens.tobytes() == b"ccc\naaa\nbbb\nccc"
    assert "4 files" in text.source


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"", "empty"), (b"ab\0c" * 100, "binary"), (b"short", "too short")],
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_text([path], shortest_nbytes=17)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\0\1\2")
    with pytest.raises(ConfigError, match="no text file"):
        load_text([tmp_path], shortest_nbytes=17)


def _text(n: int) -> Text:
    return Text(np.arange(n, dtype=np.uint32).astype(np.uint8), "numbers")


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    first = Batches(_text(5000), batch=3, seq=8, seed=1)
    again = Batches(_text(5000), batch=3, seq=8, seed=1)
    first.at(0)
    assert torch.equal(first.at(7)[0], again.at(7)[0])
    assert not torch.equal(first.at(7)[0], first.at(8)[0])
    assert not torch.equal(first.at(7)[0], Batches(_text(5000), batch=3, seq=8, seed=2).at(7)[0])


def test_targets_are_the_next_bytes() -> None:
    inputs, targets = Batches(_text(200), batch=4, seq=16, seed=0).at(0)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


def test_the_shortest_text_gives_its_one_sample() -> None:
    inputs, targets = Batches(_text(9), batch=2, seq=8, seed=0).at(3)
    assert torch.equal(inputs[0], torch.arange(8))
    assert torch.equal(targets[1], torch.arange(1, 9))
