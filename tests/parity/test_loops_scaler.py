"""A dynamic loss scale: the bits, the scales and the skipped steps of `torch.amp.GradScaler` on a master in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import same
from tests.parity.loops import gathered_parameters
from tests.parity.test_loops_optimizers import Case, Halves
from tests.zoo import Net, batch, build, loss_of

OVERFLOWS = (1, 2, 5)
SCALE = {"init_scale": 2.0**10, "growth_interval": 2}
HELD, SPILLED = {"budget": "1MiB"}, {"budget": "340KiB"}
HOSTS = pytest.mark.parametrize("host", [HELD, SPILLED], ids=["held", "spilled"])
ADAMW = Case(infinity.AdamW, torch.optim.AdamW, 8, {"lr": 1e-2, "weight_decay": 0.1, "fused": True})


def _loss(model: nn.Module, step: int, micro_batch: int) -> Tensor:
    loss = loss_of(model, batch(2 * step + micro_batch))
    return loss * float("inf") if step in OVERFLOWS and micro_batch == 0 else loss


def _scaled_loop(
    model: nn.Module, scaler: Any, step: Callable[[], None], prepare: Callable[[], None], zero: Callable[[], None]
) -> list[float]:
    seen: list[float] = []
    for number in range(8):
        for micro_batch in range(2):
            loss = _loss(model, number, micro_batch)
            scaler.scale(loss).backward()
            seen.append(loss.item())
        prepare()
        step()
        scaler.update()
        seen.append(scaler.get_scale())
        zero()
    return seen


@HOSTS
@pytest.mark.parametrize("clips", [False, True])
def test_fp16(offload: MakeEngine, host: dict[str, Any], clips: bool) -> None:
    reference = Halves(ADAMW, torch.float16)
    theirs = torch.amp.GradScaler("cpu", **SCALE)  # type: ignore[arg-type]
    norms: list[Tensor] = []

    def hand_over() -> None:
        for name, parameter in reference.model.named_parameters():
            reference.masters[name].grad, parameter.grad = parameter.grad, None
        if clips:
            theirs.unscale_(reference.optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(reference.masters.values(), 0.5))

    def step() -> None:
        theirs.step(reference.optimizer)
        with torch.no_grad():
            for name, parameter in reference.model.named_parameters():
                parameter.copy_(reference.masters[name].half())

    expected = _scaled_loop(reference.model, theirs, step, hand_over, reference.optimizer.zero_grad)
    model = build(Net)
    device = {"kind": "fake", "budget": "8MiB"}
    engine = offload(model, precision="fp16", host=host, device=device, chunk="48KiB")
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = infinity.GradScaler(**SCALE)  # type: ignore[arg-type]
    ours: list[Tensor] = []

    def clip() -> None:
        if clips:
            scaler.unscale_(optimizer)
            ours.append(infinity.clip_grad_norm_(model.parameters(), 0.5))

    found = _scaled_loop(model, scaler, lambda: scaler.step(optimizer), clip, optimizer.zero_grad)
    assert str(found) == str(expected)  # infinities and NaNs are equal then
    assert [str(norm.item()) for norm in ours] == [str(norm.item()) for norm in norms]
    assert scaler.skipped_steps == len(OVERFLOWS)
    assert bool(engine.plan.placement.spilled_gradients) == (host is SPILLED)
    for name, parameter in gathered_parameters(model).items():
        assert torch.equal(parameter, reference.model.get_parameter(name)), name


@HOSTS
def test_a_skipped_step_moves_no_state(offload: MakeEngine, host: dict[str, Any]) -> None:
    model = build(Net)
    engine = offload(model, precision="fp16", host=host)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    scaler = infinity.GradScaler()
    before = gathered_parameters(model)
    chunks, moved = engine.metrics()["optimizer/chunks"], engine.traffic.total["nvme_write_bytes/state"]
    scaler.scale(_loss(model, OVERFLOWS[0], 0)).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**15
    assert engine.metrics()["optimizer/chunks"] == chunks
    assert engine.traffic.total["nvme_write_bytes/state"] == moved
    assert all(torch.equal(parameter, before[name]) for name, parameter in gathered_parameters(model).items())
    assert all(step == 0 for state in engine._runtime.states.values() for step in state.steps)


def _loop_of(scaler_of: Callable[[torch.optim.Optimizer], Any]) -> Any:
    def script(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        scaler = scaler_of(optimizer)
        found = _scaled_loop(model, scaler, lambda: scaler.step(optimizer), lambda: None, optimizer.zero_grad)
        return [str(value) for value in found]

    return script


@pytest.mark.parametrize("host", [HELD, {"budget": "440KiB"}], ids=["held", "spilled"])
def test_fp32(offload: MakeEngine, host: dict[str, Any]) -> None:
    """The first overflow comes before the engine knows that there is a loss scale."""

    def scaler_of(optimizer: torch.optim.Optimizer) -> Any:
        is_ours = isinstance(optimizer, infinity.AdamW)
        return infinity.GradScaler(**SCALE) if is_ours else torch.amp.GradScaler("cpu", **SCALE)  # type: ignore[arg-type]

    same(offload, Net, _loop_of(scaler_of), schedule="synchronous", host=host)


def test_the_scaler_of_torch_works_on_gradients_in_memory(offload: MakeEngine) -> None:
    script = _loop_of(lambda optimizer: torch.amp.GradScaler("cpu", **SCALE))  # type: ignore[arg-type]
    same(offload, Net, script, schedule="synchronous", host=HELD)


def test_state_goes_both_ways() -> None:
    theirs, ours = torch.amp.GradScaler("cpu", **SCALE), infinity.GradScaler()  # type: ignore[arg-type]
    theirs.scale(torch.ones(()))  # makes its scale
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == ours.get_scale() == SCALE["init_scale"]
    with pytest.raises(infinity.ConfigError, match="'growth_factor' is missing"):
        ours.load_state_dict({"scale": 2.0})


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"init_scale": 1000.0}, "init_scale is 1000.0; it must be a power of two"),
        ({"growth_factor": 1.5}, "growth_factor is 1.5"),
        ({"growth_factor": 0.5}, "greater than 1"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        ({"growth_interval": 0}, "at least 1"),
    ],
    ids=str,
)
def test_settings_out_of_range(bad: dict[str, Any], match: str) -> None:
    with pytest.raises(infinity.ConfigError, match=match):
        infinity.GradScaler(**bad)


def test_what_is_refused(offload: MakeEngine) -> None:
    with pytest.raises(infinity.ConfigError, match="'overlapped' contradicts precision='fp16'"):
        offload(build(Net), precision="fp16", schedule="overlapped")
    model = build(Net)
    offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters())
    scaler = infinity.GradScaler()
    scaler.scale(loss_of(model, batch(0))).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    with pytest.raises(infinity.IterationError, match="call it once per step"):
        scaler.unscale_(optimizer)
    with pytest.raises(infinity.IterationError, match="after the loss scale had been taken out"):
        scaler.scale(loss_of(model, batch(1))).backward()  # type: ignore[no-untyped-call]
    optimizer.zero_grad()
    scaler.step(optimizer)
    with pytest.raises(infinity.IterationError, match=r"twice without update\(\)"):
        scaler.step(optimizer)
    with pytest.raises(infinity.ConfigError, match=r"use torch\.amp\.GradScaler"):
        infinity.GradScaler().step(torch.optim.SGD([torch.zeros(1)]))
    other = build(Net)
    offload(other, schedule="overlapped")
    optimizer = infinity.AdamW(other.parameters())
    scaler.update()
    scaler.scale(loss_of(other, batch(0))).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.IterationError, match="with the loss scale in them"):
        scaler.step(optimizer)


def test_a_scaler_that_is_off_lets_everything_through(offload: MakeEngine) -> None:
    assert infinity.GradScaler(enabled=False).get_scale() == 1.0
    model = build(Net)
    offload(model)
    optimizer = infinity.AdamW(model.parameters())
    scaler = infinity.GradScaler(enabled=False)
    loss = loss_of(model, batch(0))
    assert scaler.scale(loss) is loss
    loss.backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == {}
