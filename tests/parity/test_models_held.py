"""Parameters held or handed out where no module holds them: used as what they are now, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.observe.shortages import report_of
from storage.errors import SwapFullError
from tests.conftest import MakeEngine
from tests.parity import model_kinds as kinds
from tests.parity.loops import Loop, assert_same, smallest_budget, train_offloaded, train_plain
from tests.zoo import Net, batch, build, loss_of

SCHEDULES = ("overlapped", "synchronous")


def _parity(make: Callable[[], nn.Module], offload: MakeEngine, **settings: Any) -> None:
    loop = Loop(make, steps=3)
    plain = train_plain(loop)
    ours, _ = train_offloaded(loop, lambda model: offload(model, host={"budget": "2MiB"}, **settings))
    assert_same(plain, ours)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("holder", kinds.HOLDERS)
def test_weights_held_elsewhere(offload: MakeEngine, holder: str, schedule: str) -> None:
    _parity(partial(kinds.Holding, kinds.HOLDERS[holder]), offload, schedule=schedule)


def test_parameters_that_a_block_returns(offload: MakeEngine) -> None:
    _parity(kinds.ReturnsParameters, offload, schedule="synchronous")


@pytest.mark.parametrize("settings", [{}, {"durability": "step"}], ids=["", "durable"])
def test_gradients_that_wait_for_the_end_of_backward_do_so_in_the_swap_file(
    offload: MakeEngine, settings: dict[str, Any]
) -> None:
    """`overlapped` makes room for one gradient at a time; those of parameters used outside their modules come last."""
    loop = Loop(kinds.ReturnsParameters, steps=3)
    chosen = {"schedule": "overlapped", **settings}
    budget = smallest_budget(offload, "host", build(loop.make), **chosen)
    plain = train_plain(loop)
    ours, engine = train_offloaded(loop, lambda model: offload(model, host={"budget": budget}, **chosen))
    assert_same(plain, ours)
    assert engine.metrics()["host/peak_bytes"] <= budget
    assert all(step["nvme_write_bytes/grad"] for step in engine.traffic.per_step)


def test_gradients_that_wait_get_no_space_beyond_the_budget(offload: MakeEngine) -> None:
    loop, chosen = Loop(kinds.ReturnsParameters, steps=1), {"schedule": "overlapped", "host": {"budget": "210KiB"}}
    nvme_nbytes = offload(build(loop.make), **chosen).plan.placement.nvme_nbytes
    with pytest.raises(SwapFullError, match=r"nvme\.budget allows\. Raise it, or use schedule='synchronous'") as full:
        train_offloaded(loop, lambda model: offload(model, nvme={"budget": nvme_nbytes}, **chosen))
    assert "drives:\n" in str(report_of(full.value))


class _ReturnsMany(kinds.Stack):
    """So many parameters of blocks are returned that their gradients need more than two units' worth of memory."""

    def __init__(self) -> None:
        super().__init__(kinds.Returning() for _ in range(6))

    apply_block = kinds.ReturnsParameters.apply_block


def test_gradients_that_wait_without_swap_files_need_host_memory(offload: MakeEngine) -> None:
    """The refusal names a budget, and with that one it works."""
    loop = Loop(_ReturnsMany, steps=2)
    budget = next(
        kib << 10
        for kib in range(400, 2000, 20)
        if not offload(build(loop.make), schedule="overlapped", host={"budget": kib << 10}).plan.placement.nvme_nbytes
    )
    with pytest.raises(infinity.PlacementError, match=r"no swap files") as refusal:
        train_offloaded(loop, lambda model: offload(model, schedule="overlapped", host={"budget": budget}))
    assert "residency:" in str(report_of(refusal.value))
    named = re.search(r"host\.budget of (\d+) bytes", str(refusal.value))
    assert named
    plain = train_plain(loop)
    ours, _ = train_offloaded(loop, lambda model: offload(model, schedule="overlapped", host={"budget": int(named[1])}))
    assert_same(plain, ours)


class _Gives(Net):
    """Returns a parameter beside its output, or what `give` makes of it."""

    def __init__(self, give: Callable[[Tensor], Tensor]) -> None:
        super().__init__(blocks=2)
        self.give = give

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.give(self.blocks[0].up.weight)


