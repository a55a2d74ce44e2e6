"""A real run, recorded as its scheduler saw it, and replayed by the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.config import Schedule
from infinity.errors import ConfigError
from infinity.observe.trace import TraceEvent
from infinity.order import Phase
from infinity.plan.drives import DriveModel
from infinity.plan.scheduler_trace import SchedulerTrace, read_trace, record, to_text
from infinity.plan.simulate import simulate
from tests.cli.command import call
from tests.plan.test_observed import train


@pytest.fixture(scope="module", params=["synchronous", "overlapped", "deferred"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SchedulerTrace:
    """A recorded run of five steps."""
    engine, observer = train(tmp_path_factory.mktemp("run"), 5, request.param)
    with engine:
        engine.metrics()  # everything under way has landed
        traffic = engine.traffic.per_step[-1]
        return record(engine._runtime, observer, machine={"cpu": "some"}, micro_batches=1, traffic=traffic)


def test_a_replay_moves_the_very_bytes_of_the_run(trace: SchedulerTrace) -> None:
    result = simulate(trace.scenario())
    assert (result.read_nbytes, result.write_nbytes) == trace.traffic
    assert trace.traffic[1] > 0


def test_uses_are_recorded_as_they_were(trace: SchedulerTrace) -> None:
    forward = [unit for phase, unit in trace.uses if phase == Phase.FORWARD.value]
    backward = [unit for phase, unit in trace.uses if phase == Phase.BACKWARD.value]
    assert forward == trace.order
    assert backward == forward[::-1]
    assert [trace.units[unit].name for unit in forward] == [f"blocks.{number}" for number in range(4)]


def test_the_times_of_all_uses_are_the_thread_s(trace: SchedulerTrace) -> None:
    worked_s = sum(unit.forward_s + unit.backward_s for unit in trace.units)
    assert worked_s == pytest.approx(trace.calibration.thread_s, rel=1e-6)


def test_a_file_gives_the_same_replay_again(trace: SchedulerTrace, tmp_path: Path) -> None:
    path = tmp_path / "run.scheduler"
    path.write_text(to_text(trace))
    again = read_trace(path)
    assert again == trace
    assert to_text(again) == to_text(trace)
    assert simulate(again.scenario()).steps_s == simulate(trace.scenario()).steps_s


def test_other_drives_take_the_place_of_those_of_the_run(trace: SchedulerTrace) -> None:
    slow = DriveModel(1e6, 1e6, latency_s=0.0, duplex=1.0)
    result = simulate(trace.scenario([slow]))
    assert (result.read_nbytes, result.write_nbytes) == trace.traffic
    assert result.step_s >= max(trace.traffic) / 1e6 * 0.99


def test_a_long_run_is_recorded_by_the_steps_that_the_trace_still_holds(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 6)
    with engine:
        engine.metrics()
        traffic, events = engine.traffic.per_step[-1], engine.trace._events
        third_s = observer.moments[3].at_s
        while events[0].start_s < third_s:
            events.popleft()
        longest = TraceEvent("x", "read", observer.moments[1].at_s, 60.0, "drive 0", 0)  # began early, noted late
        events.append(longest)
        found = record(engine._runtime, observer, machine={}, micro_batches=1, traffic=traffic)
        assert found.calibration.steps < 3
        assert sum(unit.forward_s + unit.backward_s for unit in found.units) == pytest.approx(
            found.calibration.thread_s
        )
        assert found.calibration == observer.calibrate(observer.moments[-found.calibration.steps - 1 :])
        events.clear()
        with pytest.raises(ConfigError, match="more events than the trace holds"):
            record(engine._runtime, observer, machine={}, micro_batches=1, traffic=traffic)


def test_few_steps_cannot_be_recorded(tmp_path: Path) -> None:
    engine, observer = train(tmp_path, 2)
    with engine, pytest.raises(ConfigError, match="needs 3 steps or more"):
        record(engine._runtime, observer, machine={}, micro_batches=1, traffic={})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not what `infinity train --scheduler-trace` writes"),
        ('{"format": "infinity-scheduler-trace", "version": 99}', "not of this version"),
        ('{"format": "infinity-scheduler-trace", "version": 1}', "Field required"),
        ("{", "not valid JSON"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    code, _, error = call("plan", "--replay", path)
    assert code == 2
    assert message in error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("measured_s", 0.0, "0.0 s a step"),
        ("micro_batches", 0, "of 0 micro-batches"),
        ("order", [99], "the order names a unit"),
        ("order", [0, 0], "the order names a unit"),
        ("groups", [], "do not belong together"),
        ("fields", [["m", "torch.nothing", 1]], "no dtype of torch"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    trace: SchedulerTrace, tmp_path: Path, name: str, value: object, message: str
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(json.loads(to_text(trace)) | {name: value}))
    code, _, error = call("plan", "--replay", path)
    assert code == 2, error
    assert message in error


def test_train_records_and_plan_replays(tmp_path: Path) -> None:
    swap, file, result = tmp_path / "swap", tmp_path / "run.scheduler", tmp_path / "replay.json"
    swap.mkdir()
    arguments = ("--preset", "tiny", "--nvme", swap, "--scheduler-trace", file)
    assert "needs --steps 3 or more" in call("train", *arguments, "--steps", "2")[2]
    code, _, error = call("train", *arguments, "--steps", "3")
    assert code == 0, error
    code, output, error = call("plan", "--replay", file, "--json", result, "--trace", tmp_path / "t.json")
    assert code == 0, error
    assert "the same bytes" in output
    report = json.loads(result.read_text())
    assert report["replayed_bytes"] == report["measured_bytes"]
    assert report["measured_seconds"] > 0
    assert read_trace(file).placement.schedule is Schedule.OVERLAPPED
    code, _, error = call("plan", "--replay", file, "--search")
    assert code == 2 and "--replay and --search" in error
    damaged = json.loads(file.read_text())
    damaged["placement"]["window_nbytes"] = 0
    file.write_text(json.dumps(damaged))
    code, _, error = call("plan", "--replay", file)
    assert code == 2 and "cannot be simulated" in error
