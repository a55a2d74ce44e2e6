"""Reading and editing parameters outside a forward."""

from __future__ import annotations

import gc
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from infinity.observe.shortages import report_of
from infinity.views import Views
from tests.conftest import MakeEngine
from tests.leaks import check_empty
from tests.mechanics.test_iterations import nothing_gathered
from tests.parity.loops import gathered_parameters
from tests.zoo import Frozen, Net, batch, build, loss_of, one_step

HOSTS = {"streamed": {"budget": "440KiB"}, "pinned": {"budget": "64MiB"}}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> dict[str, Any]:
    return HOSTS[request.param]


def test_reading_changes_nothing(offload: MakeEngine, host: dict[str, Any]) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model, host=host)
    before = engine.metrics().get("nvme/write_bytes")
    with infinity.gathered(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name))
        assert model.state_dict().keys() == plain.state_dict().keys()
    nothing_gathered(engine)
    assert engine.metrics().get("nvme/write_bytes") == before


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_edits_between_steps(offload: MakeEngine, host: dict[str, Any], schedule: str) -> None:
    """An edit counts for the next forward, and the optimizer goes on from it."""

    def edit(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(0.5)
            model.get_parameter("blocks.1.up.bias").fill_(0.25)

    plain, ours = build(Net), build(Net)
    engine = offload(ours, schedule=schedule, host=host)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), infinity.AdamW(ours.parameters(), weight_decay=1e-2)
    for step in range(4):
        losses = [one_step(model, optimizer, step) for model, optimizer in zip((plain, ours), optimizers, strict=True)]
        assert losses[0] == losses[1]
        edit(plain)
        with infinity.gathered([ours.get_parameter("head.weight"), ours.get_parameter("blocks.1.up.bias")]):
            edit(ours)
    for name, parameter in gathered_parameters(ours).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    nothing_gathered(engine)


def test_edit_right_after_backward(offload: MakeEngine, host: dict[str, Any]) -> None:
    """Under the synchronous schedule an edit between backward and step is updated by the step."""
    plain, ours = build(Net), build(Net)
    offload(ours, schedule="synchronous", host=host)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), infinity.AdamW(ours.parameters())
    for model in (plain, ours):
        loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        plain.get_parameter("blocks.3.down.weight").zero_()
        with infinity.gathered(ours.get_submodule("blocks.3.down")):
            ours.get_parameter("blocks.3.down.weight").zero_()
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in gathered_parameters(ours).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name


def test_edits_in_bf16_become_the_master(offload: MakeEngine, host: dict[str, Any]) -> None:
    """What was edited is exactly its bf16 value; what was not keeps its low half."""
    model = build(Net)
    engine = offload(model, precision="bf16", schedule="synchronous", host=host, device={"kind": "fake"})
    optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
    one_step(model, optimizer, 0)
    engine.metrics()
    group = next(g for g in engine._runtime.groups if g.key.startswith("head"))
    from tests.parity.test_bf16 import _master_of

    before = _master_of(engine, group).clone()
    with infinity.gathered(model.get_submodule("head")), torch.no_grad():
        model.get_parameter("head.weight")[3, 5:8] = 1.2345
    engine.metrics()
    after = _master_of(engine, group)
    edited = torch.zeros(29, 37, dtype=torch.bool)
    edited[3, 5:8] = True
    edited = torch.nn.functional.pad(edited.flatten(), (0, after.numel() - edited.numel()))
    assert torch.equal(after[edited], torch.full((3,), 1.2345).bfloat16().float())
    assert torch.equal(after[~edited], before[~edited])


def test_frozen_parameters_can_be_edited(offload: MakeEngine, host: dict[str, Any]) -> None:
    plain, ours = build(Frozen), build(Frozen)
    offload(ours, schedule="overlapped", host=host)
    for model in (plain, ours):
        with torch.no_grad():
            if model is ours:
                with infinity.gathered(model):
                    model.get_parameter("blocks.0.base.weight").mul_(2)
            else:
                model.get_parameter("blocks.0.base.weight").mul_(2)
    with torch.no_grad():
        assert torch.equal(plain(batch(0)), ours(batch(0)))


def test_gathered_around_a_forward(offload: MakeEngine, host: dict[str, Any]) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model, host=host)
    with torch.no_grad(), infinity.gathered(model.get_submodule("blocks.1")):
        assert torch.equal(model(batch(0)), plain(batch(0)))
        assert torch.equal(model.get_parameter("blocks.1.up.weight"), plain.get_parameter("blocks.1.up.weight"))
    nothing_gathered(engine)


def test_nested_blocks(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model)
    head = model.get_submodule("head")
    with infinity.gathered(head):
        with infinity.gathered(head):
            pass
        assert model.get_parameter("head.weight").isfinite().all()
    nothing_gathered(engine)


