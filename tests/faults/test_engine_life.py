"""How an engine ends: closed, closed twice, used afterwards, forgotten, interrupted. Nothing is left behind."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.devices.fake import FakeDevice
from storage import pool
from storage.errors import ClosedError
from tests.conftest import MakeEngine, small_config
from tests.leaks import swap_folders
from tests.zoo import Net, batch, build, loss_of, one_step

_TIMEOUT_S = 100.0
_START = """
import os, sys, torch
from pathlib import Path
import infinity
from tests.conftest import small_config
from tests.zoo import Net, batch, build, loss_of, one_step
torch.set_num_threads(1)
model = build(Net)
engine = infinity.offload(model, small_config(Path(sys.argv[1]), host={"budget": "440KiB"}, schedule=sys.argv[2]))
optimizer = infinity.AdamW(model.parameters())
one_step(model, optimizer, 0)
print("ready", flush=True)
"""
_FOR_EVER = "for step in range(1, 1 << 30): one_step(model, optimizer, step)\n"
ENDINGS = {
    "exception in a forward": ("model.head = None\nmodel(batch(0))\n", 1),
    "graph alive": ("loss = loss_of(model, batch(0))\n", 0),
}


def _child(script: str, folder: Path, schedule: str = "overlapped") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _START + script, str(folder), schedule],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_process_that_does_not_close(tmp_path: Path, ending: str) -> None:
    script, code = ENDINGS[ending]
    child = _child(script, tmp_path, "overlapped")
    out, errors = child.communicate(timeout=_TIMEOUT_S)
    assert child.returncode == code, errors
    assert out == "ready\n"
    assert "Exception ignored" not in errors
    assert not swap_folders(tmp_path)


@pytest.mark.slow
def test_interrupt_in_the_middle_of_training(tmp_path: Path) -> None:
    child = _child(_FOR_EVER, tmp_path, "overlapped")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=_TIMEOUT_S)
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert not swap_folders(tmp_path)


@pytest.mark.slow
def test_killed_process_leaves_a_folder_that_is_known_to_be_dead(tmp_path: Path) -> None:
    from storage.cleanup import find_run_folders, remove_dead

    child = _child(_FOR_EVER, tmp_path, "overlapped")
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert all(found.is_alive for found in find_run_folders(tmp_path))
    child.kill()
    child.communicate(timeout=_TIMEOUT_S)
    assert swap_folders(tmp_path)
    remove_dead(tmp_path)
    assert not swap_folders(tmp_path)


def test_closed_twice(offload: MakeEngine, tmp_path: Path) -> None:
    engine = offload(build(Net))
    engine.close()
    assert engine.is_closed
    engine.close()
    assert not swap_folders(tmp_path)


@pytest.mark.parametrize("kind", ["cpu", "fake"])
@pytest.mark.parametrize("schedule", ["synchronous", "overlapped", "deferred"])
def test_close_gives_memory_back_without_a_collection(
    offload: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str, schedule: str
) -> None:
    """Model, engine and optimizer refer to each other, so they may live on as garbage; their memory must not."""
    mapped: list[weakref.ref[Any]] = []
    really_map = pool.map_private

    def map_and_note(nbytes: int, *, huge_pages: bool) -> memoryview:
        memory = really_map(nbytes, huge_pages=huge_pages)
        mapped.append(weakref.ref(memory.obj))
        return memory

    monkeypatch.setattr(pool, "map_private", map_and_note)
    gc.disable()
    try:
        model = build(Net)
        engine = offload(model, schedule=schedule, host={"budget": "440KiB"}, device={"kind": kind, "budget": "8MiB"})
        optimizer = infinity.AdamW(model.parameters())
        for number in range(2):
            one_step(model, optimizer, number)
        loss_of(model, batch(2)).backward()  # type: ignore[no-untyped-call]
        runtime = engine._runtime
        engine.close()
        assert mapped
        assert not [one for one in mapped if one() is not None]
        assert sum(group.flat.untyped_storage().nbytes() for group in runtime.groups) == 0
        if isinstance(runtime.device, FakeDevice):
            assert runtime.device._piece.nbytes == 0
    finally:
        gc.enable()


def test_closed_with_everything_in_flight(offload: MakeEngine, tmp_path: Path) -> None:
    for schedule in ("overlapped", "synchronous"):
        model = build(Net)
        engine = offload(model, schedule=schedule, host={"budget": "440KiB"})
        optimizer = infinity.AdamW(model.parameters())
        one_step(model, optimizer, 0)
        loss_of(model, batch(1)).backward()  # type: ignore[no-untyped-call]
        engine.close()
        assert not swap_folders(tmp_path)


def test_closed_before_an_update_has_begun(offload: MakeEngine) -> None:
    """An update whose task is cancelled before its first step gives its gradient back and says how it ended."""
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "64MiB"})
    infinity.AdamW(model.parameters())
    loss_of(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    runtime = engine._runtime

    def until_the_end() -> None:
        deadline_s = time.monotonic() + 100
        while not runtime.io._closed and time.monotonic() < deadline_s:
            time.sleep(0.001)
        with runtime.io._closing:  # the loop has been told to stop
            return

    runtime.io.post(until_the_end)
    engine._updates._submit(runtime.sink.pending())
    updates = list(runtime.in_flight)
    engine.close()
    assert updates
    for update in updates:
        assert isinstance(update.written.exception, ClosedError)


def test_closed_by_a_with_block(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError), infinity.offload(build(Net), small_config(tmp_path)) as engine:
        raise ArithmeticError
    assert engine.is_closed
    assert not swap_folders(tmp_path)


AFTER: dict[str, Callable[[nn.Module, infinity.Engine, infinity.AdamW, torch.Tensor], object]] = {
    "forward": lambda m, e, o, loss: m(batch(0)),
    "backward": lambda m, e, o, loss: loss.backward(),  # type: ignore[no-untyped-call]
    "step": lambda m, e, o, loss: o.step(),
    "zero_grad": lambda m, e, o, loss: o.zero_grad(),
    "metrics": lambda m, e, o, loss: e.metrics(),
    "traffic": lambda m, e, o, loss: e.traffic,
    "reset_iteration": lambda m, e, o, loss: e.reset_iteration(),
    "clip": lambda m, e, o, loss: infinity.clip_grad_norm_(m.parameters(), 1.0),
    "gathered": lambda m, e, o, loss: infinity.gathered(m).__enter__(),
    "use": lambda m, e, o, loss: m.get_parameter("head.weight").sum(),
    "offload": lambda m, e, o, loss: infinity.offload(m),
    "optimizer": lambda m, e, o, loss: infinity.AdamW(m.parameters()),
}


@pytest.mark.parametrize("use", AFTER)
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
def test_used_after_close(offload: MakeEngine, use: str, schedule: str) -> None:
    """Everything says that the engine is closed."""
    model = build(Net)
    engine = offload(model, schedule=schedule)
    optimizer = infinity.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    loss = loss_of(model, batch(1))
    engine.close()
    with pytest.raises(infinity.InfinityError, match=r"closed|offloaded once"):
        AFTER[use](model, engine, optimizer, loss)


def test_what_still_works_after_close(offload: MakeEngine) -> None:
    model = build(Net)
    engine = offload(model)
    engine.close()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in build(Net).parameters())
    assert "residency" in engine.report()
    assert engine.trace.events() is not None
    assert engine.plan.describe()


def test_many_engines_one_after_another(offload: MakeEngine) -> None:
    for _ in range(5):
        model = build(Net)
        with offload(model, host={"budget": "440KiB"}):
            one_step(model, infinity.AdamW(model.parameters()), 0)


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    """A model that cannot be offloaded is as it was, and nothing was made for it."""
    model: Any = build(Net)
    for settings in ({"host": {"budget": 4096}}, {"unit_classes": ["Nothing"]}, {"nvme": {"budget": 4096}}):
        with pytest.raises(infinity.InfinityError):
            infinity.offload(model, small_config(tmp_path, **{"host": {"budget": "440KiB"}, **settings}))
    assert not swap_folders(tmp_path)
    assert torch.equal(model(batch(0)), build(Net)(batch(0)))
