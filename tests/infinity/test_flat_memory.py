"""Where the flat buffers of a CPU lie: in the memory of host copies, or in blocks that earlier gathers have left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.devices import cpu
from infinity.groups import FlatGroup
from infinity.order import Phase
from infinity.torch_compat import can_swap_memory
from tests.conftest import MakeEngine
from tests.interrupting import CtrlC
from tests.mechanics.test_iterations import nothing_gathered
from tests.zoo import Net, batch, build, loss_of, one_step

needs_shared_memory = pytest.mark.skipif(not can_swap_memory(), reason="this torch cannot exchange memory")
pytestmark = needs_shared_memory

SCHEDULES = ["synchronous", "overlapped", "deferred"]
STREAMED = {"budget": "440KiB"}


def group_of(engine: infinity.Engine, name: str) -> FlatGroup:
    return next(g for g in engine._runtime.groups if any(slot.name == name for slot in g.layout.slots))


def is_shared(engine: infinity.Engine, group: FlatGroup) -> bool:
    """Whether the flat buffer lies in the memory of the host copy now."""
    copy = engine._runtime.copies[group.index]
    return copy.block is not None and copy.tensor.data_ptr() == group.flat.data_ptr()


def same_values(ours: nn.Module, plain: nn.Module) -> bool:
    with infinity.gathered(ours):
        return all(torch.equal(p, plain.get_parameter(name)) for name, p in ours.named_parameters())


def states_of(engine: infinity.Engine, model: nn.Module, seen: list[bool]) -> list[Any]:
    """Hooks that note, in every forward of a block, whether it computes with the memory of its host copy."""

    def note(name: str) -> Any:
        group = group_of(engine, f"{name}.up.weight")
        return lambda module, args: seen.append(engine._runtime.gatherer._flat_memory.is_shared(group))

    return [
        m.register_forward_pre_hook(note(n))
        for n, m in model.named_modules()
        if n.startswith("blocks.") and n.count(".") == 1
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streamed_units_compute_with_the_memory_of_their_shards(offload: MakeEngine, schedule: str) -> None:
    """Nothing is copied, the same bytes count as uploaded, and training is that of plain PyTorch."""
    plain, ours = build(Net), build(Net)
    engine = offload(ours, schedule=schedule, host=STREAMED)
    seen: list[bool] = []
    states_of(engine, ours, seen)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), infinity.AdamW(ours.parameters(), weight_decay=1e-2)
    for step in range(4):
        losses = [one_step(model, optimizer, step) for model, optimizer in zip((plain, ours), optimizers, strict=True)]
        assert losses[0] == losses[1]
    assert len(seen) == 16
    pinned = {engine._runtime.groups[i].key for i in engine._runtime.placement.pinned_params}
    assert any(seen), pinned
    assert 0 < engine.metrics()["link/shared_bytes"] <= engine.metrics()["link/h2d_bytes"]
    assert same_values(ours, plain)


def test_bits_and_traffic_are_those_of_copies(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch, which cannot exchange memory, copies instead: the same in everything that counts."""
    found = []
    for shares in (True, False):
        monkeypatch.setattr(cpu, "can_swap_memory", lambda shares=shares: shares)
        model = build(Net)
        engine = offload(model, schedule="overlapped", host=STREAMED)
        seen: list[bool] = []
        states_of(engine, model, seen)
        optimizer = infinity.AdamW(model.parameters())
        losses = [one_step(model, optimizer, step) for step in range(3)]
        metrics = engine.metrics()
        names = ("link/h2d_bytes", "link/d2h_bytes", "device/peak_bytes")
        found.append((losses, [metrics[name] for name in names]))
        assert any(seen) is shares
    assert found[0] == found[1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_edit_does_not_reach_the_shard(offload: MakeEngine, schedule: str, where: str) -> None:
    """What changes parameters in place is refused, or has no effect; the memory that was shared holds it no more."""
    plain, model = build(Net), build(Net)
    engine = offload(model, schedule=schedule, host=STREAMED)
    block = model.get_submodule("blocks.1.up")
    edits = []

    def edit(module: nn.Module, *_: Any) -> None:
        edits.append(module.get_parameter("weight").data.mul_(2))  # unseen by autograd, which needs the block still

    register = block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook
    handle = register(edit)
    optimizer = infinity.AdamW(model.parameters())
    if where == "forward":
        with pytest.raises(infinity.UnsupportedModelError, match="in place"):
            model(batch(0))
    elif schedule == "overlapped":
        with pytest.raises(infinity.IterationError, match="in place"):
            loss_of(model, batch(0)).backward()
    else:
        loss_of(model, batch(0)).backward()
    assert edits
    edits.clear()
    handle.remove()
    optimizer.zero_grad()
    if where == "backward" and schedule == "overlapped":
        engine.close()  # the blocks behind it have been updated
        return
    assert same_values(model, plain)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))


