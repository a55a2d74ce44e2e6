"""Several drives: shares by speed, moving when speeds change, and going on when a drive takes nothing."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.backends.faulty import Fault
from storage.errors import SwapFullError, WriteError
from storage.health import DEFAULT_RETRY_FULL_S, DriveState
from storage.pool import HostPool
from storage.store import ShardStore, StorageOptions
from storage.types import Op
from tests.storage.helpers import MIB, PAGE, TAG, WAIT_S, HeldBackend, failure, filled, finish
from tests.storage.several import SeveralDrives

_PAGES = 8 * MIB // PAGE


@pytest.fixture
def two(tmp_path: Path) -> Iterator[SeveralDrives]:
    with SeveralDrives(tmp_path) as drives:
        yield drives


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Shares ----------------------------------------------------------------------------------------------------------


def test_given_speeds_make_the_shares(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    options = StorageOptions(free_margin_nbytes=0)
    store = ShardStore.open(paths, 50 * MIB, options=options, speeds=[200.0, 50.0])
    assert [report.capacity_nbytes for report in store.drive_report()] == [40 * MIB, 10 * MIB]
    for number in range(5):
        store.create(str(number), 10 * MIB)
    assert [report.held_nbytes for report in store.drive_report()] == [40 * MIB, 10 * MIB]
    store.close()


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_speeds_are_checked(tmp_path: Path, speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="must be 2 positive numbers, one per directory"):
        ShardStore.open([tmp_path / "a", tmp_path / "b"], MIB, speeds=speeds)
    assert list(tmp_path.iterdir()) == []


def test_measured_speeds_make_the_shares_of_new_keys(two: SeveralDrives) -> None:
    two.store.create("before", 10 * MIB)
    two.are_measured(200, 50)
    two.store.create("after", 10 * MIB)
    assert two.by_drive("before") == {0: 5 * MIB, 1: 5 * MIB}
    assert two.by_drive("after") == {0: 8 * MIB, 1: 2 * MIB}


def test_every_drive_is_reported(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 4 * MIB)
    two.write(pool, "a", 1, 4 * MIB // PAGE)
    two.read(pool, "a")
    for report in two.store.drive_report():
        assert (report.write.nbytes, report.read.nbytes, report.held_nbytes) == (2 * MIB, 2 * MIB, 2 * MIB)
        assert (report.state, report.cause, report.write.nbytes_per_s) == (DriveState.OPEN, "", None)
    two.are_measured(200, 50)
    speeds = [report.write.nbytes_per_s for report in two.store.drive_report()]
    assert speeds == pytest.approx([200 * MIB, 50 * MIB], rel=0.01)
    assert [report.write.busy_s for report in two.store.drive_report()] == pytest.approx([30, 30])


# Moving ----------------------------------------------------------------------------------------------------------


def test_keys_move_when_they_are_written(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 10 * MIB)
    two.write(pool, "a", 1, 10 * MIB // PAGE)
    two.are_measured(200, 50)
    assert two.by_drive("a") == {0: 5 * MIB, 1: 5 * MIB}
    expected = two.write(pool, "a", 2, 10 * MIB // PAGE)
    assert two.by_drive("a") == {0: 8 * MIB, 1: 2 * MIB}
    assert two.read(pool, "a") == expected
    two.check_extents()
    assert two.store.stats.total(Op.WRITE).moved_nbytes == 20 * MIB


def test_small_changes_of_speed_move_nothing(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 8 * MIB)
    places = two.extents("a")
    for turn, speeds in enumerate([(100, 100), (106, 96), (97, 104), (100, 108)]):
        two.are_measured(*speeds)
        two.write(pool, "a", turn, _PAGES)
        assert two.extents("a") == places


def test_a_key_that_is_written_in_chunks_moves_chunk_by_chunk(two: SeveralDrives, pool: HostPool) -> None:
    chunk = 4 * MIB // PAGE
    two.store.create("a", 16 * MIB)
    two.write(pool, "a", 0, 4 * chunk)
    two.are_measured(300, 100)
    expected = b"".join(two.write(pool, "a", turn, chunk, turn * chunk) for turn in range(4))
    assert two.by_drive("a") == {0: 12 * MIB, 1: 4 * MIB}
    assert two.read(pool, "a") == expected
    places = two.extents("a")
    for turn in range(4):
        two.write(pool, "a", turn, chunk, turn * chunk)
    two.write(pool, "a", 9, 4 * chunk)
    assert two.extents("a") == places  # in chunks or whole: there is nothing left to gain
    two.check_extents()


def test_parts_of_a_key_are_written_where_they_lie(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 8 * MIB)
    expected = bytearray(two.write(pool, "a", 1, _PAGES))
    two.are_measured(300, 100)
    places = two.extents("a")
    for turn, (first, pages) in enumerate([(0, 1), (100, 255), (_PAGES // 2 - 3, 6), (_PAGES - 9, 9)]):
        expected[first * PAGE : (first + pages) * PAGE] = two.write(pool, "a", turn, pages, first)
    assert two.extents("a") == places
    assert two.read(pool, "a") == expected


def test_chunks_move_whatever_the_pieces_were(two: SeveralDrives, pool: HostPool) -> None:
    chunk = 4 * MIB // PAGE
    two.are_measured(100, 400)
    for key in range(6):
        two.store.create(str(key), 16 * MIB)  # in pieces that no chunk begins or ends with
    two.are_measured(400, 100)
    for turn in range(2):
        for key in range(6):
            for number in range(4):
                two.write(pool, str(key), turn, chunk, number * chunk)
    shares = [report.held_nbytes / (96 * MIB) for report in two.store.drive_report()]
    assert shares == pytest.approx([0.8, 0.2], abs=0.04)
    two.check_extents()


def test_keys_written_in_chunks_are_spread_as_whole_ones(two: SeveralDrives, pool: HostPool) -> None:
    chunk = 4 * MIB // PAGE  # too small to be cut by itself: the slow drive would get less than a MiB of it
    for key in range(4):
        two.store.create(str(key), 16 * MIB)
    two.are_measured(200, 50)
    for key in range(4):
        for number in range(4):
            two.write(pool, str(key), key, chunk, number * chunk)
    whole = {0: 12 * MIB + 3 * MIB // 4, 1: 3 * MIB + MIB // 4}
    assert [two.by_drive(str(key)) for key in range(4)] == [whole] * 4  # each of them, not only all together
    places = [two.extents(str(key)) for key in range(4)]
    for key in range(4):
        two.write(pool, str(key), 9, 4 * chunk)
    assert [two.extents(str(key)) for key in range(4)] == places
    two.check_extents()


def test_moving_does_not_scatter_a_key(two: SeveralDrives, pool: HostPool) -> None:
    part, inner = 9 * MIB // 4 // PAGE, 2 * MIB // PAGE
    two.are_measured(400, 1)
    two.store.create("a", 16 * MIB)
    expected = bytearray(two.write(pool, "a", 0, 16 * MIB // PAGE))
    assert len(two.extents("a")) == 1
    counts = []
    spans = [(1 + turn * (part + 1), part) for turn in range(7)]  # with a page between them
    for speeds, chosen in (((1, 400), spans), ((400, 1), [(first + 9, inner) for first, _ in spans])):
        two.are_measured(*speeds)
        for turn, (first, pages) in enumerate(chosen):
            expected[first * PAGE : (first + pages) * PAGE] = two.write(pool, "a", turn, pages, first)
            counts.append(len(two.extents("a")))
    assert counts == [3, 5, 7, 9, 11, 13, 15, *[17] * 7]  # at most one for every MiB, and one for every drive
    assert two.read(pool, "a") == expected
    two.check_extents()


def test_small_keys_move_until_the_drives_are_in_balance(two: SeveralDrives, pool: HostPool) -> None:
    for key in range(40):
        two.store.create(str(key), 4 * PAGE)
    assert [report.held_nbytes for report in two.store.drive_report()] == [80 * PAGE, 80 * PAGE]
    two.are_measured(300, 100)
    for key in range(40):
        two.write(pool, str(key), key, 4)
    shares = [report.held_nbytes / (160 * PAGE) for report in two.store.drive_report()]
    assert shares == pytest.approx([0.75, 0.25], abs=0.04)
    places = [two.extents(str(key)) for key in range(40)]
    for key in range(40):
        two.write(pool, str(key), key, 4)
    assert places == [two.extents(str(key)) for key in range(40)]
    two.check_extents()


def test_a_drive_that_does_not_answer_gets_less_before_it_does(tmp_path: Path, pool: HostPool) -> None:
    with SeveralDrives(tmp_path, threads=1) as two, filled(pool, 8 * MIB, 1) as lease:
        for key, nbytes in (("after", PAGE), ("stuck", 8 * MIB), ("other", 8 * MIB)):
            two.store.create(key, nbytes)
        two.are_measured(100, 100)
        two.faults[1].inject(Fault.STUCK, op=Op.WRITE)
        ticket = two.store.submit_write("stuck", lease.memory, tag=TAG)
        assert two.by_drive("after") == {0: PAGE}
        two.write(pool, "after", 1, 1)  # the first drive's only thread has done its part of the other key by now
        two.clock.sleep(2.0)
        two.write(pool, "other", 2, _PAGES)
        assert not ticket.done
        assert two.by_drive("other") == {0: 8 * MIB}
        two.faults[1].release_stuck()
        finish(ticket)
        two.check_extents()


def test_old_places_are_free_when_the_write_has_landed(tmp_path: Path, pool: HostPool) -> None:
    with SeveralDrives(tmp_path, wrap=HeldBackend) as two:
        two.store.create("a", 8 * MIB)
        old = two.extents("a")
        two.are_measured(300, 100)
        with pool.lease(8 * MIB, "read") as memory, filled(pool, 8 * MIB, 1) as lease:
            reads = [two.store.submit_read("a", memory.memory, tag=TAG)]
            write = two.store.submit_write("a", lease.memory, tag=TAG)
            assert two.extents("a") == old  # while the read goes on, nothing is decided
            for held in two.faults:
                held.let_go()
            for held in two.faults:
                held.wait_for(1)
            assert two.extents("a").isdisjoint(old)
            in_use = {(n, *span) for n, drive in enumerate(two.store._drives) for span in drive.file.extents.used()}
            assert in_use == old | two.extents("a")
            reads.append(two.store.submit_read("a", memory.memory, tag=TAG))
            for held in two.faults:
                held.let_go()
            assert write.wait(WAIT_S)
            two.check_extents()
            for held in two.faults:
                held.wait_for(1)
                held.let_go()
            assert two.store.drain(WAIT_S)
            assert reads[0].exception is reads[1].exception is write.exception is None
            assert memory.memory == lease.memory


def test_a_move_that_finds_no_room_leaves_the_key_where_it_is(
    two: SeveralDrives, pool: HostPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two.store.create("a", 8 * MIB)
    two.are_measured(300, 100)
    places = two.extents("a")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage())
    expected = two.write(pool, "a", 1, _PAGES)
    assert two.extents("a") == places
    assert two.read(pool, "a") == expected
    assert warnings(caplog) == []
    two.check_extents()


class _Usage:
    free = 0


# Drives that take nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "state"), [(Fault.IO_ERROR, DriveState.FAILED), (Fault.NO_SPACE, DriveState.FULL)])
def test_a_write_that_a_drive_refuses_goes_to_the_other(
    two: SeveralDrives, pool: HostPool, caplog: pytest.LogCaptureFixture, fault: Fault, state: DriveState
) -> None:
    for key in ("a", "kept"):
        two.store.create(key, 8 * MIB)
    kept = two.write(pool, "kept", 1, _PAGES)
    injection = two.faults[1].inject(fault, op=Op.WRITE, times=None)
    expected = two.write(pool, "a", 2, _PAGES)
    assert two.by_drive("a") == {0: 8 * MIB}
    assert injection.hits == 1
    # Everything that is written from now on, old keys and new ones, avoids the drive; what is there can be read.
    two.write(pool, "a", 2, _PAGES)
    two.store.create("new", 8 * MIB)
    assert two.by_drive("new") == {0: 8 * MIB}
    assert two.read(pool, "kept") == kept
    assert two.by_drive("kept") == {0: 4 * MIB, 1: 4 * MIB}
    two.write(pool, "kept", 3, 1, _PAGES - 1)
    assert two.by_drive("kept") == {0: 4 * MIB + PAGE, 1: 4 * MIB - PAGE}
    assert two.read(pool, "a") == expected
    assert injection.hits == 1
    two.check_extents()
    (warning,) = warnings(caplog)
    assert "drive1 takes no new bytes, which go to other drives from now on: " in warning
    report = two.store.drive_report()[1]
    assert report.state is state
    assert report.cause in warning
    assert f"drive1 ({state}: " in two.store.engine_name


def test_a_full_drive_is_tried_again_after_a_while(
    two: SeveralDrives, pool: HostPool, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("a", "b"):
        two.store.create(key, 8 * MIB)
    injection = two.faults[1].inject(Fault.NO_SPACE, op=Op.WRITE, times=2)
    two.write(pool, "a", 1, _PAGES)
    for hits in (2, 2):
        two.clock.sleep(DEFAULT_RETRY_FULL_S)
        two.write(pool, "b", 2, _PAGES)  # the first attempt fails again, so that the key moves
        two.store.create(f"new {two.clock.now_s()}", 8 * MIB)
        assert injection.hits == hits
    assert len(warnings(caplog)) == 1
    assert two.store.drive_report()[1].state is DriveState.FULL  # nothing has been written there yet
    expected = two.write(pool, "new 60.0", 3, _PAGES)
    assert two.by_drive("new 60.0") == {0: 4 * MIB, 1: 4 * MIB}
    assert two.store.drive_report()[1].state is DriveState.OPEN
    assert two.store.drive_report()[1].cause == ""
    assert two.read(pool, "new 60.0") == expected
    two.faults[1].inject(Fault.NO_SPACE, op=Op.WRITE)
    two.write(pool, "new 60.0", 4, _PAGES)
    assert len(warnings(caplog)) == 2  # it was all right in between
    two.check_extents()


def test_how_long_a_full_drive_is_left_alone_can_be_set(tmp_path: Path, pool: HostPool) -> None:
    with SeveralDrives(tmp_path, retry_full_s=5.0) as two:
        two.store.create("a", 8 * MIB)
        two.faults[1].inject(Fault.NO_SPACE, op=Op.WRITE)
        two.write(pool, "a", 1, _PAGES)
        two.clock.sleep(4.0)
        two.store.create("b", 8 * MIB)
        assert two.by_drive("b") == {0: 8 * MIB}
        two.clock.sleep(1.0)
        two.store.create("c", 8 * MIB)
        assert two.by_drive("c") == {0: 4 * MIB, 1: 4 * MIB}


def files_nbytes(store: ShardStore) -> int:
    """What the files take on the disks, all together."""
    return sum(os.fstat(drive.file.fd).st_size for drive in store._drives)


def test_what_drives_refuse_stays_within_the_limit_of_all_files(tmp_path: Path, pool: HostPool) -> None:
    """Two keys move off a drive that takes nothing; for half of a third there is no room left in the budget."""
    limit_nbytes = 34 * MIB
    with SeveralDrives(tmp_path, capacity_nbytes=24 * MIB, files_nbytes=limit_nbytes) as two:
        content = {}
        for number, key in enumerate(("a", "b", "c")):
            two.store.create(key, 8 * MIB)
            content[key] = two.write(pool, key, number, _PAGES)
        two.faults[1].inject(Fault.IO_ERROR, op=Op.WRITE, times=None)
        for key in ("a", "b"):
            content[key] = two.write(pool, key, 5, _PAGES)
            assert two.by_drive(key) == {0: 8 * MIB}
        assert files_nbytes(two.store) == 32 * MIB
        with filled(pool, 8 * MIB, 6) as lease:
            error = failure(two.store.submit_write("c", lease.memory, tag=TAG))
        assert isinstance(error, SwapFullError)
        assert "take 33554432 bytes together and need 4194304 more" in str(error)
        assert f"beyond their limit of {limit_nbytes} bytes. Raise it (nvme.budget)" in str(error)
        with pytest.raises(SwapFullError, match="beyond their limit"):
            two.store.create("d", 24 * MIB)
        assert files_nbytes(two.store) == 32 * MIB
        assert {key: two.read(pool, key) for key in ("a", "b")} == {key: content[key] for key in ("a", "b")}
        assert two.store.drive_report()[0].state is DriveState.OPEN  # nothing is wrong with it
        two.store.delete("a")
        assert two.write(pool, "c", 7, _PAGES) == two.read(pool, "c")  # goes on where room has become free
        two.check_extents()


def test_a_file_is_made_longer_only_by_what_is_missing_at_its_end(tmp_path: Path) -> None:
    with SeveralDrives(tmp_path, 1, capacity_nbytes=6 * MIB, files_nbytes=8 * MIB) as one:
        one.store.create("a", 4 * MIB)
        one.store.create("b", 4 * MIB)
        assert files_nbytes(one.store) == 8 * MIB
        with pytest.raises(SwapFullError, match=r"take 8388608 bytes together and need 4096 more.*limit of 8388608"):
            one.store.create("c", PAGE)


@pytest.mark.parametrize("pages", [1, 7, 100, 1000])
def test_no_more_is_reserved_than_asked_for(tmp_path: Path, pages: int) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    options = StorageOptions(free_margin_nbytes=0, files_nbytes=pages * PAGE)
    store = ShardStore.open(paths, pages * PAGE - 5, options=options, speeds=[3.0, 1.0, 2.0])
    assert files_nbytes(store) == pages * PAGE
    store.close()
    with pytest.raises(ValueError, match=f"its files may take {pages * PAGE} together"):
        ShardStore.open(paths, pages * PAGE + 1, options=options)


def test_when_every_drive_refuses_the_write_fails_with_need_and_have(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 8 * MIB)
    for one in two.faults:
        one.inject(Fault.NO_SPACE, op=Op.WRITE, times=None)
    with filled(pool, 8 * MIB, 1) as lease:
        error = failure(two.store.submit_write("a", lease.memory, tag=TAG))
        assert isinstance(error, SwapFullError)
        assert error.key == "a"
        for word in ("no drive has room for", "drive0 has", "drive1 has", "No space left", "Free space on one"):
            assert word in str(error)
        assert isinstance(failure(two.store.submit_read("a", lease.memory, tag=TAG)), SwapFullError)
    two.check_extents()
    for one in two.faults:
        one.clear()
    # Space was made: nobody has to wait until the drives are due to be tried again.
    expected = two.write(pool, "a", 2, _PAGES)
    assert two.read(pool, "a") == expected
    two.check_extents()


def test_when_every_drive_fails_the_write_fails_with_the_error(two: SeveralDrives, pool: HostPool) -> None:
    two.store.create("a", 8 * MIB)
    for one in two.faults:
        one.inject(Fault.IO_ERROR, op=Op.WRITE, times=None)
    with filled(pool, 8 * MIB, 1) as lease:
        error = failure(two.store.submit_write("a", lease.memory, tag=TAG))
    assert isinstance(error, WriteError)
    for one in two.faults:
        one.clear()
    assert two.write(pool, "a", 2, _PAGES) == two.read(pool, "a")
    two.check_extents()


def test_a_file_that_cannot_be_made_longer_leaves_new_keys_to_the_others(
    two: SeveralDrives, pool: HostPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two.store.create("old", 8 * MIB)
    whole = shutil.disk_usage
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: _Usage() if "drive1" in str(path) else whole(path))
        for key in ("a", "b"):
            two.store.create(key, 8 * MIB)
            assert two.by_drive(key) == {0: 8 * MIB}
        assert two.write(pool, "old", 1, _PAGES) == two.read(pool, "old")
        assert two.by_drive("old") == {0: 4 * MIB, 1: 4 * MIB}  # what is reserved can be overwritten
        (warning,) = warnings(caplog)
        assert "drive1 takes no new bytes" in warning
        assert "only 0 bytes are free" in warning
        assert two.store.drive_report()[1].state is DriveState.CROWDED
    two.store.create("c", 8 * MIB)
    assert two.by_drive("c") == {0: 4 * MIB, 1: 4 * MIB}
    assert two.store.drive_report()[1].state is DriveState.OPEN
    two.check_extents()


def test_free_space_in_small_parts_is_used_before_giving_up(
    two: SeveralDrives, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(16):
        two.store.create(str(key), 4 * PAGE)
    for key in range(0, 16, 4):
        two.store.delete(str(key))
        two.store.delete(str(key + 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage())
    two.store.create("a", 32 * PAGE)
    assert two.write(pool, "a", 1, 32) == two.read(pool, "a")
    with pytest.raises(SwapFullError, match=r"no drive has room for 4096 bytes: .*drive0 has 0 of .*drive1 has 0 of"):
        two.store.create("b", PAGE)
    two.check_extents()


def test_what_is_repeated_elsewhere_has_the_right_checksums(two: SeveralDrives, pool: HostPool) -> None:
    pages = 16 * MIB // PAGE
    two.store.create("a", 16 * MIB)
    expected = bytearray(two.write(pool, "a", 1, pages))
    # From one page before the middle, where one drive's piece ends, to two after: blocks in parts on both drives.
    for turn, (first, count) in enumerate([(pages // 2 - 1, 3), (pages // 2 - 70, 140), (3, 70)]):
        two.faults[turn % 2].inject(Fault.IO_ERROR, op=Op.WRITE)
        expected[first * PAGE : (first + count) * PAGE] = two.write(pool, "a", turn, count, first)
        assert two.read(pool, "a") == expected
        two.check_extents()


# One drive does not hold up the other -------------------------------------------------------------------------------


def test_a_stuck_drive_does_not_hold_up_the_other(two: SeveralDrives, pool: HostPool) -> None:
    keys = [str(number) for number in range(12)]
    for key in keys:
        two.store.create(key, 4 * PAGE)
    stuck = two.faults[1].inject(Fault.STUCK, times=None)
    on_first = [key for key in keys if two.by_drive(key) == {0: 4 * PAGE}]
    assert len(on_first) == 6
    with filled(pool, 4 * PAGE, 1) as lease:
        writes = {key: two.store.submit_write(key, lease.memory, tag=TAG) for key in keys}
        for key in on_first:
            finish(writes[key])
            with pool.lease(4 * PAGE, "read") as memory:
                finish(two.store.submit_read(key, memory.memory, tag=TAG))
        waiting = [key for key in keys if not writes[key].done]
        assert set(waiting) == set(keys) - set(on_first)
        assert stuck.hits == 6
        two.faults[1].clear()
        two.faults[1].release_stuck()
        for key in waiting:
            finish(writes[key])
