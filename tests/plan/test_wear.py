"""Predicted wear, the ledger of what was written, and what a budget does to a run."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import NvmeConfig, WearAction, WearBudget
from infinity.errors import ConfigError
from infinity.models.gpt import Gpt, GptShape, init_weights
from infinity.plan.drive_counters import DriveCount, count_written, parse_smart
from infinity.plan.drives import DriveModel
from infinity.plan.hardware import DRIVES, parse_drives
from infinity.plan.ledger import LedgerError, WearLedger, default_ledger_path
from infinity.plan.wear import predict_wear, steps_to_rating
from infinity.plan.wear_guard import Verdict, WearGuard
from infinity.wear import WearWatch
from storage.devices import identify_device
from tests.cli.command import call, train_report

TB = 10**12


# Prediction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("billions", "written_per_parameter", "endurance_tb", "expected"),
    [(7, 18, 2400, 19e3), (13, 12, 2400, 15e3), (32, 14, 2400, 5.4e3), (70, 6, 7000, 17e3), (70, 12, 35_000, 42e3)],
)
def test_steps_to_the_rating(billions: int, written_per_parameter: int, endurance_tb: int, expected: float) -> None:
    """The table of PLANNING section 2.7, to its two digits."""
    (drive,) = parse_drives([f"7:3:4TB:{endurance_tb}TBW"])
    steps = steps_to_rating(drive, billions * 1e9 * written_per_parameter)
    assert steps == pytest.approx(expected, rel=0.05)


def test_wear_is_counted_per_thousand_steps() -> None:
    drives = parse_drives(["2x7:3:4TB:1000TBW"])
    rows = predict_wear(drives, [TB, TB], step_s=86.4)
    assert [row.written_per_step_nbytes for row in rows] == [TB, TB]
    assert rows[0].share_per_1000_steps == pytest.approx(1.0)
    assert rows[0].steps_to_rating == pytest.approx(1000)
    assert rows[0].days_to_rating == pytest.approx(1.0)


def test_a_step_larger_than_the_fast_cache_is_warned_of() -> None:
    drive = DRIVES["mp600elite-2tb"]
    assert "falls to 1.5 GB/s" in predict_wear([drive], [500 * 10**9], 1.0)[0].warning
    assert predict_wear([drive], [40 * 10**9], 60.0)[0].warning == ""
    # In less time than the cache needs to empty again: the next steps find it full.
    assert "so it fills up: the drive falls to 1.5 GB/s" in predict_wear([drive], [40 * 10**9], 20.0)[0].warning


def test_unknown_endurance_gives_no_numbers() -> None:
    drive = replace(DRIVES["990pro-4tb"], endurance_nbytes=0, model=DriveModel(1e9, 1e9))
    row = predict_wear([drive], [TB], 1.0)[0]
    assert (row.steps_to_rating, row.days_to_rating, row.share_per_1000_steps) == (None, None, None)


# Ledger -------------------------------------------------------------------------------------------------------------


def test_bytes_add_up_by_device_and_day(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "wear.sqlite3"
    WearLedger(path).add("a", 5, "2026-01-01")
    WearLedger(path).add("a", 7, "2026-01-01")
    WearLedger(path).add("a", 1, "2026-01-02")
    WearLedger(path).add("b", 2, "2026-01-02")
    ledger = WearLedger(path)
    assert (ledger.written_nbytes("a"), ledger.written_nbytes("a", "2026-01-01")) == (13, 12)
    assert (ledger.written_nbytes("b"), ledger.written_nbytes("none")) == (2, 0)
    assert ledger.devices() == ["a", "b"]


def _add_often(path: Path) -> None:
    for _ in range(50):
        WearLedger(path).add("a", 1, "2026-01-01")


def test_processes_may_count_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "wear.sqlite3"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_often, args=(path,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0]
    assert WearLedger(path).written_nbytes("a") == 100


def test_a_user_without_a_home_has_a_ledger_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under any number; a training run failed with it."""

    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert default_ledger_path().parent.name == f"infinity-state-{os.getuid()}"


def test_what_is_no_ledger_is_left_alone_and_named(tmp_path: Path) -> None:
    path = tmp_path / "wear.sqlite3"
    path.write_text("this is not a database, but it is long enough to look like something" * 20)
    with pytest.raises(LedgerError, match="cannot be used"):
        WearLedger(path).add("a", 1)
    assert path.read_text().startswith("this is not")


