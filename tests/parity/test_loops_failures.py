"""An exception anywhere costs its iteration and nothing else; threads that meet inside a model are told so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered, same
from tests.zoo import Block, Net, batch, build, loss_of, one_step

PLACES = (
    "before the model", "behind the model", "before a unit", "behind a unit", "inside a unit", "in backward",
    "before the step", "behind the step",
)  # fmt: skip


class _Bomb:
    """Raises once when armed, wherever it is called."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error
        self.is_armed = False

    def __call__(self, *unused: object) -> None:
        if self.is_armed:
            self.is_armed = False
            raise self._error("on purpose")


def _plant(bomb: _Bomb, where: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    block = model.get_submodule("blocks.1")
    return {
        "before the model": model.register_forward_pre_hook,
        "behind the model": model.register_forward_hook,
        "before a unit": block.register_forward_pre_hook,
        "behind a unit": block.register_forward_hook,
        "inside a unit": block.get_submodule("up").register_forward_hook,
        "in backward": block.register_full_backward_hook,
        "before the step": optimizer.register_step_pre_hook,
        "behind the step": optimizer.register_step_post_hook,
    }[where](bomb)


def _script(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, where: str, error: type[BaseException]
) -> list[Any]:
    bomb = _Bomb(error)
    handle = _plant(bomb, where, model, optimizer)
    seen: list[Any] = []
    for step in range(5):
        bomb.is_armed = step in (1, 2)
        try:
            loss = loss_of(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seen.append(loss.item())
        except error:
            seen.append("failed")
        assert not bomb.is_armed
        optimizer.zero_grad()
    handle.remove()
    return seen


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("checkpointing", [None, "nr", "re"])
@pytest.mark.parametrize("where", PLACES)
def test_an_exception_then_a_clean_retry(
    offload: MakeEngine, where: str, checkpointing: str | None, error: type[BaseException]
) -> None:
    """Also inside a recomputation, where peers lost count (PEER_DEEPSPEED section 4, number 12)."""
    script = partial(_script, where=where, error=error)
    make = partial(Net, checkpointing=checkpointing)
    engine = same(offload, make, script, schedule="synchronous", host={"budget": "440KiB"})
    if where != "in backward":  # that one may end before its whole order was seen
        assert engine.metrics()["order/misses"] == 0


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize("where", [place for place in PLACES if place not in ("in backward", "before the step")])
def test_an_exception_under_overlapped(offload: MakeEngine, where: str, error: type[BaseException]) -> None:
    """Between the first update in a backward and its step nothing can be taken back; elsewhere nothing is lost."""
    same(offload, Net, partial(_script, where=where, error=error), schedule="overlapped", host={"budget": "440KiB"})


def test_a_step_that_was_not_reached_is_caught_up_under_overlapped(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, schedule="overlapped")
    optimizer = infinity.AdamW(model.parameters())
    bomb = _Bomb(ArithmeticError)
    optimizer.register_step_pre_hook(bomb)
    bomb.is_armed = True
    with pytest.raises(ArithmeticError):
        one_step(model, optimizer, 0)
    with pytest.raises(infinity.IterationError, match=r"before optimizer\.step\(\)"):
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]


def test_what_a_failed_forward_leaves_of_an_accumulation(offload: MakeEngine) -> None:
    """Gradients of the micro-batches before stay, as in torch."""

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        bomb = _Bomb(KeyboardInterrupt)
        handle = model.get_submodule("blocks.2").register_forward_hook(bomb)
        seen: list[Any] = []
        for step in range(3):
            for number in range(3):
                bomb.is_armed = number == 1
                try:
                    loss = loss_of(model, batch(3 * step + number))
                    loss.backward()  # type: ignore[no-untyped-call]
                    seen.append(loss.item())
                except KeyboardInterrupt:
                    continue
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        return seen

    same(offload, Net, script, schedule="synchronous", host={"budget": "440KiB"})


# Threads -----------------------------------------------------------------------------------------------------------


class Waiting(Net):
    """Stops between two blocks, in forward or backward, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.stops_in: str | None = None
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.stops_in is not None:
                where, self.stops_in = self.stops_in, None
                if where == "forward":
                    self._stop()
                else:
                    x.register_hook(lambda grad: self._stop())  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x)
        return out

    def _stop(self) -> None:
        self.arrived.set()
        assert self.go_on.wait(100)


def _in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="user-thread")
    thread.start()
    return thread, raised


@pytest.mark.parametrize(
    ("where", "second"), [("forward", "model"), ("forward", "unit"), ("backward", "model")]
)
def test_a_second_thread_inside_the_model_is_refused(offload: MakeEngine, where: str, second: str) -> None:
    """It is told why, and the first thread's iteration has the bits of plain PyTorch."""
    plain = build(Waiting)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    expected = [one_step(plain, optimizer, step) for step in range(3)]
    model = build(Waiting)
    assert isinstance(model, Waiting)
    engine = offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    losses = [one_step(model, optimizer, 0)]
    model.stops_in = where
    thread, raised = _in_thread(lambda: losses.append(one_step(model, optimizer, 1)))
    assert model.arrived.wait(100)
    with pytest.raises(infinity.IterationError, match="An engine serves one thread at a time"):
        if second == "model":
            model(batch(7))
        else:
            model.blocks[3](torch.randn(2, 37))
    model.go_on.set()
    thread.join(100)
    assert not raised
    losses.append(one_step(model, optimizer, 2))
    assert losses == expected
    nothing_gathered(engine)


def test_threads_may_take_turns(offload: MakeEngine) -> None:
    """One after the other is fine, also after a forward that was interrupted in a thread that is gone."""
    model = build(Net)
    offload(model)
    optimizer = infinity.AdamW(model.parameters())
    bomb = _Bomb(KeyboardInterrupt)
    model.get_submodule("blocks.1").register_forward_hook(bomb)
    bomb.is_armed = True
    thread, raised = _in_thread(lambda: one_step(model, optimizer, 0))
    thread.join(100)
    assert [type(error) for error in raised] == [KeyboardInterrupt]
    thread, raised = _in_thread(lambda: one_step(model, optimizer, 0))
    thread.join(100)
    assert not raised
    one_step(model, optimizer, 1)


def test_a_model_may_call_itself(offload: MakeEngine) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x if depth == 0 else self(x, depth - 1)  # type: ignore[no-any-return]

    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        seen: list[Any] = []
        torch.manual_seed(0)
        for _ in range(3):
            loss = model(torch.randn(3, 37)).square().mean()
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen

    same(offload, Recursive, script, schedule="synchronous")


class _Words(nn.Module):
    """An embedding whose gradient is sparse, which is noticed when the backward is over, behind other gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32, sparse=True)
        self.head = nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(ids))
        return found


@pytest.mark.parametrize("schedule", ["synchronous", "deferred"])
def test_a_backward_that_fails_at_its_very_end_counts_as_failed(offload: MakeEngine, schedule: str) -> None:
    """A step would otherwise use the gradients that had arrived by then."""
    model = build(_Words)
    engine = offload(model, schedule=schedule)
    optimizer = infinity.AdamW(model.parameters())
    with pytest.raises(infinity.UnsupportedModelError, match="sparse"):
        loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.IterationError, match="the last backward failed"):
        optimizer.step()
    optimizer.zero_grad()
    nothing_gathered(engine)
    with torch.no_grad():
        loss_of(model, batch(0))
    nothing_gathered(engine)
