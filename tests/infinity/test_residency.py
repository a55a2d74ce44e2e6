"""The state machine of a host copy: what it refuses, what a claim protects, and when memory comes back."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.residency import CopyState, HostCopy, ResidencyError
from infinity.units import Parameters
from storage.budget import TierBudget
from storage.pool import HostPool
from storage.types import Ticket

WAIT_S = 100.0


class Bench:
    """A copy with a pool and a window behind it."""

    def __init__(self, *, pinned: bool = False) -> None:
        with torch.device("meta"):
            own = list(Parameters(nn.Linear(8, 8)))
        self.group = FlatGroup(0, "line/float32", own, shard_dtype=torch.float32, compute_dtype=torch.float32)
        self.pool = HostPool(1 << 20)
        self.window = TierBudget("window", 1 << 20)
        self.copy = HostCopy(self.group, pinned=pinned)

    def begin_read(self) -> None:
        reservation = self.window.try_reserve(self.group.shard_nbytes, "read")
        assert reservation is not None
        block = HostBlock.take(self.pool, reservation, "read")
        try:
            self.copy.begin_read(block, Ticket("read"))
        except ResidencyError:
            block.release()
            raise

    @property
    def held_nbytes(self) -> int:
        assert self.pool.leased_nbytes == self.window.used_nbytes
        return self.pool.leased_nbytes


Step = Callable[[Bench], object]
STEPS: dict[str, Step] = {
    "begin_read": Bench.begin_read,
    "landed": lambda bench: bench.copy.landed(),
    "begin_update": lambda bench: bench.copy.begin_update(Ticket("update")),
    "updated": lambda bench: bench.copy.updated(Ticket("write")),
    "written": lambda bench: bench.copy.written(),
    "drop": lambda bench: bench.copy.drop(),
    "fail": lambda bench: bench.copy.fail(),
}
PATHS: dict[CopyState, tuple[str, ...]] = {
    CopyState.ABSENT: (),
    CopyState.READING: ("begin_read",),
    CopyState.CLEAN: ("begin_read", "landed"),
    CopyState.UPDATING: ("begin_read", "landed", "begin_update"),
    CopyState.WRITING: ("begin_read", "landed", "begin_update", "updated"),
    CopyState.FAILED: ("begin_read", "fail"),
}
LEGAL: dict[tuple[CopyState, str], CopyState] = {
    (CopyState.ABSENT, "begin_read"): CopyState.READING,
    (CopyState.ABSENT, "drop"): CopyState.ABSENT,
    (CopyState.READING, "landed"): CopyState.CLEAN,
    (CopyState.READING, "fail"): CopyState.FAILED,
    (CopyState.CLEAN, "begin_update"): CopyState.UPDATING,
    (CopyState.CLEAN, "drop"): CopyState.ABSENT,
    (CopyState.UPDATING, "updated"): CopyState.WRITING,
    (CopyState.UPDATING, "fail"): CopyState.FAILED,
    (CopyState.WRITING, "written"): CopyState.CLEAN,
    (CopyState.WRITING, "drop"): CopyState.ABSENT,
    (CopyState.WRITING, "fail"): CopyState.FAILED,
    (CopyState.FAILED, "drop"): CopyState.ABSENT,
    (CopyState.FAILED, "fail"): CopyState.FAILED,
}
ILLEGAL = [(state, step) for state in CopyState for step in STEPS if (state, step) not in LEGAL]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.copy.discard()
    assert made.held_nbytes == 0
    made.pool.close()


def bring(bench: Bench, state: CopyState) -> HostCopy:
    for step in PATHS[state]:
        STEPS[step](bench)
    assert bench.copy.state is state
    return bench.copy


# Transitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "step"), LEGAL)
def test_legal_transitions(bench: Bench, state: CopyState, step: str) -> None:
    copy = bring(bench, state)
    STEPS[step](bench)
    assert copy.state is LEGAL[state, step]
    expected = 0 if copy.state is CopyState.ABSENT else bench.group.shard_nbytes
    assert bench.held_nbytes == expected


@pytest.mark.parametrize(("state", "step"), ILLEGAL)
def test_illegal_transitions_are_refused_and_change_nothing(bench: Bench, state: CopyState, step: str) -> None:
    copy = bring(bench, state)
    before = (copy.ticket, copy.block, list(copy.history), bench.held_nbytes)
    with pytest.raises(ResidencyError) as caught:
        STEPS[step](bench)
    path = " → ".join(kept.value for kept in copy.history)
    assert f"host copy of line/float32: {path} cannot become " in str(caught.value)
    assert copy.state is state
    assert (copy.ticket, copy.block, list(copy.history), bench.held_nbytes) == before


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=30))
def test_any_sequence_follows_the_machine(steps: list[str]) -> None:
    bench = Bench()
    expected = CopyState.ABSENT
    for step in steps:
        if (expected, step) in LEGAL:
            STEPS[step](bench)
            expected = LEGAL[expected, step]
        else:
            with pytest.raises(ResidencyError):
                STEPS[step](bench)
        assert bench.copy.state is expected
        assert (bench.held_nbytes == 0) == (expected is CopyState.ABSENT)
        assert bench.copy.history[-1] is expected
        assert len(bench.copy.history) <= 8
    bench.copy.discard()
    bench.pool.close()


def test_pinned_copies_are_clean_once_updated() -> None:
    bench = Bench(pinned=True)
    bring(bench, CopyState.UPDATING)
    STEPS["updated"](bench)
    assert bench.copy.state is CopyState.CLEAN
    with pytest.raises(ResidencyError, match="cannot become clean"):
        bench.copy.written()
    bench.copy.discard()
    bench.pool.close()


def test_the_history_tells_the_last_states(bench: Bench) -> None:
    for _ in range(5):
        bring(bench, CopyState.CLEAN)
        bench.copy.drop()
    assert bench.copy.describe() == (
        "line/float32: clean → absent → reading → clean → absent → reading → clean → absent"
    )


def test_bytes_are_those_of_the_lease(bench: Bench) -> None:
    copy = bring(bench, CopyState.CLEAN)
    copy.memory[:4] = bytes(4)
    assert copy.tensor.shape == (bench.group.layout.numel,)
    assert copy.tensor.dtype is torch.float32
    copy.tensor[0] = 1.0
    assert bytes(copy.memory[:4]) == b"\x00\x00\x80\x3f"


def test_an_absent_copy_has_no_bytes(bench: Bench) -> None:
    with pytest.raises(ResidencyError, match="line/float32 has no host copy: line/float32: absent"):
        _ = bench.copy.tensor


# Claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", CopyState)
def test_what_may_be_claimed(bench: Bench, state: CopyState) -> None:
    copy = bring(bench, state)
    assert copy.claim() is (state in (CopyState.READING, CopyState.CLEAN))


def test_a_claimed_copy_is_not_dropped(bench: Bench) -> None:
    copy = bring(bench, CopyState.CLEAN)
    assert copy.claim()
    assert not copy.drop()
    assert copy.state is CopyState.CLEAN
    assert bench.held_nbytes == bench.group.shard_nbytes
    copy.unclaim()
    assert copy.drop()
    assert bench.held_nbytes == 0


def test_a_claim_is_exclusive_until_it_is_given_up(bench: Bench) -> None:
    copy = bring(bench, CopyState.CLEAN)
    assert copy.claim()
    assert copy.is_claimed
    assert not copy.claim()
    copy.unclaim()
    copy.unclaim()
    assert not copy.is_claimed
    assert copy.claim()


def test_a_copy_with_a_pending_update_is_not_claimed(bench: Bench) -> None:
    copy = bring(bench, CopyState.CLEAN)
    copy.update = Ticket("update")
    assert not copy.claim()
    copy.update.set_done()
    assert copy.claim()


def test_claim_and_drop_exclude_each_other() -> None:
    for _ in range(100):
        bench = Bench()
        copy = bring(bench, CopyState.CLEAN)
        start = threading.Barrier(2)
        outcome: dict[str, bool] = {}

        def claim(copy: HostCopy = copy, start: threading.Barrier = start, out: dict[str, bool] = outcome) -> None:
            start.wait(WAIT_S)
            out["claimed"] = copy.claim()

        thread = threading.Thread(target=claim)
        thread.start()
        start.wait(WAIT_S)
        dropped = copy.drop()
        thread.join(WAIT_S)
        assert outcome["claimed"] is not dropped
        assert (copy.block is None) is dropped
        copy.unclaim()
        copy.discard()
        bench.pool.close()


# Written behind --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_bytes_written_behind_are_used_only_if_they_stay(bench: Bench, kept: bool) -> None:
    copy = bench.copy
    copy.keep_at_boundary = kept
    bring(bench, CopyState.WRITING)
    assert copy.stays_when_written is kept
    assert copy.claim() is kept


def test_a_used_up_copy_is_not_used_again(bench: Bench) -> None:
    copy = bench.copy
    copy.keep_at_boundary = True
    bring(bench, CopyState.WRITING)
    assert copy.claim()
    copy.unclaim()
    copy.is_used_up = True
    assert not copy.stays_when_written
    assert not copy.claim()


def test_the_next_update_makes_it_fresh(bench: Bench) -> None:
    copy = bring(bench, CopyState.CLEAN)
    copy.is_used_up = copy.awaits_update = True
    copy.begin_update(Ticket("update"))
    assert not copy.is_used_up
    assert not copy.awaits_update


# Failures --------------------------------------------------------------------------------------------------------


def test_a_failed_read_gives_its_memory_back(bench: Bench) -> None:
    copy = bring(bench, CopyState.FAILED)
    copy.free_failed()
    assert copy.state is CopyState.FAILED
    assert bench.held_nbytes == 0
    assert copy.drop()
    bring(bench, CopyState.CLEAN)


def test_memory_under_a_claim_stays(bench: Bench) -> None:
    copy = bring(bench, CopyState.READING)
    assert copy.claim()
    copy.fail()
    copy.free_failed()
    assert bench.held_nbytes == bench.group.shard_nbytes
    copy.unclaim()
    copy.free_failed()
    assert bench.held_nbytes == 0


def test_what_an_update_made_is_not_lost(bench: Bench) -> None:
    copy = bring(bench, CopyState.WRITING)
    error = OSError("no space left")
    copy.fail()
    copy.lost_update = error
    copy.free_failed()
    assert bench.held_nbytes == bench.group.shard_nbytes
    with pytest.raises(OSError, match="no space left") as caught:
        copy.raise_lost_update()
    assert caught.value is not error  # which would keep the frames that it is raised in


def test_nothing_lost_raises_nothing(bench: Bench) -> None:
    bench.copy.raise_lost_update()
    bench.copy.free_failed()
    assert bench.copy.state is CopyState.ABSENT


@pytest.mark.parametrize("state", CopyState)
def test_closing_takes_every_state(bench: Bench, state: CopyState) -> None:
    copy = bring(bench, state)
    copy.claim()
    copy.discard()
    assert copy.state is CopyState.ABSENT
    assert bench.held_nbytes == 0
