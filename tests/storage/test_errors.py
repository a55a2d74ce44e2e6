from __future__ import annotations

import errno

import pytest

from storage import errors


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
