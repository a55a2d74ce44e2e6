"""What is measured of this machine, kept, and used by plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.bench.machine import describe_machine
from infinity.errors import ConfigError
from infinity.plan.calibration import (
    Alone,
    CalibrationFile,
    Corrections,
    MachineCalibration,
    Residual,
    machine_id,
)
from infinity.plan.contention import Contention
from infinity.plan.drives import DriveModel
from infinity.plan.measure import corrections_from, fit_compute
from infinity.plan.observed import Calibration
from tests.cli.command import call, train_report

ALONE = Alone(100e9, 1e-4, 1e-9, 10e9, 5e9, {"/mnt/a": DriveModel(3e9, 2e9, latency_s=0.0)})
CORRECTIONS = Corrections(compute=2.0, optimizer=1.5, read=1.2, write=1.25)
CONTENTION = Contention(1.0, 1e-4, 1e-10)


def calibration(made: str = "2026-01-02T03:04:05+00:00") -> MachineCalibration:
    return MachineCalibration(
        machine=describe_machine(),
        made=made,
        versions={"infinity": "0.1.0", "torch": "2.13.0"},
        device="the CPU of this machine",
        has_gpu=False,
        device_memory_nbytes=1 << 33,
        alone=ALONE,
        corrections=CORRECTIONS,
        residuals=(Residual("overlapped, predicted before it ran", 1.1, 1.0, made),),
        hand_over_s=2e-4,
        contention=CONTENTION,
    )


def test_rates_are_corrected_for_what_a_run_does_to_them() -> None:
    hardware = calibration().hardware()
    assert hardware.flops_per_s == 50e9
    assert hardware.unit_s == 2e-4
    assert hardware.optimizer_s == pytest.approx(1.5e-9)
    assert (hardware.hand_over_s, hardware.contention) == (2e-4, CONTENTION)
    (drive,) = hardware.drives
    assert drive.model.read_bytes_per_s == pytest.approx(2.5e9)
    assert drive.model.write_bytes_per_s == pytest.approx(1.6e9)
    assert not hardware.has_gpu
    (note,) = hardware.notes
    assert "calibrated on this machine on 2026-01-02" in note
    assert "compute x2.00" in note and "missed by 10.0% (median of 1)" in note


def test_a_file_holds_all_of_it_and_the_residuals_since(tmp_path: Path) -> None:
    file = CalibrationFile(describe_machine(), tmp_path / "deep")
    assert file.load() is None
    file.note(Residual("before", 1.0, 2.0, "2025-12-31T00:00:00+00:00"))
    saved = calibration()  # with the machine's load of this moment
    file.save(saved)
    assert file.load() == saved
    since = Residual("since", 3.0, 2.0, "2026-02-01T00:00:00+00:00")
    file.note(since)
    loaded = file.load()
    assert loaded is not None
    assert loaded.residuals == (*saved.residuals, since)
    assert since.error == 0.5
    assert sorted(path.suffix for path in (tmp_path / "deep").iterdir()) == [".json", ".jsonl"]


def test_damage_is_told_and_what_can_be_used_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = CalibrationFile(describe_machine(), tmp_path)
    saved = calibration()
    file.save(saved)
    with (tmp_path / f"{file.path.stem}.residuals.jsonl").open("a") as lines:
        lines.write("half a li")
    assert file.load() == saved
    assert any("damaged line" in message for message in caplog.messages)
    file.path.write_text("{}")
    with pytest.raises(ConfigError, match="run `infinity plan --calibrate` again"):
        file.load()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("alone.flops_per_s", 0.0, "flops_per_s is 0.0"),
        ("alone.link_bytes_per_s", -1.0, "link_bytes_per_s is -1.0"),
        ("alone.copy_bytes_per_s", float("nan"), "copy_bytes_per_s is nan"),
        ("alone.unit_s", -1.0, "unit_s is -1.0"),
        ("alone.drives", {"/a": {"read_bytes_per_s": 0, "write_bytes_per_s": 1}}, "rates must be positive"),
        ("corrections.read", 0.0, "read is 0.0"),
        ("corrections.compute", float("inf"), "compute is inf"),
        ("machine", {}, "memory_bytes of the machine is None"),
        ("hand_over_s", -1.0, "hand_over_s"),
        ("contention.byte_s", -1.0, "byte_s of the contention is -1.0"),
        ("contention.kernel", float("inf"), "kernel of the contention is inf"),
        ("residuals", [{"what": "x", "predicted_s": 1, "measured_s": 0, "made": ""}], "greater than 0"),
    ],
)
def test_figures_that_nothing_can_be_planned_with_are_refused(
    tmp_path: Path, path: str, value: object, message: str
) -> None:
    file = CalibrationFile(describe_machine(), tmp_path)
    file.save(calibration())
    content = json.loads(file.path.read_text())
    *folders, last = path.split(".")
    place = content
    for name in folders:
        place = place[name]
    place[last] = value
    file.path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as refused:
        file.load()
    assert "run `infinity plan --calibrate` again" in str(refused.value)


def test_predictions_that_are_no_text_any_more_do_not_hinder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = CalibrationFile(describe_machine(), tmp_path)
    saved = calibration()
    file.save(saved)
    (tmp_path / f"{file.path.stem}.residuals.jsonl").write_bytes(b"\xff\xfe\x00\n")
    assert file.load() == saved
    assert any("damaged line" in message for message in caplog.messages)


def test_a_machine_is_known_by_what_it_is_and_not_by_its_load() -> None:
    machine = describe_machine()
    assert machine_id(machine) == machine_id(machine | {"load": 99.0, "infinity": "9.9"})
    assert machine_id(machine) != machine_id(machine | {"cores": 512})


def test_overhead_and_rate_of_computing_are_told_apart() -> None:
    sizes = [1e6, 1e8, 1e10]
    flops_per_s, unit_s = fit_compute([(flops, 3e-3 + flops / 2e11) for flops in sizes])
    assert flops_per_s == pytest.approx(2e11)
    assert unit_s == pytest.approx(1e-3)  # of each of three passes
    flops_per_s, unit_s = fit_compute([(1e6, 1e-6), (1e8, 3e-4), (1e10, 5e-2)])
    assert unit_s == 0.0 and flops_per_s > 0


def test_corrections_are_time_in_a_run_over_time_alone() -> None:
    drives = (DriveModel(1.5e9, 0.5e9, latency_s=0.0, duplex=1.0),)
    seen = Calibration(thread_s=1.0, kernel_s=3e-9, drives=drives, steps=3, measured_s=2.0)
    found = corrections_from(ALONE, seen)
    assert found.optimizer == pytest.approx(3.0)
    assert (found.read, found.write) == (pytest.approx(2.0), pytest.approx(4.0))
    assert found.compute > 0
    twice = corrections_from(ALONE, Calibration(2.0, 3e-9, seen.drives, 3, 3.0))
    assert twice.compute == pytest.approx(2 * found.compute)


# As a user types it --------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_plans_without_hardware_options_are_of_the_calibrated_machine(tmp_path: Path, state: Path) -> None:
    target = tmp_path / "plan.json"
    arguments = ("plan", "--preset", "tiny", "--no-advice", "--json", target)
    assert call("plan", "--preset", "tiny", "--here")[0] == 2
    assert call(*arguments)[0] == 0
    assert json.loads(target.read_text())["hardware"]["gpu"]["name"] == "rtx4090"
    CalibrationFile(describe_machine()).save(calibration())
    code, output, error = call(*arguments)
    assert code == 0, error
    assert "calibrated on this machine on 2026-01-02" in output
    hardware = json.loads(target.read_text())["hardware"]
    assert hardware["gpu"]["name"] == "the CPU of this machine"
    assert hardware["drives"][0]["name"] == "/mnt/a"
    assert call(*arguments, "--here", "--drive", "2x1:1")[0] == 0
    assert [drive["name"] for drive in json.loads(target.read_text())["hardware"]["drives"]] == ["1:1 GB/s"] * 2
    assert call(*arguments, "--gpu", "h100")[0] == 0
    assert json.loads(target.read_text())["hardware"]["notes"] == []
    code, _, error = call(*arguments, "--here", "--gpu", "h100")
    assert code == 2 and "--here contradicts --gpu h100" in error


def test_a_run_keeps_how_its_prediction_turned_out(tmp_path: Path, state: Path) -> None:
    CalibrationFile(describe_machine()).save(calibration())
    report = train_report(tmp_path, "--steps", "4")
    loaded = CalibrationFile(describe_machine()).load()
    assert loaded is not None
    kept = loaded.residuals[-1]
    assert kept.what == "infinity train, 8 x 96, overlapped, bf16"
    assert (kept.predicted_s, kept.measured_s) == (
        report["prediction"]["step_seconds"],
        report["prediction"]["measured_seconds"],
    )


def test_folders_that_are_not_there_are_refused(state: Path) -> None:
    code, _, error = call("plan", "--calibrate", "--nvme", "no/such/folder")
    assert code == 2
    assert "there is no such directory" in error


@pytest.mark.slow
def test_this_machine_is_measured_and_a_plan_uses_it(tmp_path: Path, state: Path) -> None:
    target = tmp_path / "calibration.json"
    code, output, error = call("plan", "--calibrate", "--nvme", tmp_path, "--json", target)
    assert code == 0, error
    assert "predicted before it ran" in output
    found = json.loads(target.read_text())
    assert found["alone"]["drives"].keys() == {str(tmp_path)}
    assert min(found["corrections"].values()) > 0
    assert [residual["what"].split(",")[0] for residual in found["residuals"]] == ["synchronous", "overlapped"]
    assert list(tmp_path.glob("infinity-*")) == []
    code, output, _ = call("plan", "--preset", "tiny", "--no-advice")
    assert code == 0
    assert "calibrated on this machine" in output
