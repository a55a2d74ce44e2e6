"""What lies in host memory for good is written from where it lies: no update changes it before that is over."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from storage.backends.base import Backend
from storage.backends.wrapper import BackendWrapper
from storage.types import IoRequest, Op
from tests.conftest import small_config

KEY = "blocks.0/float32"
LATE_S = 1.0  # after which a drive that is held goes on; an engine that does not wait is far ahead by then


class Block(nn.Module):
    """Three parameters, each of which is a chunk of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, only: int | None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if only is None or only == number else x
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, only: int | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, only)
        return x


class LateDrive(BackendWrapper):
    """Once `hold` has been called, the next write of a key has been made, and its drive is late in saying so."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._key = ""
        self._go = threading.Event()
        self.held: list[tuple[bytes, bytes]] = []  # what was written, and what the memory holds when that is said

    def hold(self, key: str) -> None:
        self._key = key
        timer = threading.Timer(LATE_S, self._go.set)
        timer.daemon = True
        timer.start()

    def submit(self, request: IoRequest) -> None:
        if request.op is Op.WRITE and request.key == self._key:
            self._key = ""
            check, written = request.check, bytes(request.memory)

            def late(start: int, stop: int) -> None:
                if not self._go.wait(60):
                    raise TimeoutError("nobody let the drive go on")
                self.held.append((written, bytes(request.memory)))
                if check is not None:
                    check(start, stop)

            request = replace(request, check=late)
        super().submit(request)


def durable(folder: Path) -> infinity.Config:
    return small_config(
        folder,
        device={"kind": "cpu", "budget": "8MiB"},
        host={"budget": "16MiB"},
        resident_threshold="1KiB",
        chunk="32KiB",
        durability="step",
        schedule="synchronous",
    )


def train(folder: Path, held_key: str) -> LateDrive:
    """Three steps of which the second is not noted, and what it writes of a key is late."""
    drives: list[LateDrive] = []

    def wrap(inner: Backend) -> Backend:
        drives.append(LateDrive(inner))
        return drives[-1]

    def one_step(only: int | None = None) -> None:
        model(torch.ones(2, 64), only).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(3)
    model = Model()
    with infinity.offload(model, durable(folder), wrap_backend=wrap) as engine:
        copy = engine._runtime.copies[0]
        assert copy.pinned and copy.is_stored
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        one_step()
        engine.note({})
        engine._runtime.before_overwrite()
        drives[0].hold(held_key)
        one_step()
        one_step(only=1)
        engine.note({})
    return drives[0]


@pytest.mark.parametrize("key", [KEY, f"{KEY}/state1"])
def test_memory_stays_as_it_is_until_it_is_written(tmp_path: Path, key: str) -> None:
    """As `ShardStore.submit_write` asks: it must not change until the ticket is done."""
    ((written, found),) = train(tmp_path, key).held
    assert found == written


def test_what_is_committed_can_be_resumed(tmp_path: Path) -> None:
    """The parameters of the second step are one write, of the third a write in the middle of that.

    What was left of the first one was taken for damaged, for it had changed before its digest was made.
    """
    train(tmp_path, KEY)
    with infinity.offload(Model(), durable(tmp_path), resume=True) as engine:
        assert engine.committed_step == 3
