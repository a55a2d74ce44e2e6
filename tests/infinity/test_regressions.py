"""What once gave other numbers than plain PyTorch without an error, or crashed the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters
from tests.zoo import Block, Net, batch, build, loss_of

_HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
_Train = Callable[[nn.Module, torch.optim.Optimizer, Callable[..., torch.Tensor]], None]


def _backward(model: nn.Module, number: int) -> None:
    loss_of(model, batch(number)).backward()  # type: ignore[no-untyped-call]


def _assert_same_bits(train: _Train, offload: MakeEngine, make: Callable[[], nn.Module] = Net, **settings: Any) -> None:
    plain = build(make)
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **_HYPER), torch.nn.utils.clip_grad_norm_)
    ours = build(make)
    offload(ours, **settings)
    train(ours, infinity.AdamW(ours.parameters(), **_HYPER), infinity.clip_grad_norm_)
    found = gathered_parameters(ours)
    assert not [name for name, want in plain.named_parameters() if not torch.equal(want, found[name])]


def test_model_zero_grad_forgets_the_clipping_too(offload: MakeEngine) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        for step in range(4):
            _backward(model, step)
            if step == 1:
                clip(model.parameters(), 0.1)
                model.zero_grad()
                continue
            if step == 3:
                clip(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()

    _assert_same_bits(train, offload, host={"budget": "4MiB"})


def test_a_clipped_gradient_is_shown_clipped_and_what_is_added_is_not(offload: MakeEngine) -> None:
    seen: list[list[torch.Tensor]] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        for step in range(3):
            _backward(model, step)
            clip(model.parameters(), 0.1)
            grads = [parameter.grad for parameter in model.parameters()]
            seen.append([grad.clone() for grad in grads if grad is not None])
            for grad in grads:
                assert grad is not None
                grad.add_(0.01)
            optimizer.step()
            optimizer.zero_grad()

    _assert_same_bits(train, offload, host={"budget": "4MiB"})
    for plain, ours in zip(seen[:3], seen[3:], strict=True):
        assert all(map(torch.equal, plain, ours))


def test_a_gradient_after_clipping_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    infinity.AdamW(model.parameters())
    _backward(model, 0)
    infinity.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(infinity.IterationError, match="clip once, after the last backward"):
        _backward(model, 1)


def test_create_graph_is_refused(offload: MakeEngine) -> None:
    """The second backward read freed memory: a segmentation fault."""
    model = build(lambda: nn.Sequential(*(Block() for _ in range(3))))
    offload(model)
    x = torch.randn(3, 37, requires_grad=True)
    with pytest.raises(infinity.UnsupportedModelError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_that_would_be_lost_are_refused(offload: MakeEngine, register: str) -> None:
    model = build(Net)
    getattr(model.head.weight, register)(lambda _: None)  # type: ignore[union-attr]
    with pytest.raises(infinity.UnsupportedModelError, match=r"'head\.weight' has hooks"):
        offload(model)


def test_gradients_that_would_be_lost_are_refused(offload: MakeEngine) -> None:
    model = build(Net)
    _backward(model, 0)
    with pytest.raises(infinity.UnsupportedModelError, match="has a gradient already"):
        offload(model)


def test_amsgrad_of_a_parameter_group_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.ConfigError, match="amsgrad"):
        infinity.AdamW([{"params": list(model.parameters()), "amsgrad": True}])


def test_a_resident_parameter_can_be_edited_anywhere(offload: MakeEngine) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        for step in range(3):
            _backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.head.weight.clamp_(-0.05, 0.05)  # type: ignore[union-attr, operator]
        _backward(model, 3)
        optimizer.step()

    _assert_same_bits(train, offload, resident_threshold="1MiB")


def test_an_edit_that_overlapped_would_lose_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, resident_threshold="1MiB", schedule="overlapped")
    infinity.AdamW(model.parameters())
    with torch.no_grad():
        model.head.weight.clamp_(-0.05, 0.05)  # type: ignore[union-attr, operator]
    with pytest.raises(infinity.IterationError, match="changed in place"):
        _backward(model, 0)


class _Normalising(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


def test_an_edit_inside_a_forward_is_refused(offload: MakeEngine) -> None:
    model = build(lambda: nn.Sequential(*(_Normalising() for _ in range(3))))
    offload(model)
    with pytest.raises(infinity.UnsupportedModelError, match="changes its parameters in place"):
        model(torch.randn(3, 37))


def test_replaced_parameters_are_refused(offload: MakeEngine) -> None:
    """They were ignored, and the stored values used."""
    model = build(Net)
    engine = offload(model)
    values = {name: torch.full(tuple(p.shape), 0.01) for name, p in model.named_parameters()}
    with pytest.raises(infinity.UnsupportedModelError, match="put in the place"):
        torch.func.functional_call(model, values, (batch(0),))
    with torch.no_grad():
        assert torch.equal(loss_of(model, batch(0)), loss_of(build(Net), batch(0)))
    with infinity.gathered(model):
        model.load_state_dict(values, assign=True)
    with pytest.raises(infinity.UnsupportedModelError, match=r"put in the place.*engine\.adopt"):
        loss_of(model, batch(0))
    assert engine.adopt()
    plain = build(Net)
    plain.load_state_dict(values)
    with torch.no_grad():
        assert torch.equal(loss_of(model, batch(0)), loss_of(plain, batch(0)))


def test_a_step_inside_gathered_is_seen_there(offload: MakeEngine) -> None:
    """The block went on with the parameters of before, and an edit undid the update."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        offloaded = isinstance(optimizer, infinity.AdamW)
        with infinity.gathered(model) if offloaded else nullcontext(), torch.no_grad():
            for step in range(3):
                with torch.enable_grad():
                    _backward(model, step)
                model.head.weight.mul_(0.9)  # type: ignore[union-attr, operator]
                optimizer.step()
                optimizer.zero_grad()
                model.head.weight.mul_(0.9)  # type: ignore[union-attr, operator]

    _assert_same_bits(train, offload, host={"budget": "4MiB"})