def test_a_parameter_that_the_model_returns_is_a_stand_in(offload: MakeEngine) -> None:
    model = build(lambda: _Gives(lambda weight: weight))
    engine = offload(model)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            _, weight = model(batch(0))
        assert weight is model.get_parameter("blocks.0.up.weight")
        assert tuple(weight.shape) == (53, 37)
        with pytest.raises(infinity.NotGatheredError, match=r"'blocks\.0\.up\.weight'"):
            weight.sum()
    with infinity.gathered(model):
        assert torch.equal(model.get_parameter("blocks.0.up.weight"), build(Net).get_parameter("blocks.0.up.weight"))
    engine.close()


def test_a_view_of_a_parameter_that_the_model_returns_is_refused(offload: MakeEngine) -> None:
    model = build(lambda: _Gives(lambda weight: weight[2:]))
    offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"returns a view of a parameter of blocks\.0"):
        model(batch(0))


def test_what_users_set_on_a_parameter_stays(offload: MakeEngine) -> None:
    """Some models mark parameters, for example as not to be decayed."""
    model: Any = build(Net)
    model.head.weight.is_special = True
    offload(model)
    assert model.head.weight.is_special
    with infinity.gathered(model.head):
        assert model.head.weight.is_special
    assert not hasattr(model.embed.weight, "is_special")


@pytest.mark.parametrize("empty", [True, False])
def test_parameter_objects_stay_the_same(offload: MakeEngine, empty: bool) -> None:
    if empty:
        with infinity.empty_init():
            model: nn.Module = Net()
    else:
        model = build(Net)
    before = list(model.parameters())
    engine = offload(model)
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    loss_of(model, batch(0))
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    engine.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_optimizers_are_refused(
    offload: MakeEngine, kind: type[torch.optim.Optimizer], when: str, schedule: str
) -> None:
    """An optimizer built before `offload` would train nothing, and one built after would fail in its arithmetic."""
    model = build(Net)
    early = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    engine = offload(model, schedule=schedule)
    optimizer = early if when == "before" else kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    ours = infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    refusal = rf"{kind.__name__} cannot update parameter 'embed\.weight'.*Build infinity"
    with pytest.raises(infinity.ConfigError, match=refusal):
        optimizer.step()
    ours.step()
    engine.close()
    other = kind(nn.Linear(2, 2).parameters(), lr=0.1)  # type: ignore[call-arg]
    other.step()


@pytest.mark.parametrize("name", [name for name in ("Adafactor", "Muon", "LBFGS") if hasattr(torch.optim, name)])
def test_optimizers_of_whole_matrices_are_refused_with_the_reason(offload: MakeEngine, name: str) -> None:
    """PEER_DEEPSPEED section 4, number 9: orthogonalising pieces of a matrix gives other steps without a word."""
    model: Any = build(Net)
    offload(model)
    optimizer = getattr(torch.optim, name)([model.blocks[0].up.weight])
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(infinity.ConfigError, match=rf"{name} cannot update.*whole matrices.*infinity\.AdamW"):
        optimizer.step(lambda: loss_of(model, batch(0)))
    if name != "LBFGS":
        with pytest.raises(AttributeError, match=f"infinity.{name} does not exist: its update needs whole matrices"):
            getattr(infinity, name)
        with pytest.raises(infinity.ConfigError, match=r"optimizer"):
            infinity.Config(optimizer=name.lower())
        assert not hasattr(infinity, name)


def test_other_optimizers_of_other_parameters_step(offload: MakeEngine) -> None:
    model, extra = build(Net), nn.Linear(3, 3)
    offload(model)
    infinity.AdamW(model.parameters())
    optimizer = torch.optim.SGD(extra.parameters(), lr=0.1)
    extra(torch.ones(3)).sum().backward()
    before = extra.bias.detach().clone()
    optimizer.step()
    assert not torch.equal(before, extra.bias)


def _tie_by_memory(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach())


def _buffer_of_parameter(model: Any) -> None:
    model.register_buffer("first_rows", model.embed.weight.detach()[:3])


@pytest.mark.parametrize("share", [_tie_by_memory, _buffer_of_parameter])
def test_tensors_that_share_memory_are_refused(offload: MakeEngine, share: Callable[[Any], None]) -> None:
    model = build(Net)
    share(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"shares memory with"):
        offload(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_parts_of_one_memory_beside_each_other_are_fine(offload: MakeEngine) -> None:
    def make() -> nn.Module:
        model: Any = Net()
        memory = torch.cat([model.embed.weight.detach().flatten(), model.head.weight.detach().flatten()])
        model.embed.weight = nn.Parameter(memory[: 29 * 37].view(29, 37))
        model.head.weight = nn.Parameter(memory[29 * 37 :].view(29, 37))
        return model  # type: ignore[no-any-return]

    _parity(make, offload)
