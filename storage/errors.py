"""Errors of the storage layer.

StorageError
├── IoError(OSError): ReadError, WriteError, ShortIoError, IoTimeoutError
├── CapacityError: SwapFullError, PoolExhaustedError
├── IntegrityError            checksum or generation mismatch, unreadable manifest
├── SwapInUseError            another live process owns this folder
├── PluginError               which distribution, what of it cannot be used, why
└── ClosedError

An I/O error says what was done to which key, in which file, where, how much, and what the system answered.
"""

from __future__ import annotations

import copy
import errno as errno_names
import os


class StorageError(Exception):
    """Base of every error the storage layer raises on purpose."""


class _LocatedError(StorageError):
    """Of a span of a file.

    Attributes:
        path: file of the transfer, or "".
        offset, nbytes: what part of it, or -1.
        errno: the system's error number, or None.
        key: whose bytes they are, or "".
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        offset: int = -1,
        nbytes: int = -1,
        errno: int | None = None,
        key: str = "",
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno  # after OSError's initialiser, which sets it too
        self.key = key


class IoError(_LocatedError, OSError):
    """A transfer failed."""

    verb = "transfer"

    def __str__(self) -> str:
        if message := str(self.args[0]):
            return message
        name = errno_names.errorcode.get(self.errno or 0, "?")
        reason = "unknown error" if self.errno is None else f"{os.strerror(self.errno)} ({name})"
        where = f"{self.nbytes} bytes at offset {self.offset} of {self.path}"
        return f"{self.verb} of {where} for {self.key!r} failed: {reason}"


class ReadError(IoError):
    """A read failed. The data on disk is as it was."""

    verb = "read"


class WriteError(IoError):
    """A write failed. The data is still in memory; what the disk holds at this place is undefined."""

    verb = "write"


class ShortIoError(IoError):
    """A transfer ended early and could not be resumed: the file is shorter than what was stored in it."""

    verb = "complete transfer"


class IoTimeoutError(IoError):
    """Nothing made progress for too long."""


class CapacityError(StorageError):
    """There is not enough room. Says what is needed and what there is."""


class SwapFullError(_LocatedError, CapacityError):
    """The disk or the swap file cannot hold what is asked for. Where, is unset when space was reserved."""


class PoolExhaustedError(CapacityError):
    """The host memory pool cannot hold another lease."""


class IntegrityError(_LocatedError):
    """Stored data is not what was written, or a manifest cannot be read. Nothing was changed or thrown away.

    Attributes:
        generation: of the key's content, counted by its writes or, in a versioned store, by commits; -1 if unknown.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        offset: int = -1,
        nbytes: int = -1,
        key: str = "",
        generation: int = -1,
    ) -> None:
        super().__init__(message, path=path, offset=offset, nbytes=nbytes, key=key)
        self.generation = generation


class PluginError(StorageError):
    """What another distribution brings (an entry point) is not there or cannot be used."""


class SwapInUseError(StorageError):
    """Another live process owns the folder."""


class ClosedError(StorageError):
    """The object was closed before."""


def detached(error: BaseException) -> BaseException:
    """The same error as an object of its own, for whoever keeps it: without the frames that it is raised in.

    They would keep alive what their variables hold. Itself, if it cannot be copied.
    """
    try:
        twin = copy.copy(error)
    except Exception:  # an error of somebody else's, whose initialiser wants more than it keeps
        return error
    if isinstance(error, OSError) and isinstance(twin, OSError):
        twin.errno = error.errno  # which no copy has
    twin.__cause__ = error.__cause__
    return twin


def causes_of(error: BaseException, *, with_contexts: bool = False) -> list[BaseException]:
    """The error, what it was raised from, and so on; each once, also where they go round.

    Args:
        with_contexts: of one that was raised from nothing, what was being handled then.
    """
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in found):
        found.append(cause)
        cause = cause.__cause__ or (cause.__context__ if with_contexts else None)
    return found
