"""Edits through `parameter.data`, which torch does not count: seen by fingerprints of what was handed out.

A tensor made by `.data` shares the memory of the parameter and not its version counter. So whoever asks for `.data` is
noted together with a fingerprint of the values at that moment; where the engine asks whether a parameter was edited,
those few are compared. Parameters whose `.data` nobody asked for cost nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
import xxhash

_PART_NUMEL = 1 << 18
_WEIGHT = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that every position counts; wraps around as int64


class TakenData:
    """The values that were handed out, by number of the slot. Written by the training thread."""

    def __init__(self) -> None:
        self._fingerprints: dict[int, int] = {}

    def take(self, slot: int, values: torch.Tensor) -> None:
        """`.data` of a parameter is handed out; what it is now counts as unchanged. Idempotent."""
        if slot not in self._fingerprints:
            self._fingerprints[slot] = fingerprint(values)

    def is_changed(self, values: Mapping[int, torch.Tensor]) -> bool:
        """Whether one of them differs from what it was; `values` by slot."""
        return any(fingerprint(values[slot]) != before for slot, before in self._fingerprints.items())

    def accept(self, values: Mapping[int, torch.Tensor]) -> None:
        """The present values count as unchanged from now on; who holds `.data` may still edit them."""
        for slot in self._fingerprints:
            self._fingerprints[slot] = fingerprint(values[slot])

    def clear(self) -> None:
        """Nobody holds any: the memory has gone."""
        self._fingerprints.clear()

    @property
    def slots(self) -> list[int]:
        return list(self._fingerprints)


def fingerprint(values: torch.Tensor) -> int:
    """A number that, but for a chance of 1 in 2^64, differs when a bit of a contiguous tensor does."""
    if not values.numel():
        return 0
    with torch.no_grad():
        flat = values.detach().reshape(-1)
        if flat.device.type != "cpu":
            return _weighted_sum(flat)
        # Not by way of numpy, after which the memory could not be given back.
        return xxhash.xxh3_64_intdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def _weighted_sum(flat: torch.Tensor) -> int:
    """The bytes, each multiplied by a number of its place, added up on their device."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    octets = flat.view(torch.uint8)
    for start in range(0, octets.numel(), _PART_NUMEL):
        part = octets[start : start + _PART_NUMEL]
        places = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=flat.device)
        total += ((part.to(torch.int64) + 1) * (places * _WEIGHT).bitwise_xor(places)).sum()
    return int(total)
