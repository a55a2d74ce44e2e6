"""The split-master kernel against a written reference, and the split itself, on every kind of bit pattern."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from infinity.config import Precision
from infinity.optim.hyper import AdamWHyper, Piece
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from infinity.optim.splitmaster import join_master, split_master

QUIET_NAN = 0x7FC00000
SPECIAL_BITS = (
    0x00000000,  # +0
    0x80000000,  # -0
    0x00000001,  # smallest denormal
    0x807FFFFF,  # largest negative denormal
    0x00007FFF,  # denormals around the first ties
    0x00008000,
    0x00008001,
    0x00018000,
    0x80008000,
    0x3F800000,  # 1
    0x3F808000,  # a tie above an even high half
    0x3F818000,  # a tie above an odd one
    0xBF808000,
    0x3F807FFF,
    0x3F808001,
    0x7F7F7FFF,  # largest that stays finite in the high half
    0x7F7F8000,  # the high half becomes infinity
    0x7F7FFFFF,  # largest finite
    0xFF7FFFFF,
    0x7F800000,  # infinities
    0xFF800000,
    0x7F800001,  # NaNs whose high half would be infinity, zero, or fine
    0x7FFF8000,
    0x7FFFFFFF,
    0xFFFFFFFF,
    0x7FC00000,
    0xFFC00000,
)
any_bits = st.one_of(st.sampled_from(SPECIAL_BITS), st.integers(0, 2**32 - 1))

HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
HYPERS = (
    HYPER,
    replace(HYPER, weight_decay=0.0, lr=0.3),
    replace(HYPER, beta1=0.25, maximize=True),
    replace(HYPER, beta1=0.0, beta2=0.0, eps=0.0),
)


def from_bits(bits: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.int32)).view(torch.float32)


def to_bits(tensor: Tensor) -> npt.NDArray[np.uint32]:
    return tensor.view(torch.int32).numpy().view(np.uint32)


def canonical(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The bits with every NaN made the one the split keeps."""
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(QUIET_NAN), bits)


@dataclass
class Operands:
    """What one update reads and writes, as the kernel takes it."""

    hi: Tensor
    lo: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def build(cls, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> "Operands":
        return cls(*split_master(master), grad.clone(), exp_avg.clone(), exp_avg_sq.clone())

    @classmethod
    def random(cls, numel: int, seed: int = 0) -> "Operands":
        generator = torch.Generator().manual_seed(seed)
        master, grad, exp_avg, exp_avg_sq = (torch.randn(numel, generator=generator) for _ in range(4))
        return cls.build(master, grad, exp_avg * 0.1, exp_avg_sq.square() * 0.01)

    def clone(self) -> "Operands":
        return Operands(*(getattr(self, name).clone() for name in ("hi", "lo", "grad", "exp_avg", "exp_avg_sq")))

    def update(
        self, kernel: SplitMasterAdamW, pieces: Sequence[Piece], scale: Tensor | None, start: int, stop: int
    ) -> None:
        cut = slice(start, stop)
        state = (self.lo[cut], self.exp_avg[cut], self.exp_avg_sq[cut])
        kernel.update(self.hi[cut], self.grad[cut], state, pieces, scale)

    def written(self) -> dict[str, npt.NDArray[np.generic]]:
        return {
            "hi": self.hi.view(torch.int16).numpy(),
            "lo": self.lo.numpy(),
            "exp_avg": canonical(to_bits(self.exp_avg)),
            "exp_avg_sq": canonical(to_bits(self.exp_avg_sq)),
        }


def assert_same(left: Operands, right: Operands) -> None:
    expected = right.written()
    for name, array in left.written().items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def reference(operands: Operands, hyper: AdamWHyper, step: int, scale: float | None) -> Operands:
    """AdamW written out in numpy, every operation in fp32 and rounded on its own."""
    one = np.float32(1)
    weight, beta2 = np.float32(1 - hyper.beta1), np.float32(hyper.beta2)
    with np.errstate(all="ignore"):
        grad = operands.grad.numpy().copy()
        if scale is not None:
            grad = grad * np.float32(scale)
        if hyper.maximize:
            grad = grad * np.float32(-1)
        master = join_master(operands.hi, operands.lo).numpy()
        if hyper.weight_decay != 0:
            master = master * np.float32(1 - hyper.lr * hyper.weight_decay)
        exp_avg = operands.exp_avg.numpy()
        difference = grad - exp_avg
        exp_avg = exp_avg + weight * difference if weight < 0.5 else grad + (weight - one) * difference
        exp_avg_sq = operands.exp_avg_sq.numpy() * beta2 + np.float32(1 - hyper.beta2) * grad * grad
        correction = np.float32((1 - hyper.beta2**step) ** 0.5)
        denominator = np.sqrt(exp_avg_sq) / correction + np.float32(hyper.eps)
        master = master + np.float32(-(hyper.lr / (1 - hyper.beta1**step))) * exp_avg / denominator
    assert master.dtype == exp_avg.dtype == exp_avg_sq.dtype == np.float32
    bits = canonical(master.view(np.uint32)).astype(np.uint64)
    hi = ((bits + 0x8000) >> 16).astype(np.uint16).view(np.int16)
    lo = (bits & 0xFFFF).astype(np.uint16).view(np.int16)
    return Operands(
        torch.from_numpy(hi).view(torch.bfloat16),
        torch.from_numpy(lo),
        operands.grad,
        torch.from_numpy(exp_avg),
        torch.from_numpy(exp_avg_sq),
    )


# ---- the split


def test_split_of_special_values_is_lossless() -> None:
    master = from_bits(SPECIAL_BITS)
    hi, lo = split_master(master)
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16)
    np.testing.assert_array_equal(to_bits(join_master(hi, lo)), canonical(to_bits(master)))
    assert torch.equal(hi.isnan(), master.isnan())
    assert not lo[master.isnan()].any()


