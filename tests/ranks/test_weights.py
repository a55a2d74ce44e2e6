"""Weights on several ranks: every rank reads its share of the files, and all have the same values."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.ranks.spawn import run_ranks, values
from tests.ranks.training import assert_same_bits
from tests.ranks.weights import Buffered, load_weights
from tests.zoo import build


def test_every_rank_reads_its_share(tmp_path: Path) -> None:
    state = build(Buffered, seed=7).state_dict()
    state["norm.running_mean"] += 0.25
    save_file(state, tmp_path / "whole.safetensors")
    lacking = {name: t for name, t in state.items() if name not in ("blocks.1.up.bias", "head.weight")}
    save_file(lacking, tmp_path / "lacking.safetensors")
    whole = {"file": "whole.safetensors", "strict": True}
    part = {"file": "lacking.safetensors", "strict": False}
    cases = [
        {**whole, "stage": 3, "is_built": False},
        {**whole, "stage": 3, "is_built": True},
        {**whole, "stage": 1, "is_built": False},
        {**part, "stage": 3, "is_built": False},
        {**part, "stage": 3, "is_built": True},
    ]
    first, second = values(run_ranks(load_weights, 2, tmp_path / "job", tmp_path, cases))
    parameters = {name for name, _ in build(Buffered).named_parameters()}
    buffer_nbytes = sum(t.numel() * t.element_size() for n, t in state.items() if n not in parameters)
    parameter_nbytes = sum(state[n].numel() * 4 for n in parameters)
    for case, (one, one_nbytes, missing), (other, other_nbytes, _) in zip(cases, first, second, strict=True):
        assert_same_bits(one, other)
        known = state if case["strict"] else lacking
        assert all(torch.equal(one[name], value) for name, value in known.items())
        assert set(missing) == state.keys() - known.keys()
        if case["strict"]:
            copies = 1 if case["stage"] == 3 else 2
            assert one_nbytes + other_nbytes == copies * parameter_nbytes + 2 * buffer_nbytes
