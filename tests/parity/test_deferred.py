"""`schedule="deferred"`: updates run in the next forward, and whoever looks at the state sees it as after the step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.models.gpt import Gpt, GptShape, init_weights
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import IoError
from storage.types import IoRequest, Op
from tests.conftest import MakeEngine, small_config
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import Loop, assert_parity, gathered_parameters, train_plain
from tests.zoo import Net, Skipping, batch, build, loss_of, one_step

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
HELD, SPILLED = {"budget": "1MiB"}, {"budget": "360KiB"}
Pair = tuple[nn.Module, nn.Module, torch.optim.Optimizer, infinity.AdamW, infinity.Engine]


def _start(offload: MakeEngine, make: Callable[[], nn.Module] = Net, **settings: Any) -> Pair:
    """A plain model and an offloaded one with the same values, and their optimizers."""
    plain, ours = build(make), build(make)
    engine = offload(ours, **({"schedule": "deferred", "host": SPILLED} | settings))
    return plain, ours, torch.optim.AdamW(plain.parameters(), fused=True, **HYPER), _adamw(ours), engine


def _adamw(model: nn.Module) -> infinity.AdamW:
    return infinity.AdamW(model.parameters(), **HYPER)


def _train_both(pair: Pair, number: int) -> None:
    plain, ours, theirs, mine, _ = pair
    assert one_step(plain, theirs, number) == one_step(ours, mine, number)


def _assert_same(pair: Pair) -> None:
    for name, parameter in gathered_parameters(pair[1]).items():
        assert torch.equal(parameter, pair[0].get_parameter(name)), name
    nothing_gathered(pair[4])


def _chunks(engine: infinity.Engine) -> int:
    """Chunks updated so far; `engine.metrics()` would update what is deferred."""
    return engine._runtime.pipeline.chunks_done


def _hear(engine: infinity.Engine) -> None:
    """Until the I/O loop has heard what the training thread has told it."""

    async def nothing() -> None:
        pass

    engine._runtime.io.submit(nothing(), "nothing").wait(100)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_step_leaves_the_forward_finds(offload: MakeEngine, precision: str) -> None:
    """The state on NVMe is not touched before somebody needs it, but for what the window reads ahead."""
    model = build(Net)
    engine = offload(model, schedule="deferred", host=SPILLED, precision=precision, chunk="16KiB")
    optimizer = _adamw(model)
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    deferred = engine._runtime.read_ahead._deferred
    _hear(engine)
    total = sum(len(state.records) for state in engine._runtime.states.values())
    last = engine._runtime.groups[-1].index
    assert last in deferred, "the window cannot hold every shard, so the last update has to wait"
    optimizer.zero_grad()
    loss_of(model, batch(1))
    assert not engine._runtime.read_ahead._deferred
    engine.metrics()
    assert _chunks(engine) == total


@pytest.mark.parametrize("host", [HELD, SPILLED], ids=["held", "spilled"])
@pytest.mark.parametrize("clipped", ["never", "sometimes", "always"])
@pytest.mark.parametrize("in_optimizer", [True, False], ids=["max_grad_norm", "clip_grad_norm_"])
def test_clipping_and_accumulation(offload: MakeEngine, host: dict[str, Any], clipped: str, in_optimizer: bool) -> None:
    free = train_plain(Loop(Net, max_norm=1e9, accumulate=(1, 2)))
    norms = sorted(float(norm) for norm in free.norms)
    max_norm = {"never": 1e9, "sometimes": norms[1] * 1.001, "always": norms[0] / 10}[clipped]
    loop = Loop(Net, max_norm=max_norm, accumulate=(1, 2))
    engine = assert_parity(
        loop,
        offload,
        clip_in_optimizer=in_optimizer,
        traffic_from_step=0 if in_optimizer else 1,
        schedule="deferred",
        host=host,
    )
    assert bool(engine.plan.placement.spilled_gradients) == (host is SPILLED)


def test_settings_are_those_of_the_step(offload: MakeEngine) -> None:
    """Per group; a scheduler that changes them before the next forward changes the next step only."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *rest = model.parameters()
        return [{"params": [first], "lr": 0.25, "betas": (0.5, 0.6)}, {"params": rest, "weight_decay": 0.5}]

    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1)
    loop = Loop(Net, groups=groups, schedule=decay, hyper={"lr": 1e-2})
    assert_parity(loop, offload, schedule="deferred", host=SPILLED)


