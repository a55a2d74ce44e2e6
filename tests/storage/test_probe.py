from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from storage.backends import probe
from storage.backends.probe import Engine, choose_engine, probe_direct
from storage.errors import StorageError
from storage.statx import DirectAlignment


def test_probing_leaves_nothing(tmp_path: Path) -> None:
    probe_direct(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert "No such file" in str(probe_direct(tmp_path / "missing"))


def test_buffered_needs_nothing(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        (DirectAlignment(4, 512), None),
        (DirectAlignment(4096, 4096), None),
        (DirectAlignment(0, 0), "files here have no direct I/O"),
        (DirectAlignment(512, 65536), "multiples of 65536 bytes, and transfers are multiples of 4096"),
        (DirectAlignment(8192, 512), "multiples of 8192 bytes, and transfers are multiples of 4096"),
    ],
)
@pytest.mark.usefixtures("can_direct")
def test_what_the_kernel_tells_of_alignment_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: DirectAlignment, problem: str | None
) -> None:
    monkeypatch.setattr(probe, "direct_alignment", lambda _: told)
    engine, reason = choose_engine(tmp_path, "auto")
    assert (engine is Engine.DIRECT) == (problem is None)
    if problem is not None:
        assert problem in reason
        with pytest.raises(StorageError, match=problem):
            choose_engine(tmp_path, "direct")


@pytest.mark.usefixtures("can_direct")
def test_where_nobody_tells_the_smallest_block_that_works_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def coarse(fd: int, buffers: Sequence[mmap.mmap], offset: int) -> int:
        nbytes = sum(map(len, buffers))
        if nbytes % 16384:
            raise OSError(errno.EINVAL, "Invalid argument")
        return nbytes

    monkeypatch.setattr(probe, "direct_alignment", lambda _: None)
    monkeypatch.setattr(probe.os, "pwritev", coarse)
    assert "multiples of 16384 bytes" in str(probe_direct(tmp_path))


def test_the_page_has_to_come_back(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        assert probe._try_page(fd) is None
    finally:
        os.close(fd)
