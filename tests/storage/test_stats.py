from __future__ import annotations

import pytest

from storage.stats import IoStats
from storage.types import Op, TrafficTag
from tests.storage.helpers import run_threads


def test_totals_by_kind_and_step() -> None:
    stats = IoStats()
    stats.add(Op.READ, TrafficTag("param", 1), 8192, 5000, 0.5)
    stats.add(Op.READ, TrafficTag("param", 2), 4096, 4096, 0.25)
    stats.add(Op.READ, TrafficTag("state", 1), 4096, 4096, 0.25)
    stats.add(Op.WRITE, TrafficTag("param", 1), 4096, 4096, 0.25)
    assert stats.total(Op.READ).moved_nbytes == 16384
    assert stats.total(Op.READ, kind="param").payload_nbytes == 9096
    assert stats.total(Op.READ, step=1).operations == 2
    assert stats.total(Op.READ, kind="param", step=1).seconds == 0.5
    assert stats.total(Op.WRITE, kind="state").operations == 0


def test_a_snapshot_does_not_change() -> None:
    stats = IoStats()
    stats.add(Op.READ, TrafficTag("param", 1), 1, 1, 0.0)
    (record,) = stats.snapshot()
    stats.add(Op.READ, TrafficTag("param", 1), 1, 1, 0.0)
    assert record.operations == 1


def test_histogram_buckets_are_upper_bounds() -> None:
    stats = IoStats()
    for seconds in (0.0, 3e-6, 1.0):
        stats.add(Op.READ, TrafficTag("param", 1), 1, 1, seconds)
    histogram = stats.latency_histogram(Op.READ)
    assert list(histogram.values()) == [1, 1, 1]
    assert list(histogram) == pytest.approx([1e-6, 4e-6, 1.048576])


def test_no_count_is_lost_between_threads() -> None:
    stats = IoStats()

    def work(number: int) -> None:
        for _ in range(500):
            stats.add(Op.READ, TrafficTag("param", number % 2), 1, 1, 0.0)

    run_threads(4, work)
    assert stats.total(Op.READ).operations == 2000
