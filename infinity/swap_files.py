"""From the settings of a run to those of its store: how swap files are read and written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.config import Calibrate, NvmeConfig
from infinity.errors import ConfigError
from infinity.observe.trace import Trace
from storage.backends.base import Backend
from storage.backends.recording import IoLog
from storage.backends.tracing import TracingBackend, TransferSpan
from storage.calibration_cache import speeds_of
from storage.drives import WrapBackend
from storage.store import ShardStore, StorageOptions
from storage.versioned import VersionedStore


def storage_options(
    nvme: NvmeConfig, *, write_memory_nbytes: int | None = None, files_nbytes: int | None = None
) -> StorageOptions:
    """Options of a store.

    Args:
        write_memory_nbytes: memory of each drive's writes in flight, by which they are paced; None: they are not.
        files_nbytes: this process's part of the budget of all drives; None: no limit.
    """
    return StorageOptions(
        engine=str(nvme.engine),
        block_nbytes=nvme.block_nbytes,
        threads=nvme.threads,
        calibrate=nvme.calibrate.value,
        checksum=nvme.checksum.value,
        eio_retries=nvme.eio_retries,
        write_memory_nbytes=None if write_memory_nbytes is None else max(write_memory_nbytes, 1),
        files_nbytes=files_nbytes,
        retry_full_s=nvme.retry_full_s,
    )


def create_volatile(store: ShardStore, key: str, nbytes: int) -> None:
    """Make a key of what is overwritten in place and lasts no longer than the run: no commit keeps it."""
    if isinstance(store, VersionedStore):
        store.create(key, nbytes, is_volatile=True)
    else:
        store.create(key, nbytes)


def speeds_to_start_with(nvme: NvmeConfig, paths: Sequence[Path]) -> Sequence[float] | None:
    """Of several drives, as calibrated; None: equal until they are measured."""
    return speeds_of(paths) if len(paths) > 1 and nvme.calibrate is not Calibrate.OFF else None


def open_log(nvme: NvmeConfig, rank: int | None, stack: ExitStack) -> IoLog | None:
    """The record of all transfers, if one is asked for; with several ranks each has its own.

    Raises:
        ConfigError: it cannot be written.
    """
    path = nvme.io_log
    if path is None:
        return None
    if rank is not None:
        path = path.with_name(f"{path.name}.rank{rank}")
    try:
        log = IoLog(path)
    except OSError as error:
        raise ConfigError(f"nvme.io_log = {path}: cannot be written: {error.strerror or error}") from error
    stack.callback(log.close)
    return log


def traced(trace: Trace, log: IoLog | None, inner: WrapBackend | None = None) -> WrapBackend:
    """Backends that note every transfer in the trace, and in the log if there is one.

    Args:
        inner: put between them and the drive; the user's.
    """

    def note(span: TransferSpan) -> None:
        duration_s = span.end_s - span.start_s
        trace.add(span.key, span.op.value, span.start_s, duration_s, span.directory, nbytes=span.nbytes)

    def wrap(backend: Backend) -> Backend:
        used = backend if inner is None else inner(backend)
        return TracingBackend(used if log is None else log.wrap(used), note)

    return wrap
