"""Reading and editing parameters outside a forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infinity
from tests.conftest import MakeEngine
from tests.mechanics.test_iterations import nothing_gathered, train
from tests.parity.loops import gathered_parameters
from tests.zoo import Frozen, Net, batch, build, loss_of

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
        losses = [train(model, optimizer, step) for model, optimizer in zip((plain, ours), optimizers, strict=True)]
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
    train(model, optimizer, 0)
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
    with pytest.raises(infinity.DeviceOutOfMemoryError), infinity.gathered(model):
        pass
    with pytest.raises(infinity.NotGatheredError):
        model.get_parameter("head.weight").sum()


def test_a_numpy_array_of_a_parameter_is_refused_with_the_way_out(offload: MakeEngine) -> None:
    """numpy nails the memory down: releasing it would otherwise end in torch's own riddle."""
    model = build(Net)
    engine = offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match=r"clone\(\)\.numpy\(\)"), infinity.gathered(model.head):
        model.head.weight.detach().numpy()
    engine.close()
