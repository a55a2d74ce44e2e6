"""Clocks of the late backends."""

from __future__ import annotations

import doctest
import threading

import pytest

from storage.backends import clock as clock_module
from storage.backends.clock import ManualClock, SystemClock


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(clock_module).failed == 0


def test_manual_time_runs_actions_in_order_and_stops_at_each() -> None:
    clock = ManualClock()
    seen: list[tuple[str, float]] = []
    clock.call_at(3.0, lambda: seen.append(("c", clock.now_s())))
    clock.call_at(1.0, lambda: seen.append(("a", clock.now_s())))
    clock.call_at(1.0, lambda: clock.call_at(2.0, lambda: seen.append(("b", clock.now_s()))))
    clock.advance(2.5)
    assert seen == [("a", 1.0), ("b", 2.0)]
    assert (clock.now_s(), clock.next_s()) == (2.5, 3.0)
    clock.advance(0.5)
    assert seen[-1] == ("c", 3.0)


def test_manual_time_runs_overdue_actions_without_going_back() -> None:
    clock = ManualClock()
    clock.advance(5.0)
    seen: list[float] = []
    clock.call_at(1.0, lambda: seen.append(clock.now_s()))
    assert seen == []
    clock.advance(0.0)
    assert seen == [5.0]


def test_closed_manual_clock_drops_everything() -> None:
    clock = ManualClock()
    clock.call_at(1.0, lambda: pytest.fail("a dropped action ran"))
    clock.close()
    clock.call_at(1.0, lambda: pytest.fail("an action after close ran"))
    clock.advance(2.0)


def test_system_clock_runs_in_order_of_time_on_its_own_thread() -> None:
    clock = SystemClock()
    seen: list[str] = []
    done = threading.Event()
    now_s = clock.now_s()
    clock.call_at(now_s + 0.02, lambda: (seen.append(threading.current_thread().name), done.set()))
    clock.call_at(now_s + 0.01, lambda: seen.append("earlier"))
    assert done.wait(10)
    assert seen == ["earlier", "infinity-io-clock"]
    clock.close()
    assert not any(thread.name == "infinity-io-clock" for thread in threading.enumerate())


def test_system_clock_survives_a_broken_action(caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    done = threading.Event()

    def broken() -> None:
        raise ValueError("on purpose")

    clock.call_at(0.0, broken)
    clock.call_at(0.0, done.set)
    assert done.wait(10)
    clock.close()
    assert "an action of the clock failed" in caplog.text


def test_system_clock_closes_with_actions_pending_and_from_its_own_thread() -> None:
    clock = SystemClock()
    closed = threading.Event()
    clock.call_at(clock.now_s() + 3600, lambda: pytest.fail("a dropped action ran"))
    clock.call_at(0.0, lambda: (clock.close(), closed.set()))
    assert closed.wait(10)
    clock.close()
    clock.call_at(0.0, lambda: pytest.fail("an action after close ran"))
