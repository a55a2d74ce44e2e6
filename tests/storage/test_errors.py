from __future__ import annotations

import errno

import pytest

from storage import errors
from storage.backends.system import without_frames


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.ReadError, errors.IoError),
        (errors.WriteError, errors.IoError),
        (errors.ShortIoError, errors.IoError),
        (errors.IoTimeoutError, errors.IoError),
        (errors.IoError, OSError),
        (errors.SwapFullError, errors.CapacityError),
        (errors.PoolExhaustedError, errors.CapacityError),
        (errors.IntegrityError, errors.StorageError),
        (errors.SwapInUseError, errors.StorageError),
        (errors.ClosedError, errors.StorageError),
    ],
)
def test_the_tree(kind: type[Exception], base: type[Exception]) -> None:
    assert issubclass(kind, base)
    assert issubclass(kind, errors.StorageError)


def test_an_io_error_says_what_where_and_why() -> None:
    error = errors.ReadError(path="/d/rank0.swap", offset=8192, nbytes=4096, errno=errno.EIO, key="blocks.3/param")
    assert str(error) == (
        "read of 4096 bytes at offset 8192 of /d/rank0.swap for 'blocks.3/param' failed: Input/output error (EIO)"
    )
    assert (error.path, error.offset, error.nbytes, error.errno, error.key) == (
        "/d/rank0.swap",
        8192,
        4096,
        errno.EIO,
        "blocks.3/param",
    )


def test_a_message_of_ones_own() -> None:
    error = errors.IoTimeoutError("nothing moved for 60 s")
    assert str(error) == "nothing moved for 60 s"
    assert error.errno is None


class _WantingError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)
        self.second = second


def test_kept_errors_keep_no_frames() -> None:
    cause = OSError(5, "of the system")
    given = [
        errors.ReadError(path="/x", offset=4096, nbytes=8192, errno=5, key="k"),
        errors.SwapFullError("full", errno=28),
    ]
    for error in given:
        try:
            raise error from cause
        except errors.StorageError as raised:
            twin = errors.detached(raised)
        assert twin is not error
        assert (type(twin), str(twin), twin.__traceback__) == (type(error), str(error), None)
        assert isinstance(twin, errors.ReadError | errors.SwapFullError)
        assert (twin.errno, twin.path, twin.key, twin.__cause__) == (error.errno, error.path, error.key, cause)
    odd = _WantingError(1, 2)
    assert errors.detached(odd) is odd


def _going_round() -> tuple[Exception, Exception]:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first, second


@pytest.mark.timeout(60)
def test_causes_that_go_round_are_told_once() -> None:
    first, second = _going_round()
    assert errors.causes_of(first) == [first, second]
    itself = ValueError("itself")
    itself.__cause__ = itself
    assert errors.causes_of(itself) == [itself]


def test_what_was_being_handled_counts_where_it_is_asked_for() -> None:
    inner, outer = ValueError("inner"), ValueError("outer")
    outer.__context__ = inner
    assert errors.causes_of(outer) == [outer]
    assert errors.causes_of(outer, with_contexts=True) == [outer, inner]


@pytest.mark.timeout(60)
def test_frames_are_let_go_of_where_causes_go_round() -> None:
    first, second = _going_round()
    for error in (first, second):
        try:
            raise error
        except ValueError:
            pass
    assert without_frames(first) is first
    assert (first.__traceback__, second.__traceback__) == (None, None)
