"""Copying ranges between files: every method gives the same bytes, and what a system refuses is asked once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import copying
from storage.copying import CopyMethod, RangeCopier
from storage.errors import ReadError

PAGE = 4096
NBYTES = 300 * PAGE


def copied(folder: Path, copier: RangeCopier, offset: int = 3 * PAGE, nbytes: int = 250 * PAGE) -> bytes:
    """Copy a range to page 2 of another file; what is there then."""
    data = os.urandom(NBYTES)
    (folder / "source").write_bytes(data)
    source = os.open(folder / "source", os.O_RDONLY)
    target = os.open(folder / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        copier.copy(source, offset, target, 2 * PAGE, nbytes)
        found = os.pread(target, NBYTES, 2 * PAGE)
        assert found == data[offset : offset + nbytes]
        return found
    finally:
        os.close(source)
        os.close(target)


@pytest.mark.parametrize("methods", [tuple(CopyMethod), (CopyMethod.KERNEL,), (CopyMethod.PLAIN,), ()])
def test_every_method_copies(tmp_path: Path, methods: tuple[CopyMethod, ...]) -> None:
    copier = RangeCopier(methods)
    copied(tmp_path, copier)
    assert sum(copier.nbytes.values()) == 250 * PAGE
    assert set(copier.nbytes) <= {*methods, CopyMethod.PLAIN}


def test_large_copies_take_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_STEP_NBYTES", 7 * PAGE)
    monkeypatch.setattr(copying, "_BUFFER_NBYTES", 9 * PAGE)
    copied(tmp_path, RangeCopier((CopyMethod.KERNEL,)))
    copied(tmp_path, RangeCopier(()))


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSYS])
def test_a_refusal_leads_to_the_next_method_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = []

    def refuse(name: str) -> Callable[..., int]:
        def call(*unused: object) -> int:
            asked.append(name)
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(copying.fcntl, "ioctl", refuse("reflink"))
    monkeypatch.setattr(copying.os, "copy_file_range", refuse("kernel"))
    copier = RangeCopier()
    for _ in range(3):
        copied(tmp_path, copier)
    assert asked == ["reflink", "kernel"]
    assert copier.nbytes == {CopyMethod.PLAIN: 750 * PAGE}


def test_without_the_calls_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "copy_file_range"):
        monkeypatch.delattr(os, name)
    copier = RangeCopier((CopyMethod.KERNEL,))
    copied(tmp_path, copier)
    assert copier.nbytes == {CopyMethod.PLAIN: 250 * PAGE}


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*unused: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copying.os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        copied(tmp_path, RangeCopier((CopyMethod.KERNEL,)))


@pytest.mark.parametrize("methods", [(CopyMethod.KERNEL,), ()])
def test_a_source_that_is_too_short(tmp_path: Path, methods: tuple[CopyMethod, ...]) -> None:
    with pytest.raises(ReadError, match=r"source ends at offset 1228800, inside what is to be copied"):
        copied(tmp_path, RangeCopier(methods), offset=299 * PAGE, nbytes=2 * PAGE)
