"""The state of a group that host memory holds in part: the same bits, the closed forms, checkpoints and swap space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import (
    Loop,
    assert_parity,
    assert_traffic,
    gathered_parameters,
    smallest_budget,
    train_offloaded,
)
from tests.zoo import Net, build, one_step

LOOP = Loop(Net, steps=4)
CHUNK = "16KiB"
SCHEDULES = ("synchronous", "overlapped", "deferred")
STEP_NBYTES = 24 << 10


def held_chunks(engine: infinity.Engine) -> list[list[bool]]:
    """By group that trains, of every chunk whether its state is in host memory for good."""
    return [[record.lease is not None for record in state.records] for state in engine._runtime.states.values()]


def part_budget(offload: MakeEngine, **settings: Any) -> int:
    """A host budget at which host memory holds some chunks of a group, and not all."""
    budget = smallest_budget(offload, "host", build(Net), **settings)
    for _ in range(200):
        with offload(build(Net), host={"budget": budget}, **settings) as engine:
            if any(any(chunks) and not all(chunks) for chunks in held_chunks(engine)):
                return budget
        budget += STEP_NBYTES
    raise AssertionError("no budget holds a part of a state")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_bits_and_the_bytes_that_are_left(offload: MakeEngine, schedule: str) -> None:
    settings: dict[str, Any] = {"schedule": schedule, "chunk": CHUNK}
    budget = part_budget(offload, **settings)
    engine = assert_parity(LOOP, offload, host={"budget": budget}, **settings)
    streamed = [record for state in engine._runtime.states.values() for record in state.records if record.lease is None]
    payload = sum(record.chunk.payload_numel for record in streamed) * 8  # two moments in fp32
    assert [counted["nvme_read_bytes/state"] for counted in engine.traffic.per_step] == [0, *[payload] * 3]
    assert [counted["nvme_write_bytes/state"] for counted in engine.traffic.per_step] == [payload] * 4


def test_on_two_drives(offload: MakeEngine, tmp_path: Path) -> None:
    """The order of chunks follows where their bytes are; some have none on a drive."""
    settings: dict[str, Any] = {
        "schedule": "overlapped",
        "chunk": CHUNK,
        "nvme": {"paths": [tmp_path / "a", tmp_path / "b"]},
    }
    assert_parity(LOOP, offload, host={"budget": part_budget(offload, **settings)}, **settings)


def test_one_group_is_held_in_part_from_its_beginning_on(offload: MakeEngine) -> None:
    settings: dict[str, Any] = {"schedule": "overlapped", "chunk": CHUNK}
    with offload(build(Net), host={"budget": part_budget(offload, **settings)}, **settings) as engine:
        placement = engine.plan.placement
        ((index, count),) = placement.pinned_chunks.items()
        chunks = held_chunks(engine)[list(engine._runtime.states).index(index)]
        assert chunks == [True] * count + [False] * (len(chunks) - count)
        assert index not in placement.pinned_states
        assert "a part of another's" in next(term.why for term in placement.host if term.name == "pinned")


def test_more_memory_never_holds_less_state(offload: MakeEngine) -> None:
    settings: dict[str, Any] = {"schedule": "overlapped", "chunk": CHUNK}
    budget = smallest_budget(offload, "host", build(Net), **settings)
    held = []
    for more in range(60):
        with offload(build(Net), host={"budget": budget + more * STEP_NBYTES}, **settings) as engine:
            held.append(sum(sum(chunks) for chunks in held_chunks(engine)))
    assert held == sorted(held)
    assert len(set(held)) > 5  # chunk by chunk, not group by group


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_holds_both_parts(offload: MakeEngine, tmp_path: Path, wait: bool) -> None:
    """Steps after loading it, where all of the state is in memory and where a part is, have plain PyTorch's bits."""
    settings: dict[str, Any] = {"schedule": "overlapped", "chunk": CHUNK}
    part = {"budget": part_budget(offload, **settings)}
    model = build(Net)
    with offload(model, host=part, **settings) as engine:
        optimizer: torch.optim.Optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            one_step(model, optimizer, step)
        engine.save(tmp_path / "saved", wait=wait)
    plain = build(Net)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    expected = [one_step(plain, optimizer, step) for step in range(4)]
    for host in (part, {"budget": "64MiB"}):
        model = build(Net)
        with offload(model, host=host, **settings) as engine:
            optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
            engine.load(tmp_path / "saved")
            assert [one_step(model, optimizer, step) for step in (2, 3)] == expected[2:]
            found = gathered_parameters(model)
        assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())


def test_durable_steps_write_what_is_held_too(offload: MakeEngine) -> None:
    settings: dict[str, Any] = {"schedule": "synchronous", "chunk": CHUNK, "durability": "step"}
    budget = part_budget(offload, **settings)
    _, engine = train_offloaded(LOOP, lambda model: offload(model, host={"budget": budget}, **settings))
    assert_traffic(engine, LOOP)
    per_step = engine.traffic.per_step[-1]
    assert 0 < per_step["nvme_read_bytes/state"] < per_step["nvme_write_bytes/state"]
