"""`infinity train` on real text, through real swap files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.cli.settings import resolve
from infinity.cli.sizing import minima_of
from infinity.cli.train_options import TrainOptions
from tests.cli.command import call, run, train_report

KEYS = {
    "config", "model", "first_step", "losses", "grad_norms", "step_seconds", "tokens_per_second", "peak_rss_bytes",
    "memory", "budgets", "peaks", "traffic", "expected_traffic", "stalls", "readahead", "io_engine", "drives",
    "prediction", "baseline",
}  # fmt: skip
MEMORY_TERMS = {"interpreter_bytes", "activation_bytes", "device_budget_bytes", "host_budget_bytes", "trace_bytes"}
STEPS = ("--steps", "3")


@pytest.fixture(scope="module")
def user_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of the real command with every output; its folder and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    swap = folder / "swap"
    swap.mkdir()
    files = ("--json", folder / "run.json", "--metrics", folder / "metrics.jsonl", "--trace", folder / "trace.json")
    code, output, error = run("train", "--preset", "tiny", "--precision", "fp32", "--nvme", swap, *files)
    assert code == 0, error
    assert error == ""
    assert list(swap.iterdir()) == []
    return folder, output


def _report(user_run: tuple[Path, str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((user_run[0] / "run.json").read_text())
    return report


def test_shows_the_plan_every_step_and_a_summary(user_run: tuple[Path, str]) -> None:
    output = user_run[1]
    assert "is the smallest that works" in output
    assert "NVMe bytes per step, as computed" in output
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step ")][-8:] == list("01234567")
    assert "schedule: overlapped (auto" in output
    assert "exactly as computed, in every step" in output


def test_report_has_every_promised_key(user_run: tuple[Path, str]) -> None:
    report = _report(user_run)
    assert report.keys() >= KEYS
    assert report["first_step"] == 0
    assert len(report["losses"]) == len(report["step_seconds"]) == len(report["traffic"]["per_step"]) == 8
    assert report["losses"][-1] < report["losses"][0] - 0.5
    assert report["model"]["state_bytes"] == 12 * report["model"]["parameters"]
    prediction = report["prediction"]
    assert prediction["step_seconds"] > 0
    assert prediction["error"] == pytest.approx(prediction["step_seconds"] / prediction["measured_seconds"] - 1)
    assert prediction["calibration"]["steps"] == (len(report["losses"]) - 2) // 2
    assert report["baseline"] is None


def test_the_drive_is_reported(user_run: tuple[Path, str]) -> None:
    report = _report(user_run)
    (drive,) = report["drives"]
    total = report["traffic"]["total"]
    assert drive["directory"] == str(user_run[0] / "swap")
    assert (drive["state"], drive["cause"]) == ("open", "")
    assert drive["write_bytes"] == total["nvme_write_bytes"] + total["nvme_write_padding_bytes"]
    assert 0 < drive["held_bytes"] <= drive["file_bytes"]
    assert drive["read_busy_s"] > 0 and drive["write_busy_s"] > 0


def test_state_is_larger_than_the_budgets_and_they_are_kept(user_run: tuple[Path, str]) -> None:
    report = _report(user_run)
    budgets, peaks = report["budgets"], report["peaks"]
    assert budgets["device"] + budgets["host"] < report["model"]["state_bytes"]
    assert all(0 < peaks[tier] <= budgets[tier] for tier in ("device", "host", "nvme"))


def test_counted_traffic_is_the_computed_one(user_run: tuple[Path, str]) -> None:
    report = _report(user_run)
    for counted, expected in zip(report["traffic"]["per_step"], report["expected_traffic"], strict=True):
        assert {name: counted[name] for name in expected} == expected
        assert counted["h2d_bytes"] > 0 and counted["d2h_bytes"] > 0
        assert counted["nvme_read_bytes/grad"] == counted["nvme_write_bytes/grad"] == 0
    assert report["traffic"]["initialisation"]["nvme_write_bytes"] > 0


def test_memory_is_a_sum_of_terms(user_run: tuple[Path, str]) -> None:
    report = _report(user_run)
    memory = report["memory"]
    assert sum(memory[term] for term in MEMORY_TERMS) == memory["bound_bytes"]
    assert memory["peak_rss_bytes"] == report["peak_rss_bytes"]
    assert memory["interpreter_bytes"] < memory["peak_rss_bytes"] <= memory["bound_bytes"]


def test_metrics_file_has_a_line_per_step(user_run: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (user_run[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["loss"] for line in lines] == _report(user_run)["losses"]
    assert lines[-1]["counters"]["nvme/read_bytes"] > lines[0]["counters"]["nvme/read_bytes"]


def test_trace_opens_in_a_browser(user_run: tuple[Path, str]) -> None:
    events = json.loads((user_run[0] / "trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" and event["cat"] == "optimizer" for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], id="plain"),
        pytest.param(["--accumulate", "4"], id="accumulate"),
        pytest.param(["--clip", "0.5"], id="clip"),
        pytest.param(["--device", "fake"], id="fake device"),
        pytest.param(["--nvme", "a", "--nvme", "b", "--recompute"], id="two drives, recomputation"),
        pytest.param(["budgets"], id="smallest budgets"),
    ],
)
def test_same_bits_as_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments == ["budgets"]:
        least = minima_of(*_tiny())
        arguments = ["--device-budget", str(least.device_nbytes), "--host-budget", str(least.host_nbytes)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    report = train_report(tmp_path, "--precision", "fp32", *STEPS, "--baseline", *arguments)
    baseline = report["baseline"]
    assert baseline["losses"] == report["losses"]
    assert baseline["losses_equal"] is True
    assert baseline["parameters_equal"] is True, baseline["different_parameters"]
    assert baseline["grad_norms"] == report["grad_norms"]
    assert len(baseline["step_seconds"]) == 3
    assert baseline["peak_rss_bytes"] > 0
    assert [list((tmp_path / name).iterdir()) for name in ("a", "b")] == [[], []]


def test_micro_batches_train_as_plain_accumulation_does_and_read_no_parameter_twice(tmp_path: Path) -> None:
    report = train_report(tmp_path, "--precision", "fp32", *STEPS, "--baseline", "--micro-batches", "2")
    baseline = report["baseline"]
    assert report["config"]["engine"]["micro_batches"] == report["config"]["training"]["micro_batches"] == 2
    assert (baseline["parameters_equal"], baseline["losses_equal"]) == (None, None)
    assert baseline["losses"][0] == pytest.approx(report["losses"][0], rel=1e-6)
    assert baseline["losses"] == pytest.approx(report["losses"], rel=1e-4)
    assert baseline["grad_norms"] == report["grad_norms"] == [None] * 3
    for counted, of_one_batch in zip(report["traffic"]["per_step"], report["expected_traffic"], strict=True):
        assert {name: counted[name] for name in of_one_batch} == of_one_batch


def _tiny() -> tuple[Any, Any]:
    settings = resolve(TrainOptions(preset="tiny", precision="fp32"))
    return settings.training.shape, settings.config


@pytest.mark.slow
def test_bf16_is_not_compared_bitwise_and_says_why(tmp_path: Path) -> None:
    report = train_report(tmp_path, "--precision", "bf16", *STEPS, "--baseline")
    baseline = report["baseline"]
    assert baseline["parameters_equal"] is None
    assert "bf16" in baseline["parameters_reason"]
    assert baseline["losses"][-1] == pytest.approx(report["losses"][-1], abs=0.05)


def test_seed_and_data_decide_the_losses(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("abcdefgh" * 100)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = train_report(tmp_path / "one", *STEPS, "--data", text, "--seed", "1")
    two = train_report(tmp_path / "two", *STEPS, "--data", text, "--seed", "2")
    assert one["losses"] != two["losses"]
    assert str(text) in one["config"]["text"]


def test_own_sizes_get_budgets_far_below_the_state(tmp_path: Path) -> None:
    sizes = ("--layers", "12", "--hidden", "64", "--seq", "32", "--batch", "2")
    report = train_report(tmp_path, *sizes, *STEPS)
    assert report["config"]["training"]["shape"] == {"layers": 12, "hidden": 64, "heads": 4, "seq": 32}
    assert report["budgets"]["device"] + report["budgets"]["host"] < report["model"]["state_bytes"]


@pytest.mark.parametrize("recompute", ["--recompute", "--no-recompute"])
def test_a_model_of_one_block_trains_with_the_budgets_it_gets(tmp_path: Path, recompute: str) -> None:
    """Its block is one unit. Recomputing it takes all of it at once, whatever its parts would need one by one."""
    report = train_report(tmp_path, "--layers", "1", "--hidden", "1024", "--steps", "2", recompute)
    assert len(report["losses"]) == 2


def test_bad_text_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("too short")
    code, output, error = call("train", "--preset", "tiny", "--data", tmp_path / "short")
    assert code == 2
    assert "too short for one sample" in error
    assert output == ""


def test_a_folder_that_cannot_hold_swap_files_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, _, error = call("train", "--preset", "tiny", "--nvme", file)
    assert code == 1
    assert str(file) in error


def test_a_trace_of_a_run_holds_every_byte_that_moved(tmp_path: Path) -> None:
    trace = tmp_path / "run.iolog"
    report = train_report(tmp_path, "--steps", "2", "--io-log", trace)
    noted = {"read": 0, "write": 0}
    for line in trace.read_text().splitlines()[1:]:
        _, _, action, *span = line.split()
        if action in noted:
            noted[action] += int(span[1])
    total = report["traffic"]["total"]
    assert noted["write"] == total["nvme_write_bytes"] + total["nvme_write_padding_bytes"]
    assert noted["read"] >= total["nvme_read_bytes"] + total["nvme_read_padding_bytes"]


def test_a_trace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    code, _, error = call("train", "--preset", "tiny", "--nvme", tmp_path, "--io-log", tmp_path / "no" / "run.iolog")
    assert code == 2
    assert "--io-log" in error
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c.toml").write_text('[nvme]\nio_log = "no/run.iolog"\n')
    code, _, error = call("train", "--preset", "tiny", "--nvme", tmp_path, "--config", tmp_path / "c.toml")
    assert code == 2
    assert "nvme.io_log" in error
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_training_outlives_its_logs(tmp_path: Path) -> None:
    arguments = ("--preset", "tiny", "--steps", "1", "--nvme", tmp_path)
    code, output, error = call("train", *arguments, "--metrics", "/dev/full", "--trace", "/dev/full")
    assert code == 0, error
    assert "--metrics /dev/full ends before step 0: [Errno 28] No space left on device. Training goes on" in error
    assert "no trace in /dev/full: No space left on device" in output


def test_a_run_that_its_wear_budget_ends_is_compared_with_as_many_plain_steps(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('[nvme]\nwear_budget = "1MB"\nwear_action = "stop"\n')
    small = ("--layers", "2", "--steps", "5", "--precision", "fp32", "--device", "cpu")
    report = train_report(tmp_path, *small, "--config", settings, "--baseline")
    assert 0 < len(report["losses"]) < 5
    assert report["baseline"]["losses"] == report["losses"]
    assert report["baseline"]["parameters_equal"] is True
