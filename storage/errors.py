"""Errors of the storage layer.

StorageError
├── IoError(OSError): ReadError, WriteError, ShortIoError, IoTimeoutError
├── CapacityError: SwapFullError, PoolExhaustedError
├── IntegrityError            checksum or generation mismatch, unreadable manifest
├── SwapInUseError            another live process owns this folder
└── ClosedError

An I/O error says what was done to which key, in which file, where, how much, and what the system answered.
"""

from __future__ import annotations

import errno as errno_names
import os


class StorageError(Exception):
    """Base of every error the storage layer raises on purpose."""


class IoError(StorageError, OSError):
    """A transfer failed.

    Attributes:
        path: file of the transfer, or "".
        offset, nbytes: what part of it, or -1.
        errno: the system's error number, or None.
        key: whose bytes they are, or "".
    """

    verb = "transfer"

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
        if not message:
            name = errno_names.errorcode.get(errno or 0, "?")
            reason = "unknown error" if errno is None else f"{os.strerror(errno)} ({name})"
            message = f"{self.verb} of {nbytes} bytes at offset {offset} of {path} for {key!r} failed: {reason}"
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.errno = errno
        self.key = key


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


class SwapFullError(CapacityError):
    """The disk or the swap file cannot hold what is asked for.

    Attributes:
        path, offset, nbytes, errno, key: of the write that found no room, as in IoError; unset when space was reserved.
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
        self.errno = errno
        self.key = key


class PoolExhaustedError(CapacityError):
    """The host memory pool cannot hold another lease."""


class IntegrityError(StorageError):
    """Stored data is not what was written, or a manifest cannot be read. Nothing was changed or thrown away.

    Attributes:
        path, offset, nbytes, key: where the damage is, as in IoError.
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
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.key = key
        self.generation = generation


class SwapInUseError(StorageError):
    """Another live process owns the folder."""


class ClosedError(StorageError):
    """The object was closed before."""
