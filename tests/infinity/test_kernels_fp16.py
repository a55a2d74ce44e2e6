"""AdamW on fp16 parameters beside an fp32 master: the one-pass kernel against a written reference, and its rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import infinity
from infinity.config import Precision, StateFormat
from infinity.optim.forms import SeparateMaster
from infinity.optim.hyper import AdamWHyper, Piece
from infinity.optim.kernels import kernel_for
from infinity.optim.kernels_bf16 import SeparateMasterAdamW
from infinity.optim.moments import MOMENT_FORMATS, rounding_seed
from infinity.optim.splitmaster import join_master, split_master
from tests.conftest import MakeEngine
from tests.infinity.test_kernels_bf16 import HYPERS, SPECIAL_BITS, Operands, from_bits
from tests.infinity.test_kernels_bf16 import reference as fp32_reference
from tests.infinity.test_state_formats import (
    MOMENTS,
    assert_same,
    check_cuts,
    cut_numel,
    drawn,
    gradient,
    rounded_bf16,
    rounded_int8,
)
from tests.parity.loops import gathered_parameters
from tests.zoo import Net, batch, build, loss_of

HYPER = HYPERS[0]
STILL = AdamWHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


def fresh(form: StateFormat, master: Tensor) -> dict[str, Tensor]:
    """The state of parameters that were never updated, by field."""
    kernel = SeparateMasterAdamW(None, form)
    state = {field.name: torch.zeros(field.numel(master.numel()), dtype=field.dtype) for field in kernel.fields}
    return state | {"master": master.clone()}


def reference(
    grad: Tensor, state: dict[str, Tensor], hyper: AdamWHyper, step: int, seed: int, form: StateFormat
) -> dict[str, Tensor]:
    """One update of a whole parameter: decode, AdamW in fp32, round at random."""
    moments = [MOMENT_FORMATS[form].decode(name, state) for name in MOMENTS]
    after = fp32_reference(Operands(*split_master(state["master"]), grad, *moments), hyper, step, None)
    words = drawn(seed, step, np.arange(grad.numel()))
    noise = {"exp_avg": words & np.uint32(0xFFFF), "exp_avg_sq": words >> np.uint32(16)}
    new = {"master": join_master(after.hi, after.lo)}
    for name in MOMENTS:
        value = getattr(after, name)
        if form is StateFormat.FP32:
            new[name] = value
        elif form is StateFormat.BF16:
            new[name] = rounded_bf16(value, noise[name])
        else:
            new[name], new[name + "_scale"] = rounded_int8(name, value, noise[name])
    return {name: new[name] for name in state}


def rounded_half(master: Tensor) -> np.ndarray[Any, Any]:
    """What numpy rounds to fp16, as bits."""
    with np.errstate(over="ignore"):
        return master.numpy().astype(np.float16).view(np.uint16)


def bits_of(param: Tensor) -> np.ndarray[Any, Any]:
    return param.view(torch.int16).numpy().view(np.uint16)


def test_every_half_and_what_lies_between_rounds_as_it_should() -> None:
    """All values of fp16, the ties between neighbours, and the fp32 numbers next to both."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = (halves[:-1].astype(np.float64) + halves[1:].astype(np.float64)) / 2
        places = np.concatenate([halves, ties.astype(np.float32), np.array([65519.0, 65520.0, 65536.0], np.float32)])
        around = [places, np.nextafter(places, np.float32(np.inf)), np.nextafter(places, np.float32(-np.inf))]
    master = torch.cat([torch.from_numpy(np.concatenate(around)), from_bits(SPECIAL_BITS)])
    state, param = fresh(StateFormat.FP32, master), torch.zeros(master.numel(), dtype=torch.float16)
    SeparateMasterAdamW().update(
        param, torch.zeros(master.numel()), list(state.values()), [Piece(0, master.numel(), 1, STILL)], None
    )
    is_nan = master.isnan()
    assert torch.equal(param.isnan(), is_nan)
    assert torch.equal(state["master"].view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])
    np.testing.assert_array_equal(bits_of(param)[~is_nan.numpy()], rounded_half(master)[~is_nan.numpy()])


@pytest.mark.pairs
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 255, 256, 257, 4097])
@pytest.mark.parametrize("form", StateFormat)
@pytest.mark.parametrize("hyper", HYPERS)
def test_ten_steps_have_the_bits_of_the_reference(form: StateFormat, numel: int, hyper: AdamWHyper) -> None:
    kernel, seed = SeparateMasterAdamW(None, form), rounding_seed("weight")
    master = gradient(numel, 0)
    param, state, expected = master.half(), fresh(form, master), fresh(form, master)
    for step in range(1, 11):
        grad = gradient(numel, step)
        kernel.update(param, grad, list(state.values()), [Piece(0, numel, step, hyper, seed=seed)], None)
        expected = reference(grad, expected, hyper, step, seed, form)
        assert_same(state, expected)
        np.testing.assert_array_equal(bits_of(param), rounded_half(expected["master"]))


@pytest.mark.parametrize("form", StateFormat)
@pytest.mark.parametrize("chunk", [64, 6400, 64 * 5000])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bits_do_not_depend_on_cuts_or_threads(form: StateFormat, chunk: int, count: int) -> None:
    master = gradient(cut_numel(chunk), 0)
    check_cuts(lambda threads: SeparateMasterAdamW(threads, form), master.half(), fresh(form, master), chunk, count)


def test_moments_in_fp32_keep_torchs_own_kernel() -> None:
    """In fp16 the bits are those of torch's optimizer on an fp32 master; rounded moments have no such counterpart."""
    assert type(kernel_for(Precision.FP16)) is SeparateMaster
    for form in (StateFormat.BF16, StateFormat.INT8):
        kernel = kernel_for(Precision.FP16, state_format=form)
        assert type(kernel) is SeparateMasterAdamW
        assert [field.name for field in kernel.fields][:3] == ["master", *MOMENTS]


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_run_has_the_same_bits_whatever_the_schedule_and_the_budget(offload: MakeEngine, form: str) -> None:
    found = []
    for schedule, host in (("synchronous", "440KiB"), ("synchronous", "8MiB"), ("deferred", "8MiB")):
        model = build(Net)
        engine = offload(
            model, precision="fp16", state_format=form, schedule=schedule, host={"budget": host}, chunk="48KiB"
        )
        optimizer, scaler = infinity.AdamW(model.parameters(), lr=1e-2), infinity.GradScaler(init_scale=2.0**10)
        for step in range(3):
            scaler.scale(loss_of(model, batch(step))).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        moments = engine._updates.optimizer.state_dict()["state"]  # type: ignore[union-attr]
        found.append((gathered_parameters(model), {n: s["exp_avg"] for n, s in moments.items()}))
    for parameters, moments in found[1:]:
        assert all(torch.equal(parameters[name], value) for name, value in found[0][0].items())
        assert all(torch.equal(moments[number], value) for number, value in found[0][1].items())
