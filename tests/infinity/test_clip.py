"""Clipping in parts has the bits of `torch.nn.utils.clip_grad_norm_`."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from infinity.optim.clip import clip_coefficient, parameter_norm, total_norm

SIZES = (1, 37, 63, 64, 65, 513, 4097, 32_767, 32_769, 100_003, 1_000_003)
SHAPES = ((1,), (37,), (7, 9), (64, 65), (3, 5, 7), (513, 129), (1, 70_001), (70_001, 1), (2, 3, 4, 5))


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.int32), right.view(torch.int32))


def gradients(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (index % 5 - 2) for index, shape in enumerate(shapes)]


def clipped_by_torch(
    grads: Sequence[Tensor], max_norm: float, foreach: bool | None = None
) -> tuple[Tensor, list[Tensor]]:
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, foreach=foreach)
    return norm, [parameter.grad for parameter in parameters if parameter.grad is not None]


def flat_views(grads: Sequence[Tensor], slack: int = 0) -> list[Tensor]:
    """Each gradient as a 1-D view of one flat buffer, in slots at multiples of 64 elements."""
    starts, start = [], slack
    for grad in grads:
        starts.append(start)
        start += -(-grad.numel() // 64) * 64
    buffer = torch.full((start,), float("nan"))
    views = [buffer[at : at + grad.numel()] for at, grad in zip(starts, grads, strict=True)]
    for view, grad in zip(views, grads, strict=True):
        view.copy_(grad.flatten())
    return views


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e4, 1e9, 0.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("shapes", [[(size,) for size in SIZES], SHAPES], ids=["sizes", "shapes"])
def test_norm_and_scaled_gradients(shapes: Sequence[tuple[int, ...]], foreach: bool | None, max_norm: float) -> None:
    grads = gradients(shapes)
    expected_norm, expected = clipped_by_torch(grads, max_norm, foreach)
    norm = total_norm([parameter_norm(view) for view in flat_views(grads)])
    assert same_bits(norm, expected_norm)
    coefficient = clip_coefficient(norm, max_norm)
    assert coefficient.shape == ()
    for grad, scaled in zip(grads, expected, strict=True):
        assert same_bits(grad * coefficient, scaled)


def test_many_parameters() -> None:
    grads = gradients([(1 + index * 7919 % 301,) for index in range(3000)])
    expected_norm, expected = clipped_by_torch(grads, 0.1)
    norm = total_norm([parameter_norm(view) for view in flat_views(grads)])
    assert same_bits(norm, expected_norm)
    coefficient = clip_coefficient(norm, 0.1)
    assert all(same_bits(grad * coefficient, scaled) for grad, scaled in zip(grads, expected, strict=True))


@pytest.mark.parametrize("shape", [(size,) for size in SIZES] + list(SHAPES))
@pytest.mark.parametrize("slack", [0, 64, 1, 3])
def test_norm_of_a_flat_view_is_that_of_the_tensor(shape: tuple[int, ...], slack: int) -> None:
    grad = gradients([shape])[0]
    assert same_bits(parameter_norm(flat_views([grad], slack)[0]), parameter_norm(grad))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_matches_torch_at_every_thread_count(threads: int) -> None:
    grads = gradients([(1_000_003,), (100_003,), (37,)])
    alone = [parameter_norm(grad) for grad in grads]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(same_bits(parameter_norm(grad), norm) for grad, norm in zip(grads, alone, strict=True))
        expected_norm, _ = clipped_by_torch(grads, 1.0)
        assert same_bits(total_norm([parameter_norm(view) for view in flat_views(grads)]), expected_norm)
    finally:
        torch.set_num_threads(before)


def test_another_thread_gives_the_same_bits() -> None:
    grad = gradients([(1_000_003,)])[0]
    with ThreadPoolExecutor(1, thread_name_prefix="norms") as pool:
        assert same_bits(pool.submit(parameter_norm, grad).result(timeout=100), parameter_norm(grad))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_gradients_go_through_as_in_torch(bad: float) -> None:
    grads = gradients([(65,), (513,)])
    grads[1][100] = bad
    expected_norm, expected = clipped_by_torch(grads, 1.0)
    norm = total_norm([parameter_norm(grad) for grad in grads])
    torch.testing.assert_close(norm, expected_norm, rtol=0, atol=0, equal_nan=True)
    coefficient = clip_coefficient(norm, 1.0)
    for grad, scaled in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad * coefficient, scaled, rtol=0, atol=0, equal_nan=True)


def test_zero_and_denormal_gradients() -> None:
    for grads in ([torch.zeros(65)], [torch.full((513,), 1e-42), torch.zeros(1)]):
        expected_norm, expected = clipped_by_torch(grads, 1.0)
        norm = total_norm([parameter_norm(grad) for grad in grads])
        assert same_bits(norm, expected_norm)
        assert all(same_bits(g * clip_coefficient(norm, 1.0), s) for g, s in zip(grads, expected, strict=True))


def test_nothing_to_clip() -> None:
    norm = total_norm([])
    assert same_bits(norm, nn.utils.clip_grad_norm_([], 1.0))
    assert clip_coefficient(norm, 1.0).item() == 1.0


def test_no_graph_is_recorded() -> None:
    grad = torch.ones(64, requires_grad=True)
    norm = total_norm([parameter_norm(grad)])
    assert not norm.requires_grad
    assert not clip_coefficient(norm, 1.0).requires_grad