def test_gathered_before_the_step_of_overlapped_is_refused_where_it_would_undo_an_update(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, resident_threshold="1MiB", schedule="overlapped")
    optimizer = infinity.AdamW(model.parameters())
    _backward(model, 0)
    with pytest.raises(infinity.IterationError, match="updated during backward"), infinity.gathered(model.head):
        raise AssertionError
    optimizer.step()
    with infinity.gathered(model.head):
        assert torch.isfinite(model.head.weight).all()  # type: ignore[arg-type, union-attr]


def test_a_state_dict_taken_in_gathered_outlives_it(offload: MakeEngine) -> None:
    """Its tensors lay in the memory that the end of the block gives back: reading them ended the process."""
    model = build(Net)
    offload(model, host={"budget": "4MiB"})
    with infinity.gathered(model):
        values = model.state_dict()
    plain = build(Net).state_dict()
    assert list(values) == list(plain)
    assert all(torch.equal(values[name], plain[name]) for name in plain)
    with infinity.gathered(model.head):
        part = model.head.state_dict()
    assert torch.equal(part["weight"], plain["head.weight"])


def test_a_graph_of_gathered_parameters_needs_its_backward_inside(offload: MakeEngine) -> None:
    """Outside, it read freed memory, which ended the process."""
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "4MiB"})
    with infinity.gathered(model):
        loss = sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))
    with pytest.raises(infinity.NotGatheredError, match="Run the backward inside the block"):
        loss.backward()
    engine.reset_iteration()


def test_a_penalty_on_gathered_parameters_is_exact(offload: MakeEngine) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        offloaded = isinstance(optimizer, infinity.AdamW)
        for step in range(3):
            with infinity.gathered(model) if offloaded else nullcontext():
                loss = loss_of(model, batch(step)) + sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    _assert_same_bits(train, offload, schedule="synchronous", host={"budget": "4MiB"})


def test_an_in_place_change_is_still_noticed_in_gathered(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "4MiB"})
    with infinity.gathered(model.head):
        x = torch.ones(3, 37, requires_grad=True)
        y = x.exp()
        z = (y @ model.head.weight.T).sum() + (y * y).sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            z.backward()
    engine.reset_iteration()


@pytest.mark.parametrize("host", ["4MiB", "500KiB"])
def test_setting_a_gradient_replaces_it(offload: MakeEngine, host: str) -> None:
    """It was stepped with the old one, and the new one was added to the next."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        for step in range(3):
            _backward(model, step)
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full(tuple(parameter.shape), 0.01 * (number + step))
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.ones(tuple(parameter.shape))
            optimizer.step()
            optimizer.zero_grad()

    _assert_same_bits(train, offload, schedule="synchronous", host={"budget": host})


def test_changing_a_gradient_in_place_by_assignment_is_exact(offload: MakeEngine) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[..., torch.Tensor]) -> None:
        for step in range(3):
            _backward(model, step)
            for parameter in model.parameters():
                parameter.grad += 0.01  # type: ignore[operator]
                parameter.grad = parameter.grad * 2  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()

    _assert_same_bits(train, offload, schedule="synchronous", host={"budget": "4MiB"})


def test_a_step_after_a_failed_backward_is_refused(offload: MakeEngine) -> None:
    model = build(Net)
    offload(model, schedule="synchronous")
    optimizer = infinity.AdamW(model.parameters(), **_HYPER)
    model.blocks[0].up.register_full_backward_hook(lambda *_: 1 / 0)  # type: ignore[union-attr, operator, union-attr]
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch(0)).backward()
    with pytest.raises(infinity.IterationError, match="backward failed"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_gradients_without_an_optimizer_are_spoken_of_once(
    offload: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(Net)
    torch.optim.SGD(model.parameters(), lr=0.1)
    offload(model, schedule="synchronous")
    for step in range(3):
        _backward(model, step)
    assert sum("no infinity optimizer has been built" in message for message in caplog.messages) == 1
