"""How the moments of an optimizer are stored: in fp32, rounded to bf16, or as block-wise 8-bit codes.

[Note: stochastic rounding]
A moment moves by a small fraction of itself per step (1 - beta2 = 0.001), which is less than the spacing of the values
that bf16 or 8 bits can hold. Rounded to nearest it would never move. So the update rounds up with the probability that
makes the expected value right. The random bits are a hash of (parameter, step, element): see `noise_keys`. They do not
depend on chunks, threads or ranks, and a resumed run draws the same ones.

[Note: 8-bit codes]
Every block of 64 elements has an fp32 scale, the largest magnitude in it; no block holds elements of two parameters,
because slots start at multiples of 64. A magnitude x is stored as the number of steps of 2^19 from the bits of c to the
bits of min(x / scale + c, 1), as fp32: sixteen codes per power of two, linear far below c. `exp_avg` has a sign and 127
magnitudes, c = 2^-8 * 17/16; `exp_avg_sq` has 255, c = 2^-16 * 17/16. The error is below (x + 2 * c * scale) / 16. The
largest code is the scale itself, so encoding what was decoded gives the same bytes. A second moment above zero never
becomes zero, because the update divides by it. A block of `exp_avg` whose magnitudes have no inverse (below 2^-126)
becomes zero. A block with an infinite or NaN element becomes NaN as a whole.

Here is the arithmetic for tensors that are read or replaced from outside, such as by checkpoints: rounding to nearest.
The one-pass kernels in onepass.py encode with noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from infinity.config import StateFormat
from infinity.optim.hyper import CUT_NUMEL, StateField

BLOCK_NUMEL = CUT_NUMEL
CODE_SHIFT = 19  # fp32 has 23 bits of fraction; the code keeps four
_ONE_BITS = 0x3F800000
_LEAST_SCALE = 2.0**-126  # the smallest fp32 that has an inverse
SCALE = "_scale"
"""What the field of the scales is called, behind the name of the moment."""


def code_count(name: str) -> int:
    """The largest code of a moment: of the second moment, which has no sign, twice as many."""
    return 255 if name == "exp_avg_sq" else 127


def first_bits(name: str) -> int:
    """The bits of c, see [Note: 8-bit codes]."""
    return _ONE_BITS - (code_count(name) << CODE_SHIFT)


class MomentFormat(Protocol):
    """One way to store moments."""

    def fields(self, names: Sequence[str]) -> tuple[StateField, ...]:
        """The parts of the state record that hold these moments."""

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """A moment in fp32, of the length of the parameter; `state` has the tensors of the record by field."""

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """Make fp32 `values` the moment, rounded to nearest."""


class Fp32Moments:
    """As they are computed."""

    def fields(self, names: Sequence[str]) -> tuple[StateField, ...]:
        return tuple(StateField(name, torch.float32) for name in names)

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        return state[name]

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        if values is not state[name]:
            state[name].copy_(values)


class Bf16Moments:
    """Half the bytes, eight significant bits."""

    def fields(self, names: Sequence[str]) -> tuple[StateField, ...]:
        return tuple(StateField(name, torch.bfloat16) for name in names)

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        return state[name].float()

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        state[name].copy_(values)


class Int8Moments:
    """A byte per element and four per block: see [Note: 8-bit codes]."""

    def fields(self, names: Sequence[str]) -> tuple[StateField, ...]:
        codes = [StateField(name, torch.uint8) for name in names]
        scales = [StateField(name + SCALE, torch.float32, BLOCK_NUMEL) for name in names]
        return (*codes, *scales)

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        codes = state[name]
        return decode_codes(name, codes, state[name + SCALE].repeat_interleave(BLOCK_NUMEL)[: codes.numel()])

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        count, first = code_count(name), first_bits(name)
        padding = -values.numel() % BLOCK_NUMEL
        blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK_NUMEL)
        largest = blocks.abs().amax(dim=1)
        least = torch.zeros(()) if count == 127 else torch.where(largest > 0, _LEAST_SCALE, 0.0)
        scales = torch.where(largest < _LEAST_SCALE, least, largest)
        scales = torch.where(largest.isfinite(), scales, torch.nan)
        inverse = torch.where(scales > 0, 1.0 / scales, torch.zeros(()))
        ratio = (blocks.abs() * inverse.unsqueeze(1) + _value_of(first)).clamp(max=1.0).nan_to_num(nan=1.0)
        codes = (ratio.view(torch.int32) - first + (1 << (CODE_SHIFT - 1))) >> CODE_SHIFT
        codes.clamp_(max=count)
        if count == 255:
            codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
        else:
            codes = codes | (blocks.view(torch.int32) < 0).int() << 7
        state[name].copy_(codes.view(-1)[: values.numel()])
        state[name + SCALE].copy_(scales)


def decode_codes(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of codes of a moment; `scales` has the one of every code."""
    first, steps = first_bits(name), codes.int()
    is_negative = steps > code_count(name)
    steps = steps & code_count(name)
    ratio = ((steps << CODE_SHIFT) + first).view(torch.float32) - _value_of(first)
    ratio.masked_fill_(steps == code_count(name), 1.0)
    return torch.where(is_negative, -ratio, ratio).mul_(scales)


MOMENT_FORMATS: Mapping[StateFormat, MomentFormat] = {
    StateFormat.FP32: Fp32Moments(),
    StateFormat.BF16: Bf16Moments(),
    StateFormat.INT8: Int8Moments(),
}


def _value_of(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def rounding_seed(name: str) -> int:
    """What tells the noise of a parameter from that of others: 64 bits that depend on its name alone."""
    return xxhash.xxh3_64_intdigest(name.encode())


def noise_keys(seed: int, step: int) -> tuple[int, int]:
    """Two 32-bit keys of the hash that gives every element of a parameter its random bits in one step.

    They are the halves of splitmix64 (Steele, Lea and Flood, 2014) of the seed advanced by the step.
    """
    mask = (1 << 64) - 1
    mixed = (seed + step * 0x9E3779B97F4A7C15) & mask
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
    mixed ^= mixed >> 31
    return mixed >> 32, mixed & 0xFFFFFFFF