@pytest.mark.parametrize("way", ["view", "array"])
def test_what_is_kept_of_a_forward_shows_the_present_values(offload: MakeEngine, way: str) -> None:
    """The update comes while code still looks at the memory that the shard had, as in plain PyTorch."""
    plain, model = build(Net), build(Net)
    offload(model, schedule="overlapped", host=STREAMED)
    kept: list[Any] = []

    def keep(module: nn.Module, *_: Any) -> None:
        part = module.get_parameter("weight").detach()[3:5]
        kept.append(part if way == "view" else part.numpy())

    handle = model.get_submodule("blocks.2.up").register_forward_hook(keep)
    ours = infinity.AdamW(model.parameters(), weight_decay=1e-2)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), ours
    before = plain.get_parameter("blocks.2.up.weight").detach()[3:5].clone()
    for step in range(3):
        losses = [one_step(each, optimizer, step) for each, optimizer in zip((plain, model), optimizers, strict=True)]
        assert losses[0] == losses[1]
        shown = plain.get_parameter("blocks.2.up.weight")[3:5]
        assert torch.equal(torch.as_tensor(kept[0]), shown)
        assert not torch.equal(shown, before)
        handle.remove()
    kept.clear()
    losses = [one_step(each, optimizer, 3) for each, optimizer in zip((plain, model), optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert same_values(model, plain)


def test_who_joins_a_gathered_unit_may_edit_it(offload: MakeEngine) -> None:
    """`gathered()` around a part of a forward: the edit is written back, and the shard is not taken for changed."""
    plain, model = build(Net), build(Net)
    offload(model, host=STREAMED)

    def joined(module: nn.Module, args: Any) -> None:
        with infinity.gathered(module), torch.no_grad():
            module.get_parameter("weight").mul_(0.5)

    def alone(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.get_parameter("weight").mul_(0.5)

    with torch.no_grad():
        for each, hook in ((plain, alone), (model, joined)):
            handle = each.get_submodule("blocks.1.up").register_forward_pre_hook(hook)
            each(batch(0))
            handle.remove()
    assert same_values(model, plain)


def test_memory_of_gathers_is_used_again(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers map no memory of their own: what one gives back, the next takes."""
    model = build(Net)
    engine = offload(model, schedule="overlapped", host={"budget": "64MiB"})  # all in host memory, and copied
    optimizer = infinity.AdamW(model.parameters())
    for step in range(3):
        one_step(model, optimizer, step)
    pool, mapped = engine._runtime.pool, []
    assert pool.most_lent_nbytes > 0
    assert pool.lent_nbytes == 0
    take, before = pool._map_memory, engine._runtime.gatherer.gathers
    monkeypatch.setattr(pool, "_map_memory", lambda nbytes: mapped.append(nbytes) or take(nbytes))
    for step in range(3, 9):
        one_step(model, optimizer, step)
    gathers = engine._runtime.gatherer.gathers - before
    assert len(mapped) < gathers / 4  # a block may be in use when a gradient comes that was early before


@pytest.mark.parametrize("host", [STREAMED, {"budget": "64MiB"}], ids=["shared", "borrowed"])
def test_a_release_that_was_interrupted_is_made_up_for(offload: MakeEngine, host: dict[str, str]) -> None:
    """Wherever a Ctrl-C comes: the next gather finds a flat buffer that is empty, and no memory is lost."""
    plain, model = build(Net), build(Net)
    engine = offload(model, host=host)
    gatherer, pool = engine._runtime.gatherer, engine._runtime.pool
    for way in ("all are released", "it is gathered again"):
        for group in (group_of(engine, "blocks.1.up.weight"), group_of(engine, "blocks.2.up.weight")):
            number, is_over = 0, False
            while not is_over:
                gatherer.gather(group, "test", Phase.FORWARD)
                with CtrlC(number) as ctrl_c:
                    gatherer.release(group, "test")
                if way == "it is gathered again":
                    gatherer.gather(group, "test", Phase.FORWARD)
                gatherer.release_all()
                nothing_gathered(engine)
                assert pool.lent_nbytes == 0
                block, like = model.get_submodule("blocks.1"), plain.get_submodule("blocks.1")
                with infinity.gathered(block):
                    assert all(map(torch.equal, block.parameters(), like.parameters()))
                number, is_over = number + 1, not ctrl_c.has_come
            assert number > 10
    with torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))
