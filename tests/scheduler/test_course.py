"""What the training thread comes to next, and which of it passes the window."""

from __future__ import annotations

import pytest

from infinity.course import Course
from infinity.order import Access, Mode, Phase, Trace


def _trace(units: int) -> Trace:
    forward = [Access(Phase.FORWARD, unit) for unit in range(units)]
    return (*forward, *(Access(Phase.BACKWARD, unit) for unit in reversed(range(units))))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("barrier_open", [False, True])
@pytest.mark.parametrize("passing", [set(), {0}, {1, 3}, {0, 1, 2, 3, 4}])
def test_reads_are_the_accesses_that_pass_the_window(mode: Mode, *, barrier_open: bool, passing: set[int]) -> None:
    course = Course(passing.__contains__)
    course.barrier_open = barrier_open
    for trace in (_trace(5), _trace(5)[:7], (), _trace(5)):
        for position in range(len(trace) + 1):
            course.move(mode, trace, position)
            wanted = [(distance, access) for distance, access in course.upcoming() if access.unit in passing]
            assert list(course.upcoming_reads()) == wanted


def test_what_comes_next_ends_at_the_barrier_of_a_training_iteration() -> None:
    course, trace = Course(lambda unit: True), _trace(3)
    course.move(Mode.TRAIN, trace, 4)
    assert list(course.upcoming()) == [(0, trace[4]), (1, trace[5])]
    course.barrier_open = True
    assert list(course.upcoming()) == list(enumerate([*trace[4:], *trace[:4]]))
    course.barrier_open = False
    course.move(Mode.EVAL, trace, 4)
    assert len(list(course.upcoming())) == len(trace)


def test_whether_a_unit_passes_is_asked_once_for_a_trace() -> None:
    asked: list[int] = []
    course, trace = Course(lambda unit: asked.append(unit) is not None), _trace(4)
    for position in range(len(trace)):
        course.move(Mode.TRAIN, trace, position)
        assert list(course.upcoming_reads()) == []
    assert len(asked) == len(trace)


def test_nothing_is_expected_after_leaving() -> None:
    course = Course(lambda unit: True)
    course.move(Mode.TRAIN, _trace(3), 1)
    course.leave()
    assert list(course.upcoming()) == list(course.upcoming_reads()) == []
