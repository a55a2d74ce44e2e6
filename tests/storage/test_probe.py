from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.backends import probe
from storage.backends.probe import Engine, choose_engine, probe_direct
from storage.errors import StorageError


def test_probing_leaves_nothing(tmp_path: Path) -> None:
    probe_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in str(probe_direct(tmp_path / "missing"))


def test_buffered_is_not_probed(tmp_path: Path) -> None:
    assert choose_engine(tmp_path / "missing", "buffered") == (Engine.BUFFERED, "asked for")


@pytest.mark.usefixtures("can_direct")
def test_direct_where_it_works(tmp_path: Path) -> None:
    assert choose_engine(tmp_path, "auto")[0] is choose_engine(tmp_path, "direct")[0] is Engine.DIRECT


def test_where_direct_does_not_work(tmp_path: Path) -> None:
    # A directory that cannot be written to stands for a file system without O_DIRECT.
    missing = tmp_path / "missing"
    engine, reason = choose_engine(missing, "auto")
    assert engine is Engine.BUFFERED
    assert "No such file" in reason
    with pytest.raises(StorageError, match=r"engine 'direct' was asked for.*Use 'auto' or 'buffered'"):
        choose_engine(missing, "direct")


def test_the_page_has_to_come_back(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        assert probe._try_page(fd) is None
    finally:
        os.close(fd)