def _evaluate(engine: infinity.Engine, model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(9))


def _gather_last(engine: infinity.Engine, model: nn.Module) -> None:
    with infinity.gathered(model.get_submodule("head")):
        pass


def _edit(engine: infinity.Engine, model: nn.Module) -> None:
    with infinity.gathered(model.get_submodule("head")), torch.no_grad():
        model.get_parameter("head.weight").mul_(1.0)


LOOKS: dict[str, Callable[[infinity.Engine, nn.Module], object]] = {
    "evaluation": _evaluate,
    "gathered": _gather_last,
    "gathered and edited": _edit,
    "metrics": lambda engine, model: engine.metrics(),
    "traffic": lambda engine, model: engine.traffic,
    "moments": lambda engine, model: engine.read_optimizer_state(),
}


@pytest.mark.somewhere
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_looking_between_steps_changes_nothing(offload: MakeEngine, look: str, device: str) -> None:
    pair = _start(offload, device={"kind": device, "budget": "8MiB"})
    for number in range(4):
        _train_both(pair, number)
        LOOKS[look](pair[4], pair[1])
    _assert_same(pair)


def test_state_dict_is_that_of_the_step(offload: MakeEngine) -> None:
    pair = _start(offload)
    for number in range(2):
        _train_both(pair, number)
    ours, plain = pair[3].state_dict()["state"], pair[2].state_dict()["state"]
    assert ours.keys() == plain.keys()
    for number, state in plain.items():
        assert all(torch.equal(ours[number][name], value) for name, value in state.items())


def test_saved_is_the_state_after_the_step(offload: MakeEngine, tmp_path: Path) -> None:
    pair = _start(offload)
    for number in range(2):
        _train_both(pair, number)
    pair[4].save(tmp_path / "saved")
    other = build(Net)
    engine = offload(other, schedule="synchronous")
    engine.load(tmp_path / "saved")
    for name, parameter in gathered_parameters(other).items():
        assert torch.equal(parameter, pair[0].get_parameter(name)), name
    _train_both(pair, 2)
    _assert_same(pair)


def test_a_step_inside_gathered_is_seen_there(offload: MakeEngine) -> None:
    pair = _start(offload)
    plain, ours, theirs, mine, _ = pair
    for model in (plain, ours):
        loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    theirs.step()
    with infinity.gathered(ours.get_submodule("head")):
        mine.step()
        assert torch.equal(ours.get_parameter("head.weight"), plain.get_parameter("head.weight"))
    theirs.zero_grad()
    mine.zero_grad()
    _train_both(pair, 1)
    _assert_same(pair)


def test_units_that_the_forward_skips_are_updated_by_the_next_step(offload: MakeEngine) -> None:
    pair = _start(offload, Skipping)
    for number in range(6):
        _train_both(pair, number)
    _assert_same(pair)


