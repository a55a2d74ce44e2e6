"""When the backward of a run is over, from the order of autograd's nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.runs import OpenRuns, Run


class Backward:
    """Runs over plain tensors; notes what is closed while each of them begins."""

    def __init__(self) -> None:
        self.closed: list[Any] = []
        self.seen: dict[Any, list[Any]] = {}
        self.runs = OpenRuns(self.closed.append)

    def run(self, name: Any, x: Tensor, depth: int = 2) -> Tensor:
        run = Run.start(name)
        for _ in range(depth):
            x = x.sin()
        run.end()
        x.register_hook(lambda _: self._begin(name, run))  # type: ignore[no-untyped-call]
        return x

    def _begin(self, name: Any, run: Run) -> None:
        self.runs.begin(run)
        self.seen[name] = list(self.closed)


def test_a_run_is_over_when_an_earlier_one_begins() -> None:
    backward = Backward()
    x = torch.ones(3, requires_grad=True)
    a, b, c = (backward.run(name, x) for name in "abc")  # beside each other: nothing but the numbers orders them
    (a + b + c).sum().backward()  # type: ignore[no-untyped-call]
    assert backward.seen == {"c": [], "b": ["c"], "a": ["c", "b"]}


def test_what_lies_in_another_run_does_not_end_it() -> None:
    backward = Backward()
    outer = Run.start("outer")  # type: ignore[arg-type]
    y = backward.run("inner", torch.ones(3, requires_grad=True).exp()).exp()
    outer.end()
    y.register_hook(lambda _: backward.runs.begin(outer))  # type: ignore[no-untyped-call]
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert backward.seen == {"inner": []}
    backward.runs.pass_by(outer)
    backward.runs.pass_by(outer)
    assert backward.closed == ["outer"]


@pytest.mark.parametrize("known", [True, False])
def test_the_end_of_the_graph_task_ends_the_rest(known: bool) -> None:
    closed: list[Any] = []
    runs = OpenRuns(closed.append)
    run = Run.start("unit") if known else Run.of_unknown_start("unit")  # type: ignore[arg-type]
    x = torch.ones(3, requires_grad=True).exp()
    tasks = []

    def begin(_: Tensor) -> None:
        runs.begin(run)
        tasks.append(torch._C._current_graph_task_id())

    x.register_hook(begin)  # type: ignore[no-untyped-call]
    x.sum().backward()  # type: ignore[no-untyped-call]
    runs.end_task(tasks[0] + 1)
    assert not closed
    runs.end_task(tasks[0])
    assert closed == ["unit"]
    runs.clear()
