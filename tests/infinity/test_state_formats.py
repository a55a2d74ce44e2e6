"""Moments in bf16 and in 8-bit codes: the kernel against a written reference, the codes, and the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import infinity
from infinity.config import OptimizerKind, Precision, StateFormat
from infinity.optim.hyper import AdamWHyper, Kernel, Piece, payload_nbytes, stored_nbytes
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.optim.kernels_bf16 import SplitMasterAdamW
from infinity.optim.moments import MOMENT_FORMATS, code_count, first_bits, noise_keys, rounding_seed
from infinity.optim.splitmaster import split_master
from tests.infinity.test_kernels_bf16 import Operands
from tests.infinity.test_kernels_bf16 import reference as fp32_reference

Words = npt.NDArray[np.uint32]
HYPER = AdamWHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
FORMATS = [StateFormat.BF16, StateFormat.INT8]
MOMENTS = ("exp_avg", "exp_avg_sq")


# ---- the written reference


def drawn(seed: int, step: int, numbers: npt.NDArray[np.int64]) -> Words:
    """The random bits of elements of a parameter, in Python's and numpy's integers."""

    def mixed(word: Words) -> Words:
        word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
        word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
        return word ^ (word >> np.uint32(16))

    first, second = (np.uint32(key) for key in noise_keys(seed, step))
    with np.errstate(over="ignore"):
        return mixed(mixed(numbers.astype(np.uint32) * np.uint32(0x9E3779B9) + first) + second)


def rounded_bf16(values: Tensor, noise: Words) -> Tensor:
    bits = values.numpy().view(np.uint32).astype(np.uint64)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = np.where(is_nan, 0x7FC0, (bits + noise) >> 16)
    return torch.from_numpy(rounded.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def rounded_int8(name: str, values: Tensor, noise: Words) -> tuple[Tensor, Tensor]:
    count, first = code_count(name), first_bits(name)
    start = np.array(first, dtype=np.uint32).view(np.float32)
    padded = np.zeros(-(-values.numel() // 64) * 64, dtype=np.float32)
    padded[: values.numel()] = values.numpy()
    blocks = padded.reshape(-1, 64)
    largest = np.abs(blocks).max(axis=1)
    with np.errstate(all="ignore"):
        least = np.float32(2.0**-126) if count == 255 else np.float32(0)
        scales = np.where(largest < np.float32(2.0**-126), np.where(largest > 0, least, np.float32(0)), largest)
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0)).astype(np.float32)
        ratio = (np.abs(blocks) * inverse[:, None]).astype(np.float32) + start
    ratio = np.minimum(ratio, np.float32(1)).astype(np.float32).reshape(-1)[: values.numel()]
    codes = (ratio.view(np.uint32) - np.uint32(first) + (noise << np.uint32(3))) >> np.uint32(19)
    if count == 255:
        codes = np.maximum(codes, (values.numpy() > 0).astype(np.uint32))
    else:
        codes = codes | (values.numpy().view(np.uint32) >> np.uint32(31) << np.uint32(7))
    return torch.from_numpy(codes.astype(np.uint8)), torch.from_numpy(scales.astype(np.float32))


def reference(
    param: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, seed: int, form: StateFormat
) -> tuple[Tensor, dict[str, Tensor]]:
    """One update of a whole parameter: decode, AdamW in fp32, round at random."""
    moments = {name: MOMENT_FORMATS[form].decode(name, state) for name in MOMENTS}
    operands = Operands(param, state["low"], grad, moments["exp_avg"], moments["exp_avg_sq"])
    after = fp32_reference(operands, HYPER, step, None)
    words = drawn(seed, step, np.arange(param.numel()))
    noise = {"exp_avg": words & np.uint32(0xFFFF), "exp_avg_sq": words >> np.uint32(16)}
    new = {"low": after.lo}
    for name in MOMENTS:
        if form is StateFormat.BF16:
            new[name] = rounded_bf16(getattr(after, name), noise[name])
        else:
            new[name], new[name + "_scale"] = rounded_int8(name, getattr(after, name), noise[name])
    return after.hi, {name: new[name] for name in state}


def fresh(form: StateFormat, numel: int) -> dict[str, Tensor]:
    kernel = SplitMasterAdamW(None, form)
    return {field.name: torch.zeros(field.numel(numel), dtype=field.dtype) for field in kernel.fields}


def gradient(numel: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, tensor in right.items():
        assert torch.equal(left[name].view(torch.uint8), tensor.view(torch.uint8)), name


def cut_numel(chunk_numel: int) -> int:
    """Elements to cut into such chunks, the last of which is not full."""
    return 700_037 if chunk_numel > 1000 else 3_001


def check_cuts(
    kernel_of: Callable[[KernelThreads | None], Kernel],
    param: Tensor,
    state: dict[str, Tensor],
    chunk_numel: int,
    n_threads: int,
) -> None:
    """Two updates of the whole by one thread, and of chunks by several, give the same bits."""
    alone, numel = kernel_of(None), param.numel()
    cut_param, cut = param.clone(), {name: tensor.clone() for name, tensor in state.items()}
    with KernelThreads(n_threads) as threads:
        kernel = kernel_of(threads)
        for step in (1, 2):
            grad = gradient(numel, step)
            alone.update(param, grad, list(state.values()), [Piece(0, numel, step, HYPER, seed=5)], None)
            for first in range(0, numel, chunk_numel):
                last = min(first + chunk_numel, numel)
                part = [cut[f.name][f.numel(first) : f.numel(last)] for f in kernel.fields]
                piece = Piece(0, last - first, step, HYPER, first, 5)
                kernel.update(cut_param[first:last], grad[first:last], part, [piece], None)
    assert torch.equal(param.view(torch.int16), cut_param.view(torch.int16))
    assert_same(cut, state)


# ---- the kernel


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 255, 256, 257, 4097])
@pytest.mark.parametrize("form", FORMATS)
def test_ten_steps_have_the_bits_of_the_reference(form: StateFormat, numel: int) -> None:
    kernel, seed = SplitMasterAdamW(None, form), rounding_seed("weight")
    param, low = split_master(gradient(numel, 0))
    state = fresh(form, numel) | {"low": low}
    expected, expected_state = param.clone(), {name: tensor.clone() for name, tensor in state.items()}
    for step in range(1, 11):
        grad = gradient(numel, step)
        kernel.update(param, grad, list(state.values()), [Piece(0, numel, step, HYPER, seed=seed)], None)
        expected, expected_state = reference(expected, grad, expected_state, step, seed, form)
        assert torch.equal(param.view(torch.int16), expected.view(torch.int16))
        assert_same(state, expected_state)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("chunk", [64, 192, 6400, 64 * 5000])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bits_do_not_depend_on_cuts_or_threads(form: StateFormat, chunk: int, count: int) -> None:
    numel = cut_numel(chunk)
    param, low = split_master(gradient(numel, 0))
    state = fresh(form, numel) | {"low": low}
    check_cuts(lambda threads: SplitMasterAdamW(threads, form), param, state, chunk, count)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_between_the_pieces_stays(form: StateFormat) -> None:
    param, grad, state = torch.ones(256).bfloat16(), gradient(256, 1), fresh(form, 256)
    kernel = SplitMasterAdamW(None, form)
    kernel.update(param, grad, list(state.values()), [Piece(0, 256, 1, HYPER)], None)
    grad = gradient(256, 2) * 3
    before = {name: tensor.clone() for name, tensor in state.items()}
    kernel.update(param, grad, list(state.values()), [Piece(64, 70, 2, HYPER), Piece(128, 192, 2, HYPER)], None)
    for name, tensor in state.items():
        blocks = tensor.view(4, -1)
        assert torch.equal(blocks[[0, 3]], before[name].view(4, -1)[[0, 3]]), name
        assert not torch.equal(blocks[2], before[name].view(4, -1)[2]), name


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_vanish(form: StateFormat, bad: float) -> None:
    param, grad, state = torch.ones(128).bfloat16(), torch.ones(128), fresh(form, 128)
    grad[3] = bad
    kernel = SplitMasterAdamW(None, form)
    kernel.update(param, grad, list(state.values()), [Piece(0, 128, 1, HYPER)], None)
    decoded = [kernel.decode(name, state) for name in MOMENTS]
    assert not any(values[3].isfinite() for values in decoded)
    assert all(bool(values[64:].isfinite().all()) for values in decoded)
    kernel.update(param, torch.ones(128), list(state.values()), [Piece(0, 128, 2, HYPER)], None)
    assert bool(param[3].isnan())
    assert bool(param[64:].isfinite().all())


def test_parameters_and_steps_have_noise_of_their_own() -> None:
    numbers = np.arange(4096)
    seeds = [rounding_seed(name) for name in ("a", "b", "a.b")]
    words = [drawn(seed, step, numbers) for seed in seeds for step in (1, 2, 3)]
    for index, left in enumerate(words):
        assert abs(float(left.mean()) / 2**32 - 0.5) < 0.02
        for right in words[:index]:
            assert abs(np.corrcoef(left, right)[0, 1]) < 0.06
            assert np.count_nonzero(left == right) <= 1


@pytest.mark.parametrize("form", FORMATS)
def test_the_expected_value_is_kept(form: StateFormat) -> None:
    """A second moment far above its gradients decays; rounding to nearest would leave it where it is."""
    numel, steps = 6400, 50
    state, param = fresh(form, numel), torch.ones(numel).bfloat16()
    kernel = SplitMasterAdamW(None, form)
    start = torch.linspace(0.3, 1, 64).repeat(numel // 64)
    kernel.encode("exp_avg_sq", start, state)
    start = kernel.decode("exp_avg_sq", state)
    for step in range(1, steps + 1):
        kernel.update(param, torch.zeros(numel), list(state.values()), [Piece(0, numel, step, HYPER, seed=1)], None)
    decayed = kernel.decode("exp_avg_sq", state)
    ratio = float(decayed.mean() / start.mean())
    assert abs(ratio - HYPER.beta2**steps) < 0.01


# ---- the codes


def values_of(draw: list[float]) -> Tensor:
    return torch.tensor(draw, dtype=torch.float32)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=200))
@example([2.0**-149])  # has no inverse
@example([2.0**-127, -(2.0**-126)])
@example([2.0**-126, 2.0**-149])
def test_codes_are_near_and_decode_into_themselves(drawn_values: list[float]) -> None:
    values = values_of(drawn_values)
    form = MOMENT_FORMATS[StateFormat.INT8]
    for name, given_values in (("exp_avg", values), ("exp_avg_sq", values.abs())):
        state = {f.name: torch.zeros(f.numel(len(values)), dtype=f.dtype) for f in form.fields(MOMENTS)}
        form.encode(name, given_values, state)
        decoded = form.decode(name, state)
        c = float(np.array(first_bits(name), dtype=np.uint32).view(np.float32))
        scales = state[name + "_scale"].repeat_interleave(64)[: len(values)]
        bound = (given_values.abs() + 2 * c * scales).double() / 16 + 2.0**-126
        assert bool(((decoded - given_values).abs().double() <= bound).all())
        again = {key: tensor.clone() for key, tensor in state.items()}
        form.encode(name, decoded, again)
        assert_same(again, state)
        if name == "exp_avg_sq":
            assert bool(((decoded > 0) == (given_values > 0)).all())


@pytest.mark.parametrize("form", FORMATS)
def test_what_the_kernel_stored_is_encoded_as_it_was(form: StateFormat) -> None:
    """What a checkpoint gives back has the bytes that were saved."""
    numel = 3000
    kernel, state, param = SplitMasterAdamW(None, form), fresh(form, 3000), torch.ones(numel).bfloat16()
    for step in (1, 2, 3):
        pieces = [Piece(0, numel, step, HYPER, seed=9)]
        kernel.update(param, gradient(numel, step), list(state.values()), pieces, None)
    again = fresh(form, numel) | {"low": state["low"]}
    for name in MOMENTS:
        kernel.encode(name, kernel.decode(name, state), again)
    assert_same(again, state)


# ---- sizes and settings


def test_bytes_per_parameter() -> None:
    sizes = {form: payload_nbytes(SplitMasterAdamW(None, form).fields, 1 << 20) / (1 << 20) for form in StateFormat}
    assert sizes == {StateFormat.FP32: 10.0, StateFormat.BF16: 6.0, StateFormat.INT8: 4.125}
    # Read: 2 + 2 for the parameters, and the state; written: 2 and the state.
    assert 2 + 2 + 2 + 2 * sizes[StateFormat.INT8] == 14.25
    for form in StateFormat:
        fields = SplitMasterAdamW(None, form).fields
        assert stored_nbytes(fields, 1 << 20) == payload_nbytes(fields, 1 << 20)
        assert all(field.stored_nbytes(4096) % 4096 == 0 for field in fields)


@pytest.mark.parametrize(
    "settings",
    [{"precision": "fp32"}, {"precision": "fp16", "optimizer": "sgd"}, {"precision": "bf16", "optimizer": "lion"}],
    ids=lambda s: "-".join(s.values()),
)
def test_refused_where_there_is_no_kernel(settings: dict[str, Any]) -> None:
    with pytest.raises(infinity.ConfigError, match=r"state_format = 'int8'.*only AdamW in bf16"):
        infinity.Config(state_format="int8", **settings)


def test_kernel_for_gives_the_format() -> None:
    kernel = kernel_for(Precision.BF16, None, OptimizerKind.ADAMW, StateFormat.INT8)
    assert [field.name for field in kernel.fields] == ["low", *MOMENTS, *(name + "_scale" for name in MOMENTS)]
    assert kernel.completes_master
    with pytest.raises(infinity.ConfigError, match="only AdamW in bf16"):
        kernel_for(Precision.FP32, state_format=StateFormat.BF16)


def test_operands_of_the_wrong_length_are_refused() -> None:
    state = list(fresh(StateFormat.INT8, 128).values())
    state[-1] = state[-1][:1]
    with pytest.raises(ValueError, match=r"exp_avg_sq_scale has 1 elements, param has 128, which needs 2"):
        SplitMasterAdamW(None, StateFormat.INT8).update(
            torch.ones(128).bfloat16(), torch.ones(128), state, [Piece(0, 128, 1, HYPER)], None
        )