def test_what_has_been_written_cannot_be_taken_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be taken back"):
        WearLedger(tmp_path / "wear.sqlite3").add("a", -1)


def test_smart_counts_in_thousands_of_sectors() -> None:
    report = {"nvme_smart_health_information_log": {"data_units_written": 2_000_000}}
    assert parse_smart(json.dumps(report)) == 1_024_000_000_000
    assert parse_smart("{}") is None
    assert parse_smart("Permission denied") is None
    assert parse_smart("[]") is None


# Guard --------------------------------------------------------------------------------------------------------------


class Run:
    """A run that writes when told to, and its guard."""

    def __init__(self, folder: Path, budget: WearBudget | None, action: WearAction) -> None:
        self.written = {"disk": 0}
        self.now_s = 0.0
        self.day = "2026-01-01"
        self.ledger = WearLedger(folder / "wear.sqlite3")
        self.guard = WearGuard(
            self.ledger,
            lambda: dict(self.written),
            budget,
            action,
            now_s=lambda: self.now_s,
            day=lambda: self.day,
        )

    def step(self, nbytes: int) -> Verdict:
        self.written["disk"] += nbytes
        return self.guard.step_ended()


def test_a_warning_is_given_once_a_day(tmp_path: Path) -> None:
    run = Run(tmp_path, WearBudget(nbytes=10, is_per_day=True), WearAction.WARN)
    assert run.step(9) == Verdict()
    verdict = run.step(1)
    assert "10 B have been written to disk today" in verdict.message
    assert not verdict.must_stop
    assert run.step(1).message == ""
    run.day = "2026-01-02"
    assert run.step(1).message == ""
    assert run.step(9).message != ""


def test_runs_before_count_towards_a_budget_in_all(tmp_path: Path) -> None:
    WearLedger(tmp_path / "wear.sqlite3").add("disk", 95, "2025-12-31")
    run = Run(tmp_path, WearBudget(nbytes=100), WearAction.STOP)
    assert not run.step(4).must_stop
    assert run.step(1).must_stop


def test_slowing_down_keeps_to_the_rate_of_a_day(tmp_path: Path) -> None:
    run = Run(tmp_path, WearBudget(nbytes=86_400, is_per_day=True), WearAction.SLOW)  # a byte per second
    run.now_s = 2.0
    assert run.step(10).pause_s == pytest.approx(8.0)
    run.now_s = 10.0
    assert run.step(0).pause_s == 0.0


def test_without_a_budget_a_run_is_only_counted(tmp_path: Path) -> None:
    run = Run(tmp_path, None, WearAction.WARN)
    assert run.step(5) == Verdict()
    assert run.ledger.written_nbytes("disk") == 0
    run.now_s = 60.0
    run.step(5)
    assert run.ledger.written_nbytes("disk") == 10
    run.guard.flush()
    assert run.ledger.written_nbytes("disk") == 10


def test_a_ledger_that_cannot_be_used_does_not_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wear.sqlite3").write_text("no database at all, and long enough to be sure of that" * 20)
    run = Run(tmp_path, WearBudget(nbytes=1), WearAction.STOP)
    assert run.step(5) == Verdict()
    assert run.step(5) == Verdict()
    assert sum("wear ledger" in message for message in caplog.messages) == 1


def test_what_the_drive_counts_is_put_beside_what_the_run_counts(tmp_path: Path) -> None:
    drive = {"disk": DriveCount(10**9, "SMART")}
    written = {"disk": 0}
    ledger = WearLedger(tmp_path / "wear.sqlite3")
    guard = WearGuard(ledger, lambda: dict(written), None, WearAction.WARN, drives=lambda: dict(drive))
    written["disk"], drive["disk"] = 5 * 10**6, DriveCount(10**9 + 6 * 10**6, "SMART")
    (report,) = guard.report()
    assert (report.written_nbytes, report.drive_nbytes, report.ledger_nbytes) == (5 * 10**6, 6 * 10**6, 5 * 10**6)
    assert report.is_plausible and "by SMART" in report.describe()
    drive["disk"] = DriveCount(10**9 + 10**6, "SMART")
    (report,) = guard.report()
    assert not report.is_plausible and "which is LESS" in report.describe()
    drive["disk"] = DriveCount(None, "no such counter")
    (report,) = guard.report()
    assert report.is_plausible and "not checked against the drive: no such counter" in report.describe()