def test_exception_in_the_block_writes_nothing(offload: MakeEngine, host: dict[str, Any]) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model, host=host)
    with pytest.raises(ArithmeticError), infinity.gathered(model), torch.no_grad():
        model.get_parameter("head.weight").zero_()
        raise ArithmeticError
    nothing_gathered(engine)
    assert torch.equal(gathered_parameters(model)["head.weight"], plain.get_parameter("head.weight"))


def test_refusals(offload: MakeEngine) -> None:
    model = build(Net)
    with pytest.raises(infinity.ConfigError, match="no parameter of an offloaded model"), infinity.gathered(model):
        pass
    offload(model, device={"kind": "cpu", "budget": "100KiB"}, schedule="synchronous")
    with pytest.raises(infinity.DeviceOutOfMemoryError) as full, infinity.gathered(model):
        pass
    assert "\ndevice: " in str(report_of(full.value))
    with pytest.raises(infinity.NotGatheredError):
        model.get_parameter("head.weight").sum()


@pytest.mark.parametrize("kind", ["cpu", "fake"])
def test_a_whole_model_that_does_not_fit_is_told_what_it_needs(offload: MakeEngine, kind: str) -> None:
    """All of it at once, so that the budget it names works, and the ways that need less."""
    model = build(Net)
    engine = offload(model, device={"kind": kind, "budget": "100KiB"}, schedule="synchronous")
    with pytest.raises(infinity.DeviceOutOfMemoryError, match=r"engine\.export") as full, infinity.gathered(model):
        pass
    assert "smaller parts" in str(full.value)
    nothing_gathered(engine)
    engine.close()
    found = re.search(r"budget would have to be (\d+) bytes", str(full.value))
    assert found is not None
    again = build(Net)
    offload(again, device={"kind": kind, "budget": int(found[1])}, schedule="synchronous")
    with infinity.gathered(again):
        assert torch.isfinite(again.get_parameter("head.weight")).all()


def test_a_numpy_array_of_a_parameter_is_refused_with_the_way_out(offload: MakeEngine) -> None:
    """numpy nails the memory down: releasing it would otherwise end in torch's own riddle."""
    model = build(Net)
    engine = offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"clone\(\)\.numpy\(\)"), infinity.gathered(model.head):
        model.head.weight.detach().numpy()
    engine.close()


# What is kept after a block -----------------------------------------------------------------------------------------


def test_kept_parameter_refuses(offload: MakeEngine, host: dict[str, Any]) -> None:
    """The parameter object itself outlives the block as a stand-in; reading it used to end the process."""
    model, plain = build(Net), build(Net)
    engine = offload(model, host=host)
    with infinity.gathered(model):
        kept = dict(model.named_parameters())
    nothing_gathered(engine)
    for name, parameter in kept.items():
        if name == "head.weight":
            assert parameter.shape == plain.get_parameter(name).shape and parameter.grad is None
            for use in (lambda p: p + 1, lambda p: p[0], repr, lambda p: p.data, lambda p: p.tolist(), torch.clone):
                if use is repr:
                    assert "head.weight" in repr(parameter)
                    continue
                with pytest.raises(infinity.NotGatheredError, match=name):
                    use(parameter)
    with infinity.gathered(model):
        assert torch.equal(kept["head.weight"], plain.get_parameter("head.weight"))
    one_step(model, infinity.AdamW(model.parameters()), 0)


def test_list_of_weights_gathers_on_use(offload: MakeEngine) -> None:
    """A weight that a module reaches through a list of its own is gathered when the forward uses it, and trains."""

    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 600)
            self.second = torch.nn.Linear(600, 8)
            self.weights: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.second(self.first(x))
            return torch.nn.functional.linear(hidden, self.weights[0]).mean() if self.weights else hidden.mean()

    losses = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Listed()
        if is_ours:
            offload(model, unit_classes=["Linear"], device={"budget": "1MiB"}, resident_threshold=0)
            optimizer: torch.optim.Optimizer = infinity.AdamW(model.parameters(), weight_decay=1e-2)
            with infinity.gathered(model.first):
                model.weights = [model.first.weight]
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model.weights = [model.first.weight]
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        run = []
        for _ in range(3):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == losses[1]


def test_kept_views_keep_their_memory(offload: MakeEngine, host: dict[str, Any]) -> None:
    """A view taken inside a block shows the present values as long as it lives; then the memory goes back."""
    model, plain = build(Net), build(Net)
    engine = offload(model, host=host)
    ours = infinity.AdamW(model.parameters(), weight_decay=1e-2)
    optimizers = torch.optim.AdamW(plain.parameters(), fused=True), ours
    with infinity.gathered(model.get_parameter("head.weight")):
        view = model.get_parameter("head.weight").detach()[1:]
    wanted = plain.get_parameter("head.weight").detach()[1:]
    for step in range(3):
        assert torch.equal(view, wanted)
        losses = [one_step(m, optimizer, step) for m, optimizer in zip((plain, model), optimizers, strict=True)]
        assert losses[0] == losses[1]
    assert torch.equal(view, wanted)
    del view
    with infinity.gathered(model.get_parameter("blocks.1.up.bias")):
        pass
    nothing_gathered(engine)