def test_a_gradient_set_before_the_update_of_the_last_has_run(offload: MakeEngine) -> None:
    """It replaces no gradient that an update still waits with."""
    pair = _start(offload, host=HELD)
    _train_both(pair, 0)
    for model, optimizer in zip(pair[:2], pair[2:4], strict=True):
        optimizer.zero_grad()
        weight = model.get_parameter("head.weight")
        weight.grad = torch.full(tuple(weight.shape), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    _train_both(pair, 1)
    _assert_same(pair)


def test_two_steps_without_a_forward_between(offload: MakeEngine) -> None:
    pair = _start(offload)
    _train_both(pair, 0)
    for optimizer in pair[2:4]:
        optimizer.step()  # no gradients: nothing to update
    _train_both(pair, 1)
    _assert_same(pair)


def test_traffic_between_steps_is_no_part_of_a_step(offload: MakeEngine) -> None:
    """Looking forces updates, whose reads are counted in the total only."""
    pair = _start(offload)
    for number in range(3):
        _train_both(pair, number)
        pair[4].metrics()
    traffic = pair[4].traffic
    for step, counted in enumerate(traffic.per_step):
        expected = pair[4].plan.expected_traffic(step)
        assert counted["nvme_read_bytes"] == expected.read_nbytes
        assert counted["nvme_write_bytes"] == expected.write_nbytes
    assert traffic.total["nvme_read_bytes/param_forced"] > 0


def test_reads_less_than_synchronous(offload: MakeEngine) -> None:
    """The forward reads what the update needs: parameters of what is streamed are read twice, not three times.

    Both spill the same gradients, but for those that wait for `step()` in transit.
    """
    moved, waiting = {}, 0
    for schedule in ("synchronous", "deferred"):
        engine = assert_parity(Loop(Net), offload, schedule=schedule, host=SPILLED)
        moved[schedule] = engine.traffic.per_step[2]
        placement = engine.plan.placement
        lasting = [group for group in engine._runtime.groups if group.index in placement.lasting_gradients]
        waiting += sum(group.layout.payload_numel * 4 for group in lasting)
        if schedule == "deferred":
            once = sum(
                group.layout.payload_numel * 4
                for group in engine._runtime.groups
                if group.index not in placement.pinned_params | placement.keep_at_boundary
            )
    assert moved["synchronous"]["nvme_read_bytes/param"] - moved["deferred"]["nvme_read_bytes/param"] == once > 0
    assert moved["synchronous"]["nvme_write_bytes"] + waiting == moved["deferred"]["nvme_write_bytes"]


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize("where", ["forward", "metrics"])
def test_a_lost_update_is_told_where_it_is_needed(
    offload: MakeEngine, op: Op, where: str
) -> None:
    made: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        made.append(FaultyBackend(backend))
        return made[-1]

    def of_the_last(request: IoRequest) -> bool:
        return "head" in request.key and "/state" in request.key

    model = build(Net)
    engine = offload(model, schedule="deferred", host=SPILLED, wrap_backend=wrap)
    optimizer = _adamw(model)
    one_step(model, optimizer, 0)
    engine.metrics()
    made[-1].inject(Fault.IO_ERROR, op=op, when=of_the_last)
    one_step(model, optimizer, 1)
    with pytest.raises(IoError, match="head"):
        if where == "forward":
            for number in (2, 3):  # a write fails behind the forward that uses what it writes
                loss_of(model, batch(number))
        else:
            engine.metrics()
    for _ in range(2):
        with pytest.raises((IoError, infinity.IterationError)) as told:
            loss_of(model, batch(4))
    assert isinstance(told.value, infinity.IterationError)
    assert "start again from the last saved state" in str(told.value)


def test_closing_with_updates_that_wait(offload: MakeEngine) -> None:
    """Nothing stays held; the fixture looks."""
    pair = _start(offload)
    _train_both(pair, 0)
    pair[4].close()
    assert not pair[4]._runtime.read_ahead._deferred


def test_closing_while_updates_are_made_ends_them_quietly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A task that the loop still runs must not find the worker gone that computes for it."""
    inputs = torch.zeros(2, 64, dtype=torch.long)
    for number in range(6):
        with infinity.empty_init():
            model = Gpt(GptShape(8, 160, 4, 64))
        config = small_config(tmp_path, schedule="deferred", host={"budget": "24MiB"}, device={"budget": "32MiB"})
        with infinity.offload(model, config, init_fn=init_weights) as engine:
            optimizer = _adamw(model)
            for _ in range(2):
                model(inputs, inputs).backward()
                optimizer.step()
            if number % 2:
                engine._runtime.io.post(engine._runtime.read_ahead.force)
        gc.collect()  # asyncio tells of an exception that nobody asked for when the task goes
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