@given(st.lists(any_bits, min_size=1, max_size=100))
def test_split_and_join_give_back_every_bit(bits: list[int]) -> None:
    master = from_bits(bits)
    before = to_bits(master).copy()
    joined = join_master(*split_master(master))
    np.testing.assert_array_equal(to_bits(joined), canonical(before))
    np.testing.assert_array_equal(to_bits(master), before)


@given(st.lists(any_bits, min_size=1, max_size=100))
def test_the_high_half_is_the_nearest_bf16(bits: list[int]) -> None:
    master = from_bits(bits)
    hi, _ = split_master(master)
    rounded = master.to(torch.bfloat16)  # nearest as well, but ties to even
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    same = (hi.view(torch.int16) == rounded.view(torch.int16)) | hi.isnan()
    assert bool((same | tie).all())
    assert bool((hi.double().abs() >= master.double().abs())[tie & ~master.isnan()].all())


def test_every_bf16_value_splits_into_itself() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    hi, lo = split_master(values.float())
    finite = ~values.isnan()
    assert torch.equal(hi.view(torch.int16)[finite], values.view(torch.int16)[finite])
    assert not lo.any()


def test_split_keeps_shapes_and_takes_views() -> None:
    master = torch.randn(6, 10)[:, ::2]
    hi, lo = split_master(master)
    assert hi.shape == lo.shape == (6, 5)
    assert torch.equal(join_master(hi, lo), master)
    assert join_master(*split_master(torch.empty(0))).shape == (0,)
    assert torch.equal(join_master(*split_master(nn.Parameter(torch.tensor(1.1)))), torch.tensor(1.1))


def test_split_refuses_other_dtypes() -> None:
    with pytest.raises(TypeError, match=r"torch\.float64"):
        split_master(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"torch\.float16"):
        join_master(torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.int16))


# ---- the kernel


@pytest.mark.parametrize("numel", [1, 15, 16, 63, 64, 65, 255, 256, 257, 513, 10_007])
@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_ten_steps_have_the_bits_of_the_reference(numel: int, hyper: AdamWHyper, scale: float | None) -> None:
    ours = Operands.random(numel)
    expected = ours.clone()
    factor = None if scale is None else torch.tensor(scale)
    for step in range(1, 11):
        ours.grad = expected.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        ours.update(SplitMasterAdamW(), [Piece(0, numel, step, hyper)], factor, 0, numel)
        expected = reference(expected, hyper, step, scale)
        assert_same(ours, expected)


@given(
    st.lists(st.tuples(any_bits, any_bits, any_bits, any_bits), min_size=1, max_size=70),
    st.sampled_from(HYPERS),
    st.integers(1, 10**6),
    st.sampled_from([None, 1.0, 0.5, 1e-30, 0.0, float("inf"), float("nan")]),
)
def test_any_bit_patterns(
    rows: list[tuple[int, int, int, int]], hyper: AdamWHyper, step: int, scale: float | None
) -> None:
    ours = Operands.build(*(from_bits(column) for column in zip(*rows, strict=True)))
    expected = reference(ours.clone(), hyper, step, scale)
    ours.update(
        SplitMasterAdamW(),
        [Piece(0, len(rows), step, hyper)],
        None if scale is None else torch.tensor(scale),
        0,
        len(rows),
    )
    assert_same(ours, expected)


def test_special_values_in_every_operand_at_every_lane() -> None:
    special = list(SPECIAL_BITS)
    count = len(special)
    columns = [(special * count)[shift:] + (special * count)[:shift] for shift in range(0, 4 * 7, 7)]
    ours = Operands.build(*(from_bits(column) for column in columns))
    expected = reference(ours.clone(), HYPER, 3, None)
    ours.update(SplitMasterAdamW(), [Piece(0, count * count, 3, HYPER)], None, 0, count * count)
    assert_same(ours, expected)


