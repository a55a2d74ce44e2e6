"""Bad usage: exit code 2, one readable message, nothing left behind."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from infinity.cli import bench, main
from infinity.cli.bench_options import StepOptions, TierArguments
from infinity.cli.failures import reported
from infinity.cli.files import check_files
from infinity.cli.plan_options import PlanOptions
from infinity.cli.train_options import TrainOptions
from infinity.errors import ConfigError, PlacementError, UnsupportedModelError
from tests.cli.command import ROOT, call, run
from tests.mounts import mounting


def test_help_names_every_command_and_option() -> None:
    code, output, _ = call("--help")
    assert code == 0
    assert "train" in output and "clean" in output
    code, output, _ = call("train", "--help")
    assert code == 0
    for option in ("preset", "layers", "data", "precision", "nvme", "baseline", "json", "resume", "durability"):
        assert f"--{option}" in output


@pytest.mark.parametrize(
    ("command", "options"),
    [("train", TrainOptions), ("plan", PlanOptions), ("bench tier", TierArguments), ("bench step", StepOptions)],
)
def test_every_field_is_an_option_with_help_and_every_command_has_an_example(command: str, options: type) -> None:
    code, output, _ = call(*command.split(), "--help")
    assert code == 0
    assert f"infinity {command} " in output
    for field in fields(options):
        if field.name != "paths":
            assert f"--{field.name.replace('_', '-')}" in output
    callbacks = [c.callback for app in (main.app, bench.app) for c in app.registered_commands]
    (chosen,) = [c for c in callbacks if c is not None and c.__name__ == command.split()[-1]]
    parameters = inspect.signature(chosen).parameters
    assert list(parameters) == [*(field.name for field in fields(options)), "debug"]
    assert all(parameter.annotation.__metadata__[0].help for parameter in parameters.values())


def test_options_arrive_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainOptions] = []
    monkeypatch.setattr("infinity.cli.train.train", seen.append)
    assert call("train", "--nvme", "a", "--nvme", "b", "--no-recompute", "--clip", "0.5", "--baseline")[0] == 0
    assert call("train")[0] == 0
    nvme = (Path("a"), Path("b"))
    assert seen == [TrainOptions(nvme=nvme, recompute=False, clip=0.5, baseline=True), TrainOptions()]


def test_python_m_infinity_shows_the_version() -> None:
    code, output, _ = run("--version")
    assert code == 0
    assert output.startswith("infinity ")


def test_help_does_not_import_torch() -> None:
    program = "import sys, infinity.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=200).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "allowed: tiny, small"),
        (["--precision", "fp8"], "allowed: 'fp32', 'bf16'\n"),
        (["--device", "tpu"], "allowed: 'auto', 'cpu'"),
        (["--host-budget", "20G"], "did you mean 20GiB"),
        (["--hidden", "100", "--heads", "3"], "multiple of heads"),
        (["--durability", "step"], "add --nvme DIR"),
        (["--save", "/dev/null"], "--save /dev/null is there and is not a checkpoint"),
        (["--save", "/dev/null/run"], "nothing can be written in /dev/null"),
        (["--durability", "checkpoint"], "add --save DIR"),
        (["--durability", "always"], "allowed: 'none', 'checkpoint', 'step'"),
        (["--schedule", "overlapped", "--accumulate", "2"], "contradicts --accumulate"),
        (["--schedule", "overlapped", "--clip", "1"], "contradicts --clip"),
        (["--clip", "0"], "greater than 0"),
        (["--batch", "999999999"], "activations of 999999999 x"),
        (["--batch", "9" * 60, "--micro-batches", "9"], "Take a smaller --batch"),
        (["--io-timeout", "0"], "io_timeout_s"),
        (["--config", "missing.toml"], "cannot be read"),
        (["--data", "missing"], "no such file"),
        (["--json", "missing/report.json"], "does not exist"),
        (["--trace", "."], "this is a folder"),
        (["--resume", "missing"], "--resume missing: there is no such folder"),
        (["--resume", "/dev"], "neither a checkpoint nor a run with durable steps is there"),
        (["--resume", "/dev/null"], "neither a checkpoint nor a run with durable steps is there"),
    ],
)
def test_says_what_is_wrong(arguments: list[str], message: str) -> None:
    code, _, error = call("train", "--preset", "tiny", *arguments)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("first", "second"),
    [("--json", "--trace"), ("--metrics", "--json"), ("--io-log", "--metrics"), ("--trace", "--scheduler-trace")],
)
def test_two_options_cannot_write_one_file(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "link").symlink_to("file")
    code, _, error = call("train", "--preset", "tiny", first, tmp_path / "file", second, tmp_path / "link")
    assert code == 2
    assert f"{first} writes it" in error or f"{second} writes it" in error
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("option", ["--config", "--data"])
def test_what_is_read_is_not_overwritten(tmp_path: Path, option: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('precision = "fp32"\n' + "# text\n" * 200)
    code, _, error = call("train", "--preset", "tiny", "--steps", "1", option, file, "--json", file)
    assert code == 2
    assert f"--json {file}: it is read, and would be lost" in error
    assert file.read_text().startswith("precision")


def test_a_settings_file_that_is_migrated_stays(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}}')
    code, _, error = call("migrate", file, "--write", tmp_path / "." / "ds.json")
    assert code == 2
    assert "would be lost" in error
    assert file.read_text() == '{"bf16": {"enabled": true}}'


def test_a_result_goes_into_a_pipe(tmp_path: Path) -> None:
    """Standard output, or what a shell makes of >(...): the link in /proc leads to no path."""
    code, output, error = run("clean", tmp_path, "--json", "/dev/stdout")
    assert (code, error) == (0, "")
    assert json.loads(output[output.index("{") :]) == {"removed": [], "left": []}


def test_devices_take_what_several_options_write() -> None:
    check_files(json=Path("/dev/null"), trace=Path("/dev/null"))


def test_a_place_that_takes_no_files_is_told_before_anything_runs(tmp_path: Path) -> None:
    """A file system without write access: also root gets to know of it before a run that takes hours."""
    with mounting(tmp_path) as make_file_system:
        place = make_file_system("ext4", options="ro")
        with pytest.raises(ConfigError, match=r"--json .*: nothing can be written there"):
            check_files(json=place / "run.json")


def test_infinity_is_refused(tmp_path: Path) -> None:
    code, _, error = call("train", "--preset", "tiny", "--steps", "1", "--nvme", tmp_path, "--lr", "inf")
    assert code == 2
    assert "--lr inf: it must be a finite number" in error
    code, _, error = call("bench", "tier", tmp_path, "--profile", "seq1m", "--size", "32MiB", "--seconds", "inf")
    assert code == 2
    assert "--seconds inf: it must be a finite number" in error


@pytest.mark.parametrize(
    "arguments",
    [["--steps", "0"], ["--batch", "many"], ["--seed", str(1 << 63)], ["--no-such-option"], ["extra"]],
)
def test_refuses_what_it_cannot_parse(arguments: list[str]) -> None:
    code, _, _ = call("train", *arguments)
    assert code == 2


def test_shows_a_traceback_when_asked() -> None:
    code, _, error = call("train", "--preset", "huge", "--debug")
    assert code == 2
    assert "Traceback" in error and "error:" in error


@pytest.mark.parametrize(("option", "tier"), [("--host-budget", "host"), ("--device-budget", "device")])
def test_impossible_budgets_are_refused_with_the_arithmetic(tmp_path: Path, option: str, tier: str) -> None:
    code, _, error = call("train", "--preset", "tiny", "--nvme", tmp_path, option, "64KiB")
    assert code == 2
    assert f"smallest {tier} budget that works" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [(PlacementError("small"), 2), (UnsupportedModelError("odd"), 1)])
def test_exit_codes_of_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr("infinity.cli.train.train", fail)
    assert call("train")[0] == code


def test_a_setting_file_is_read_and_options_go_before_it(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('precision = "bf16"\n[host]\nbudget = "1KiB"\n')
    code, _, error = call("train", "--preset", "tiny", "--config", settings)
    assert code == 2
    assert "host budget of 1 KiB" in error
    for named, message in (("fp8", "precision = 'fp8': allowed: 'fp32', 'bf16'\n"), ("fp16", "needs a loss scale")):
        settings.write_text(f'precision = "{named}"\n')
        code, _, error = call("train", "--preset", "tiny", "--config", settings)
        assert code == 2
        assert str(settings) in error and message in error
    settings.write_text('precision = "fp16"\n[host]\nbudget = "1KiB"\n')
    code, _, error = call("train", "--preset", "tiny", "--config", settings, "--precision", "bf16")
    assert code == 2
    assert "host budget of 1 KiB" in error
    settings.write_text("[hosts]\nbudget = 1\n")
    code, _, error = call("train", "--preset", "tiny", "--config", settings)
    assert code == 2
    assert "did you mean 'host'" in error


def test_the_shell_completes_commands() -> None:
    asked = {"_INFINITY_COMPLETE": "complete_bash", "COMP_WORDS": "infinity mig", "COMP_CWORD": "1"}
    installed = Path(sys.executable).parent / "infinity"
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | asked
    done = subprocess.run([installed], env=environment, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "migrate"


@pytest.mark.timeout(60)
def test_an_error_whose_causes_go_round_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(typer.Exit), reported(debug=False):
        raise first
    assert capsys.readouterr().err.count("first") == 1
