"""The few facts about torch that the engine relies on. When torch changes, these fail first."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from infinity.torch_compat import fused_adamw_, preserve_version_counter


def _released() -> tuple[Tensor, nn.Parameter, int]:
    flat = torch.randn(64)
    parameter = nn.Parameter(flat[:16].view(4, 4))
    return flat, parameter, flat.untyped_storage().nbytes()


def test_saved_views_see_a_buffer_that_was_freed_and_refilled() -> None:
    """The resize rule."""
    flat, weight, nbytes = _released()
    kept = flat.clone()
    x = torch.randn(2, 4, requires_grad=True)
    out = torch.nn.functional.linear(x, weight)
    flat.untyped_storage().resize_(0)
    assert flat.untyped_storage().nbytes() == 0
    flat.untyped_storage().resize_(nbytes)
    with torch.no_grad(), preserve_version_counter(flat):
        flat.copy_(kept)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept[:16].view(4, 4).sum(0).expand(2, 4))
    assert weight.grad is not None


def test_refilling_without_preserving_the_version_is_refused() -> None:
    flat, weight, _ = _released()
    x = torch.randn(2, 4, requires_grad=True)
    out = x @ weight
    with torch.no_grad():
        flat.copy_(flat.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]


def test_backward_over_freed_memory_is_loud() -> None:
    flat, weight, _ = _released()
    x = torch.randn(2, 4, requires_grad=True)
    out = x @ weight
    flat.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"setStorage|storage of size 0"):
        out.sum().backward()  # type: ignore[no-untyped-call]


def test_numpy_freezes_a_storage() -> None:
    flat, _, _ = _released()
    flat.numpy()
    with pytest.raises(RuntimeError, match="not resizable"):
        flat.untyped_storage().resize_(0)


def test_views_move_the_version_of_their_base() -> None:
    """How edits of gathered parameters are noticed."""
    flat, weight, _ = _released()
    before = flat._version
    with torch.no_grad():
        weight[0, 0] = 1
    assert flat._version > before


def test_any_hook_runs_once_per_graph_task_and_first() -> None:
    seen: list[str] = []
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append("node"))  # type: ignore[no-untyped-call]
    outputs = [y + 1, y * 3, y - 1]
    register_multi_grad_hook(outputs, lambda _: seen.append("any"), mode="any")
    total = outputs[0].sum() + outputs[1].sum()  # the third is not used
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert seen == ["any", "node"]
    total.backward()  # type: ignore[no-untyped-call]
    assert seen == ["any", "node"] * 2


def test_callbacks_belong_to_their_graph_task() -> None:
    """A reentrant region is a graph task of its own, whose callback runs before the outer backward ends."""
    seen: list[str] = []

    def note(name: str) -> Any:
        def hook(_: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            assert task != -1
            seen.append(f"{name} begins")
            Variable._execution_engine.queue_callback(lambda: seen.append(f"{name} ends"))

        return hook

    def region(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:  # in the recomputation
            y.register_hook(note("inner"))  # type: ignore[no-untyped-call]
        return y

    x = torch.randn(3, requires_grad=True)
    y = checkpoint(region, x * 1, use_reentrant=True)
    z = y * 2
    z.register_hook(note("outer"))
    z.sum().backward()
    assert seen == ["outer begins", "inner begins", "inner ends", "outer ends"]
    assert torch._C._current_graph_task_id() == -1


def test_callbacks_do_not_run_when_backward_raises() -> None:
    seen: list[str] = []

    def fail(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: seen.append("ended"))
        raise ArithmeticError

    y = torch.randn(3, requires_grad=True) * 2
    y.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert not seen


def test_hooks_that_always_run_are_told_of_an_early_stop() -> None:
    """The recomputation of a checkpoint stops when it has what it needs; the module's hook gets None."""
    outputs: list[Any] = []
    line = nn.Linear(3, 3)
    line.register_forward_hook(lambda module, args, output: outputs.append(output), always_call=True)
    checkpoint(line, torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(outputs) == 2
    assert outputs[1] is None


def test_an_inplace_change_of_a_view_keeps_the_node_of_its_base() -> None:
    seen: list[str] = []
    x = torch.randn(6, requires_grad=True)
    base = x * 2
    view = base.view(2, 3)
    view.register_hook(lambda _: seen.append("view"))  # type: ignore[no-untyped-call]
    node: Any = base.grad_fn
    node.register_prehook(lambda _: seen.append("base"))
    view += 1
    view.sum().backward()  # type: ignore[no-untyped-call]
    assert "base" in seen


def test_what_a_node_carries_lives_as_long_as_the_graph() -> None:
    class Companion:
        pass

    w = torch.randn(3, 3, requires_grad=True)
    for make in (lambda: w @ w, lambda: checkpoint(lambda x: x @ w, torch.ones(2, 3), use_reentrant=False)):
        out: Any = make()
        companion = Companion()
        alive = weakref.ref(companion)
        out.grad_fn.metadata["infinity"] = companion
        loss = out.sum()
        del out, companion
        gc.collect()
        assert alive() is not None
        del loss
        assert alive() is None


def test_what_a_custom_function_returns_is_a_view_with_its_node() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return inputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return grads

    x = torch.randn(3, requires_grad=True) * 2
    (y,) = Identity.apply(x)  # type: ignore[no-untyped-call]
    assert isinstance(y.grad_fn, BackwardCFunction)
    assert y._base is x
    assert not isinstance(x.grad_fn, BackwardCFunction)


def test_a_shared_parameter_accumulates_once_per_graph_task() -> None:
    seen: list[int] = []
    w = nn.Parameter(torch.randn(3, 3))
    w.register_post_accumulate_grad_hook(lambda _: seen.append(1))  # type: ignore[no-untyped-call]
    ((torch.ones(2, 3) @ w) @ w).sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 1


@pytest.mark.parametrize("numel", [64, 65, 1000, 4097])
def test_fused_adamw_gives_the_same_bits_cut_at_multiples_of_64(numel: int) -> None:
    def update(cuts: list[int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(numel, generator=generator).abs() for _ in range(4)]
        for start, stop in pairwise(cuts):
            p, g, m, v = ([tensor[start:stop]] for tensor in tensors)
            step = [torch.tensor(3.0)]
            fused_adamw_(
                p, g, m, v, step, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, maximize=False
            )
        return tensors

    whole = update([0, numel])
    cut = update([*range(0, numel, 64), numel])
    assert all(map(torch.equal, whole, cut))


def test_fused_adamw_is_what_the_optimizer_calls() -> None:
    parameter = nn.Parameter(torch.linspace(-1, 1, 100))
    mine = parameter.detach().clone()
    moments = torch.zeros(100), torch.zeros(100)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(1, 4):
        grad = torch.linspace(0, step, 100)
        parameter.grad = grad.clone()
        optimizer.step()
        fused_adamw_(
            [mine], [grad], [moments[0]], [moments[1]], [torch.tensor(float(step))],
            lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, maximize=False,
        )  # fmt: skip
        assert torch.equal(mine, parameter)


def test_gradients_of_a_stack_share_their_memory() -> None:
    """So plain PyTorch adds a second gradient to it once per parameter; offloaded gradients leave in between."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(5)]
    for _ in range(2):
        (torch.stack(parameters).sum(0) * torch.ones(4)).sum().backward()
    grads = [p.grad for p in parameters if p.grad is not None]
    assert len({grad.data_ptr() for grad in grads}) == 1
    assert all(bool((grad == 6).all()) for grad in grads)  # and not 2