def test_drives_are_called_what_people_call_them(tmp_path: Path) -> None:
    written = {"overlayblk 536870912 sectors": 0, "other": 0}
    guard = WearGuard(
        WearLedger(tmp_path / "wear.sqlite3"),
        lambda: dict(written),
        WearBudget(nbytes=10),
        WearAction.WARN,
        names={"overlayblk 536870912 sectors": "drive vda under /swap"},
    )
    written["overlayblk 536870912 sectors"] = 20
    assert "20 B have been written to drive vda under /swap; the" in guard.step_ended().message
    named, other = guard.report()
    assert (named.device, named.name) == ("overlayblk 536870912 sectors", "drive vda under /swap")
    assert named.describe().startswith("drive vda under /swap: 20 B written")
    assert other.describe().startswith("other: 0 B written")
    assert named.to_json()["device"] == "overlayblk 536870912 sectors"


def test_the_kernel_counts_what_a_block_device_takes_in(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "stat").write_text("1 2 3 4 5 6 2000 8 9 10 11\n")
    listed = tmp_path / "block"
    assert count_written(tmp_path, listed).nbytes is None
    listed.mkdir()
    (listed / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk)
    assert count_written(tmp_path, listed) == DriveCount(2000 * 512, "the kernel's counter of sda")
    (disk / "stat").write_text("nonsense")
    unreadable = count_written(tmp_path, listed)
    assert unreadable.nbytes is None and "neither SMART nor" in unreadable.source


