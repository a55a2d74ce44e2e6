"""Counters and latency histograms of transfers."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, replace

from storage.types import Op, TrafficTag


@dataclass(slots=True)
class IoRecord:
    """Transfers of one direction and tag, added up.

    Attributes:
        moved_nbytes: bytes read or written, padding included.
        payload_nbytes: the same without alignment padding.
        operations: number of transfers.
        seconds: time from submission to completion, added up over transfers.
    """

    op: Op
    tag: TrafficTag
    moved_nbytes: int = 0
    payload_nbytes: int = 0
    operations: int = 0
    seconds: float = 0.0


class IoStats:
    """Thread safe; counts successful transfers when they complete."""

    def __init__(self) -> None:
        self._records: dict[tuple[Op, TrafficTag], IoRecord] = {}
        self._latencies: dict[Op, Counter[int]] = {op: Counter() for op in Op}
        self._lock = threading.Lock()

    def add(self, op: Op, tag: TrafficTag, moved_nbytes: int, payload_nbytes: int, seconds: float | None) -> None:
        """Count a transfer; `seconds` is None for a part of another one, which has no latency of its own."""
        with self._lock:
            record = self._records.get((op, tag))
            if record is None:
                record = self._records[op, tag] = IoRecord(op, tag)
            record.moved_nbytes += moved_nbytes
            record.payload_nbytes += payload_nbytes
            record.operations += 1
            if seconds is None:
                return
            record.seconds += seconds
            self._latencies[op][int(seconds * 1e6).bit_length()] += 1

    def snapshot(self) -> list[IoRecord]:
        """Every record as it is now."""
        with self._lock:
            return [replace(record) for record in self._records.values()]

    def total(self, op: Op, kind: str | None = None, step: int | None = None) -> IoRecord:
        """The sum over all tags that match; its tag is meaningless."""
        total = IoRecord(op, TrafficTag(kind or "*", step if step is not None else -1))
        for record in self.snapshot():
            matches_kind = kind is None or record.tag.kind == kind
            if record.op is op and matches_kind and (step is None or record.tag.step == step):
                total.moved_nbytes += record.moved_nbytes
                total.payload_nbytes += record.payload_nbytes
                total.operations += record.operations
                total.seconds += record.seconds
        return total

    def latency_histogram(self, op: Op) -> dict[float, int]:
        """Transfers by latency: upper bound of a bucket in seconds (powers of two of a microsecond) → count."""
        with self._lock:
            return {(1 << bits) / 1e6: count for bits, count in sorted(self._latencies[op].items())}
