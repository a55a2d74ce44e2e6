"""The fp32 kernel is `torch.optim.AdamW(fused=True)` bit for bit, however the slots are cut into chunks and pieces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from infinity.config import Precision
from infinity.optim.clip import clip_coefficient, parameter_norm, total_norm
from infinity.optim.forms import WholeMaster
from infinity.optim.hyper import CUT_NUMEL, AdamWHyper, Kernel, Piece
from infinity.optim.kernels import kernel_for
from infinity.optim.rules import AdamWRule
from infinity.torch_compat import preserve_version_counter

ODD_SIZES = (1, 37, 63, 64, 65, 513, 1_000_003)
SMALL_SIZES = (1, 37, 63, 64, 65, 513, 10_007)
STEPS = 10


@dataclass
class Group:
    """Parameters of one group in the reference, and where they lie in the flat buffers."""

    parameters: list[nn.Parameter]
    starts: list[int]
    hyper: AdamWHyper


def build(sizes: Sequence[int], hypers: Sequence[AdamWHyper], seed: int) -> tuple[list[Group], int]:
    """Parameters dealt out to the groups in turn, in slots that start at multiples of 64."""
    generator = torch.Generator().manual_seed(seed)
    groups = [Group([], [], hyper) for hyper in hypers]
    start = 0
    for index, size in enumerate(sizes):
        group = groups[index % len(groups)]
        group.parameters.append(nn.Parameter(torch.randn(size, generator=generator)))
        group.starts.append(start)
        start += -(-size // CUT_NUMEL) * CUT_NUMEL
    return groups, start


def slots(groups: Sequence[Group]) -> Iterator[tuple[nn.Parameter, int, AdamWHyper]]:
    for group in groups:
        for parameter, start in zip(group.parameters, group.starts, strict=True):
            yield parameter, start, group.hyper


def chunks(groups: Sequence[Group], numel: int, chunk: int, step: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """Cuts of the flat buffers every `chunk` elements: (first, last, pieces relative to first)."""
    for first in range(0, numel, chunk):
        last = min(first + chunk, numel)
        pieces = []
        for parameter, start, hyper in slots(groups):
            begin, end = max(start, first), min(start + parameter.numel(), last)
            if begin < end:
                pieces.append(Piece(begin - first, end - first, step, hyper))
        yield first, last, sorted(pieces, key=lambda piece: piece.start)


def reference(groups: Sequence[Group]) -> torch.optim.AdamW:
    settings = [
        {
            "params": group.parameters,
            "lr": group.hyper.lr,
            "betas": (group.hyper.beta1, group.hyper.beta2),
            "eps": group.hyper.eps,
            "weight_decay": group.hyper.weight_decay,
            "maximize": group.hyper.maximize,
        }
        for group in groups
    ]
    return torch.optim.AdamW(settings, fused=True)


def flat(groups: Sequence[Group], numel: int, tensors: Sequence[Tensor]) -> Tensor:
    buffer = torch.zeros(numel)
    for (_, start, _), tensor in zip(slots(groups), tensors, strict=True):
        buffer[start : start + tensor.numel()] = tensor.detach().flatten()
    return buffer


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def run(
    sizes: Sequence[int], hypers: Sequence[AdamWHyper], chunk: int, max_norm: float | None, steps: int = STEPS
) -> None:
    groups, numel = build(sizes, hypers, seed=len(sizes))
    kernel = kernel_for(Precision.FP32)
    optimizer = reference(groups)
    parameters = [parameter for parameter, _, _ in slots(groups)]
    param = flat(groups, numel, parameters)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0 ** (step % 3 - 1)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grad = flat(groups, numel, grads)
        scale = None
        if max_norm is not None:
            views = [grad[start : start + parameter.numel()] for parameter, start, _ in slots(groups)]
            scale = clip_coefficient(total_norm([parameter_norm(view) for view in views]), max_norm)
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        for first, last, pieces in chunks(groups, numel, chunk, step):
            state = (exp_avg[first:last], exp_avg_sq[first:last])
            kernel.update(param[first:last], grad[first:last], state, pieces, scale)
        assert same_bits(grad, flat(groups, numel, grads))
        assert same_bits(param, flat(groups, numel, parameters)), f"parameters differ after step {step}"
    states = [optimizer.state[parameter] for parameter in parameters]
    assert same_bits(exp_avg, flat(groups, numel, [state["exp_avg"] for state in states]))
    assert same_bits(exp_avg_sq, flat(groups, numel, [state["exp_avg_sq"] for state in states]))


PLAIN = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
DECAY = AdamWHyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
UPWARDS = AdamWHyper(lr=1e-2, beta1=0.3, beta2=0.99, eps=1e-6, weight_decay=0.01, maximize=True)


def test_odd_sizes_in_one_chunk() -> None:
    run(ODD_SIZES, [DECAY], chunk=1 << 30, max_norm=None)


def test_odd_sizes_clipped_and_cut_through_the_large_one() -> None:
    run(ODD_SIZES, [DECAY, PLAIN], chunk=64 * 3001, max_norm=1.0)


@pytest.mark.parametrize("chunk", [64, 128, 64 * 7, 64 * 100])
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6], ids=["unclipped", "clipped", "under"])
def test_cuts_and_groups(chunk: int, max_norm: float | None) -> None:
    run(SMALL_SIZES, [PLAIN, DECAY, UPWARDS], chunk, max_norm)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_torch_threads_do_not_matter(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run((100_003, 65), [DECAY], chunk=64 * 500, max_norm=None, steps=3)
    finally:
        torch.set_num_threads(before)


def test_a_late_step_number_and_steps_that_differ_between_slots() -> None:
    steps = {0: 1, 64: 70_000}
    param, grad = torch.randn(128), torch.randn(128)
    exp_avg, exp_avg_sq = torch.randn(128), torch.rand(128)
    expected = []
    for start, step in steps.items():
        parameter = nn.Parameter(param[start : start + 64].clone())
        parameter.grad = grad[start : start + 64].clone()
        optimizer = torch.optim.AdamW([parameter], lr=DECAY.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step - 1)),
            "exp_avg": exp_avg[start : start + 64].clone(),
            "exp_avg_sq": exp_avg_sq[start : start + 64].clone(),
        }
        optimizer.step()
        expected.append(parameter.detach())
    pieces = [Piece(start, start + 64, step, DECAY) for start, step in steps.items()]
    WholeMaster(AdamWRule()).update(param, grad, (exp_avg, exp_avg_sq), pieces, None)
    assert same_bits(param, torch.cat(expected))


def test_padding_and_gaps_are_left_alone() -> None:
    param, grad, exp_avg, exp_avg_sq = (torch.full((256,), 7.0) for _ in range(4))
    pieces = [Piece(0, 37, 1, DECAY), Piece(64, 64, 1, DECAY), Piece(128, 200, 1, DECAY)]
    WholeMaster(AdamWRule()).update(param, grad, (exp_avg, exp_avg_sq), pieces, torch.tensor(0.5))
    touched = torch.zeros(256, dtype=torch.bool)
    touched[0:37] = touched[128:200] = True
    for tensor in (param, grad, exp_avg, exp_avg_sq):
        assert torch.equal(tensor != 7.0, touched)


def test_no_pieces_is_no_work() -> None:
    param = torch.ones(64)
    WholeMaster(AdamWRule()).update(param, torch.ones(64), (torch.ones(64), torch.ones(64)), [], None)
    assert torch.equal(param, torch.ones(64))


def test_works_under_grad_mode_on_a_view_of_a_parameter() -> None:
    parameter = nn.Parameter(torch.ones(64))
    WholeMaster(AdamWRule()).update(
        parameter.detach(), torch.ones(64), (torch.zeros(64), torch.zeros(64)), [Piece(0, 64, 1, PLAIN)], None
    )
    assert not torch.equal(parameter.detach(), torch.ones(64))


@pytest.mark.parametrize("kernel", [kernel_for(Precision.FP32), kernel_for(Precision.BF16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"param": torch.zeros(128, dtype=torch.float64)}, "param: a contiguous"),
        ({"param": torch.zeros(128, dtype=torch.float16)}, "param: a contiguous"),
        ({"grad": torch.zeros(128, dtype=torch.bfloat16)}, "grad: a contiguous"),
        ({"grad": torch.zeros(64)}, "grad has 64 elements, param has 128"),
        ({"grad": torch.zeros(256)[::2]}, "grad: a contiguous"),
        ({"grad": torch.zeros(2, 64)}, "grad: a contiguous"),
        ({"grad": torch.zeros(128, device="meta")}, "on meta"),
        ({"state": ()}, "state has 0 parts"),
        ({"pieces": [Piece(0, 129, 1, PLAIN)]}, "leaves the chunk"),
        ({"pieces": [Piece(0, 65, 1, PLAIN), Piece(64, 128, 1, PLAIN)]}, "overlaps"),
        ({"pieces": [Piece(32, 128, 1, PLAIN)]}, "grid of 64"),
        ({"pieces": [Piece(0, 128, 0, PLAIN)]}, "counted from 1"),
    ],
)
def test_operands_that_do_not_fit_are_refused(kernel: Kernel, change: dict[str, object], message: str) -> None:
    operands: dict[str, object] = {
        "param": torch.zeros(128, dtype=kernel.param_dtype),
        "grad": torch.zeros(128),
        "state": [torch.zeros(128, dtype=field.dtype) for field in kernel.fields],
        "pieces": [Piece(0, 128, 1, PLAIN)],
        "grad_scale": None,
    }
    with pytest.raises(ValueError, match=message):
        kernel.update(**(operands | change))  # type: ignore[arg-type]


def test_kernels_say_what_they_store() -> None:
    fp32, bf16 = kernel_for(Precision.FP32), kernel_for(Precision.BF16)
    assert [field.name for field in fp32.fields] == ["exp_avg", "exp_avg_sq"]
    assert [field.name for field in bf16.fields] == ["low", "exp_avg", "exp_avg_sq"]
    assert (fp32.param_dtype, bf16.param_dtype) == (torch.float32, torch.bfloat16)
    fp32.warm_up()


def test_writes_under_the_preserved_counter_are_invisible_to_autograd() -> None:
    first, second, watched = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    with preserve_version_counter(first, second):
        for tensor in (first, second, watched):
            tensor.copy_(torch.ones(3))
    assert (first._version, second._version, watched._version) == (0, 0, 1)