def test_kept_view_of_a_closed_engine(offload: MakeEngine) -> None:
    model, plain = build(Net), build(Net)
    engine = offload(model)
    with infinity.gathered(model):
        view = model.get_parameter("head.weight").detach()
    engine.close()
    assert torch.equal(view, plain.get_parameter("head.weight"))


def test_values_saved_by_graphs_do_not_keep_memory(offload: MakeEngine, host: dict[str, Any]) -> None:
    """What only a graph of the block holds goes with the block; what the user holds too stays."""
    model = build(Net)
    engine = offload(model, host=host)
    weight = model.get_parameter("head.weight")
    with infinity.gathered(weight):
        loss = (model.get_parameter("head.weight").t() ** 2).sum()
    nothing_gathered(engine)
    with pytest.raises(infinity.NotGatheredError, match="Run the backward inside the block"):
        loss.backward()
    with infinity.gathered(weight):
        row = model.get_parameter("head.weight")[0]
        loss = (row**2).sum()
    assert float(row.detach().square().sum()) == pytest.approx(loss.item())


def test_only_tensors_over_parameters_are_looked_at(offload: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a block costs what is left of its groups, not what graphs hold of everything else."""
    model, looked = build(Net), []
    group_of = Views._group_of

    def counted(self: Views, tensor: torch.Tensor) -> Any:
        looked.append(tensor.shape)
        return group_of(self, tensor)

    offload(model, host=HOSTS["pinned"])
    with infinity.gathered(model):
        monkeypatch.setattr(Views, "_group_of", counted)
        loss = loss_of(model, batch(0))
        during = len(looked)
    assert during > 10
    assert len(looked) == during
    del loss


def test_kept_views_are_named_when_memory_runs_out(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, device={"budget": "96KiB"})
    views = []
    with pytest.raises(infinity.DeviceOutOfMemoryError, match="keep a clone instead") as full:
        for name, _ in list(model.named_parameters()):
            with infinity.gathered(model.get_parameter(name)):
                views.append(model.get_parameter(name).detach())
        loss_of(model, batch(0)).backward()
    assert "\ndevice: " in str(report_of(full.value))
    views.clear()
    del full
    gc.collect()  # the frames of the exception
    one_step(model, infinity.AdamW(model.parameters()), 0)
    nothing_gathered(engine)


def test_a_numpy_array_of_what_is_always_there_does_not_keep_the_engine_from_closing(offload: MakeEngine) -> None:
    """numpy has nailed its memory down, which goes with the last that looks at it; everything else is given back."""
    model = build(Net)
    engine = offload(model, resident_threshold="8KiB")
    resident = {slot.name for group in engine._runtime.resident_groups for slot in group.layout.slots}
    assert "head.weight" in resident
    with infinity.gathered(model.head):
        array = model.head.weight.detach().numpy()
    assert array.shape == model.head.weight.shape
    del array
    engine.close()
    check_empty(engine)


def test_the_average_of_the_user_guide_is_that_of_torch(offload: MakeEngine, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/user-guide.md").read_text()
    recipe = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def update_average" in block
    )
    ours, plain = build(Net), build(Net)
    engine = offload(ours)
    expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    names: dict[str, Any] = {"torch": torch, "engine": engine}
    exec(recipe.rpartition("update_average()")[0], names)
    optimizers = infinity.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.update_parameters(plain)
        names["update_average"](decay=0.9)
    average = names["average"]
    assert all(torch.equal(average[name], p) for name, p in expected.module.named_parameters())
    save_file(average, tmp_path / "average.safetensors")
    second = build(Net)
    offload(second, weights=tmp_path / "average.safetensors")
    assert all(torch.equal(p, average[name]) for name, p in gathered_parameters(second).items())


def test_torchs_averaged_model_is_refused_with_a_way_out(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.NotGatheredError, match="An average of the weights"):
        AveragedModel(model)


@pytest.mark.parametrize("is_explained", [False, True])
def test_an_error_is_never_its_own_cause(offload: MakeEngine, is_explained: bool) -> None:
    """The command line follows causes, and would not end."""
    model = build(partial(Net, blocks=8, width=64, hidden=64))
    offload(model, device={"kind": "cpu", "budget": "200KiB"}, schedule="synchronous")
    held = [infinity.gathered(model.get_submodule(f"blocks.{number}")) for number in range(8)]
    with ExitStack() as stack, pytest.raises(infinity.DeviceOutOfMemoryError) as full:
        for one in [infinity.gathered(model)] if is_explained else held:
            stack.enter_context(one)
    causes, error = [], full.value
    while error.__cause__ is not None and len(causes) < 10:
        error = error.__cause__
        causes.append(error)
    assert len(causes) == is_explained