def test_smart_goes_before_the_kernel_where_smartctl_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = tmp_path.stat().st_dev
    disk, tools, listed = tmp_path / "nvme0n1", tmp_path / "bin", tmp_path / "block"
    (disk / "queue").mkdir(parents=True)
    (disk / "stat").write_text("1 2 3 4 5 6 2000 8 9 10 11\n")
    listed.mkdir()
    (listed / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk)
    tools.mkdir()
    command = tools / "smartctl"
    command.write_text('#!/bin/sh\necho \'{"nvme_smart_health_information_log": {"data_units_written": 3}}\'\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert count_written(tmp_path, listed) == DriveCount(3 * 512_000, "SMART")
    command.write_text("#!/bin/sh\necho 'Permission denied'; exit 2\n")
    assert count_written(tmp_path, listed) == DriveCount(2000 * 512, "the kernel's counter of nvme0n1")


# Settings and runs --------------------------------------------------------------------------------------------------


def test_a_budget_is_bytes_in_all_or_per_day() -> None:
    assert NvmeConfig(wear_budget="100TB").wear_budget == WearBudget(nbytes=100 * TB)
    assert NvmeConfig(wear_budget="2TB/day").wear_budget == WearBudget(nbytes=2 * TB, is_per_day=True)
    assert NvmeConfig(wear_budget=5).wear_budget == WearBudget(nbytes=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wear_budget": "2TB/week"}, "per day such as"),
        ({"wear_budget": "lots"}, "cannot read"),
        ({"wear_budget": "0GB"}, "greater than 0"),
        ({"wear_budget": "2TB", "wear_action": "slow"}, "budget per day"),
        ({"wear_action": "stopp"}, "did you mean 'stop'"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        infinity.Config(nvme=settings)


def test_a_run_enters_in_the_ledger_what_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    report = train_report(tmp_path, "--steps", "2")
    total = report["traffic"]["total"]
    counted = WearLedger(default_ledger_path()).written_nbytes(identify_device(tmp_path))
    assert counted == total["nvme_write_bytes"] + total["nvme_write_padding_bytes"]
    (wear,) = report["wear"]
    initial = report["traffic"]["initialisation"]
    assert wear["written_nbytes"] + initial["nvme_write_bytes"] <= counted
    assert wear["ledger_nbytes"] == counted
    assert wear["device"] == identify_device(tmp_path)
    assert wear["source"]
    assert "sectors" not in wear["text"] and str(wear["name"]).split(" under ")[-1] in wear["text"]


def test_a_run_that_fails_has_entered_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    swap = tmp_path / "swap"
    swap.mkdir()
    code, _, error = call(
        *("train", "--preset", "tiny", "--steps", "3", "--nvme", swap, "--save", tmp_path / ("x" * 300))
    )
    assert code == 1, error
    assert WearLedger(default_ledger_path()).written_nbytes(identify_device(swap)) > 0


def test_a_run_beyond_its_budget_stops_and_saves(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text('[nvme]\nwear_budget = "1MB"\nwear_action = "stop"\n')
    swap, saved = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()
    arguments = ("--preset", "tiny", "--steps", "5", "--config", settings, "--nvme", swap, "--save", saved)
    arguments += ("--scheduler-trace", tmp_path / "run.scheduler")
    code, output, error = call("train", *arguments, "--json", tmp_path / "r.json")
    assert code == 0, error
    assert "stopping after step" in output + error
    assert "no --scheduler-trace" in output
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["losses"]) < 5
    assert saved.is_dir()


@pytest.mark.parametrize(
    ("budget", "action", "message"),
    [("1MB", "warn", "the wear budget is"), ("1GB/day", "slow", "pausing between steps")],
)
def test_a_run_is_warned_or_slowed_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str, action: str, message: str
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("infinity.cli.offloaded.time.sleep", pauses.append)  # a quarter of an hour, else
    settings = tmp_path / "run.toml"
    settings.write_text(f'[nvme]\nwear_budget = "{budget}"\nwear_action = "{action}"\n')
    swap = tmp_path / "swap"
    swap.mkdir()
    arguments = ("--preset", "tiny", "--steps", "2", "--config", settings, "--nvme", swap)
    code, output, error = call("train", *arguments, "--json", tmp_path / "r.json")
    assert code == 0, error
    assert output.count(message) == 1
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["losses"]) == 2
    if action == "slow":
        (pause_s,) = pauses  # none after the last step
        written_nbytes = report["wear"][0]["written_nbytes"]
        assert 0 < pause_s <= written_nbytes / 1e9 * 86_400


# Loops of one's own --------------------------------------------------------------------------------------------------


def train(folder: Path, steps: int, *, budget: str | None = None, action: str = "warn") -> dict[str, Any]:
    """A small run in a loop of its own that does what it is told."""
    told: list[str] = []
    pauses: list[float] = []
    config = infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "2MiB"},
        host={"budget": "2MiB"},
        nvme={"paths": [folder], "wear_budget": budget, "wear_action": action},
    )
    model = Gpt(GptShape(layers=4, hidden=64, heads=4, seq=16))
    init_weights(model)
    inputs, done = torch.zeros(1, 16, dtype=torch.long), 0
    with (
        infinity.offload(model, config) as engine,
        WearWatch(engine, tell=told.append, pause=pauses.append) as wear,
    ):
        optimizer = infinity.AdamW(model.parameters())
        for step in range(steps):
            model(inputs, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if wear.step_ended(is_last=step + 1 == steps):
                break
        engine.metrics()  # everything written has landed
        (report,) = wear.report()
        moved = sum(drive.write.nbytes for drive in engine.drives)
    return {"told": told, "pauses": pauses, "steps": done, "report": report, "moved": moved}


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WearLedger:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return WearLedger(default_ledger_path())


def test_a_loop_of_ones_own_enters_what_it_writes(tmp_path: Path, ledger: WearLedger) -> None:
    run = train(tmp_path, 2)
    assert run["steps"] == 2 and not run["told"] and not run["pauses"]
    assert ledger.written_nbytes(identify_device(tmp_path)) == run["moved"] > 0
    assert run["report"].ledger_nbytes == run["moved"]


def test_a_loop_of_ones_own_is_told_to_stop(tmp_path: Path, ledger: WearLedger) -> None:
    run = train(tmp_path, 5, budget="1kB", action="stop")
    assert run["steps"] == 1
    assert len(run["told"]) == 1 and "the wear budget is" in run["told"][0]


def test_a_loop_of_ones_own_pauses_but_not_after_its_last_step(tmp_path: Path, ledger: WearLedger) -> None:
    run = train(tmp_path, 2, budget="1MB/day", action="slow")
    assert run["steps"] == 2
    (pause_s,) = run["pauses"]
    assert pause_s > 0
    assert len(run["told"]) == 1 and "pausing between steps" in run["told"][0]


def test_a_loop_that_fails_has_entered_what_it_wrote(tmp_path: Path, ledger: WearLedger) -> None:
    config = infinity.Config(
        host={"budget": "2MiB"}, device={"kind": "cpu", "budget": "2MiB"}, nvme={"paths": [tmp_path]}
    )
    model = Gpt(GptShape(layers=4, hidden=64, heads=4, seq=16))
    init_weights(model)
    with pytest.raises(RuntimeError, match="on purpose"), infinity.offload(model, config) as engine, WearWatch(engine):
        raise RuntimeError("on purpose")
    assert ledger.written_nbytes(identify_device(tmp_path)) > 0  # initialisation writes