def test_close_to_torch_fused_adamw() -> None:
    numel = 1001
    ours = Operands.random(numel)
    ours.exp_avg.zero_()
    ours.exp_avg_sq.zero_()
    parameter = nn.Parameter(join_master(ours.hi, ours.lo))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(1, 21):
        ours.grad = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        parameter.grad = ours.grad.clone()
        optimizer.step()
        ours.update(SplitMasterAdamW(), [Piece(0, numel, step, HYPER)], None, 0, numel)
    torch.testing.assert_close(join_master(ours.hi, ours.lo), parameter.detach(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(ours.exp_avg, optimizer.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk", [64, 192, 6400, 64 * 5000])
@pytest.mark.parametrize("count", [None, 1, 2, 3])
def test_bits_do_not_depend_on_cuts_or_threads(chunk: int, count: int | None) -> None:
    numel = 700_037 if chunk > 1000 else 3_001
    whole = Operands.random(numel)
    cut = whole.clone()
    whole.update(SplitMasterAdamW(), [Piece(0, numel, 5, HYPER)], None, 0, numel)
    threads = None if count is None else KernelThreads(count)
    try:
        kernel = SplitMasterAdamW(threads)
        for first in range(0, numel, chunk):
            last = min(first + chunk, numel)
            cut.update(kernel, [Piece(0, last - first, 5, HYPER)], None, first, last)
    finally:
        if threads is not None:
            threads.close()
    assert_same(cut, whole)


def test_many_pieces_over_threads_and_gaps_left_alone() -> None:
    sizes = [1, 37, 64, 200_003, 513, 0, 131_072, 65] + [3] * 50 + [150_001]
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        pieces.append(Piece(start, start + size, index + 1, HYPERS[index % len(HYPERS)]))
        start += -(-size // 64) * 64 + 64
    ours = Operands.random(start)
    expected = ours.clone()
    with KernelThreads(3) as threads:
        ours.update(SplitMasterAdamW(threads), pieces, torch.tensor(0.7), 0, start)
    for piece in pieces:
        span = slice(piece.start, piece.stop)
        names = ("hi", "lo", "grad", "exp_avg", "exp_avg_sq")
        part = Operands(*(getattr(expected, name)[span] for name in names))
        updated = reference(part, piece.hyper, piece.step, 0.7)
        for name in names:
            getattr(expected, name)[span] = getattr(updated, name)
    assert_same(ours, expected)


def test_the_gradient_is_only_read() -> None:
    operands = Operands.random(300)
    before = operands.grad.clone()
    operands.update(SplitMasterAdamW(), [Piece(0, 300, 1, HYPER)], torch.tensor(0.5), 0, 300)
    assert torch.equal(operands.grad, before)


def test_no_pieces_is_no_work() -> None:
    operands = Operands.random(64)
    before = operands.clone()
    with KernelThreads(2) as threads:
        operands.update(SplitMasterAdamW(threads), [], None, 0, 64)
        operands.update(SplitMasterAdamW(threads), [Piece(0, 0, 1, HYPER)], None, 0, 64)
    assert_same(operands, before)


# ---- threads


def test_kernel_for_passes_the_threads_on() -> None:
    with KernelThreads(2) as threads:
        kernel = kernel_for(Precision.BF16, threads)
        kernel.warm_up()
        operands = Operands.random(300_000)
        expected = reference(operands.clone(), HYPER, 1, None)
        state = (operands.lo, operands.exp_avg, operands.exp_avg_sq)
        kernel.update(operands.hi, operands.grad, state, [Piece(0, 300_000, 1, HYPER)], None)
    assert_same(operands, expected)


def test_parts_run_side_by_side_on_named_threads() -> None:
    barrier = threading.Barrier(3, timeout=100)
    names = []

    def part() -> None:
        barrier.wait()
        names.append(threading.current_thread().name)

    with KernelThreads(3) as threads:
        threads.run([part] * 3)
    assert threading.current_thread().name in names
    assert sum(name.startswith("infinity-kernel") for name in names) == 2
    assert not any(thread.name.startswith("infinity-kernel") for thread in threading.enumerate())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_raised_after_the_other_parts_are_done(failing: int) -> None:
    done = []

    def fail() -> None:
        raise ZeroDivisionError("broken part")

    with KernelThreads(2) as threads:
        parts = [fail if index == failing else lambda: done.append(1) for index in range(4)]
        with pytest.raises(ZeroDivisionError, match="broken part"):
            threads.run(parts[:2])
    assert done == [1]


def test_threads_are_closed_once_and_for_all() -> None:
    threads = KernelThreads(2)
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.run([])
    with pytest.raises(ValueError, match="at least one"):
        KernelThreads(0)
    assert KernelThreads(1).count == 1
