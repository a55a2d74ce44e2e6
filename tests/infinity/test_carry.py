"""The temporary file in which the state of a changed model is moved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from infinity.carry import Carry, Load
from infinity.errors import CheckpointError

LOADS = (Load("a", torch.float32, 5), Load(("b", 1), torch.int16, 3))


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    values = {"a": torch.randn(5), ("b", 1): torch.tensor([-1, 0, 7], dtype=torch.int16)}
    with Carry(tmp_path, LOADS) as carry:
        for key, value in values.items():
            carry.write(key, 0, value[:2].clone())
            carry.write(key, 2, value[2:].clone())
        for key, value in values.items():
            found = torch.empty_like(value)
            carry.read(key, 0, found)
            assert torch.equal(found, value)
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_cut_is_told_as_what_it_means(tmp_path: Path) -> None:
    with Carry(tmp_path, LOADS) as carry:
        os.ftruncate(carry._file.fileno(), 4)
        with pytest.raises(CheckpointError, match="moving the state of a changed model: the temporary file ends"):
            carry.read("a", 0, torch.empty(5))
