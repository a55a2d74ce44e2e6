"""Settings: what is accepted, and that every mistake is a ConfigError that says what is allowed."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from infinity.config import Config, DeviceConfig, DeviceKind, HostConfig, IoEngine, NvmeConfig, Precision, Schedule
from infinity.errors import ConfigError, InfinityError
from infinity.sizes import GIB, MIB


def test_defaults() -> None:
    config = Config()
    assert (config.precision, config.stage, config.schedule) == (Precision.BF16, 3, Schedule.AUTO)
    assert config.device == DeviceConfig(kind="auto")
    assert config.device.budget is config.host.budget is config.nvme.budget is None
    assert config.host.pin is None
    assert config.nvme.paths is None
    assert config.nvme.engine is IoEngine.AUTO
    assert config.nvme.io_timeout_s == 60
    assert config.chunk is config.optimizer_threads is None
    assert config.resident_threshold == MIB
    assert config.unit_classes == ()


def test_everything_given_as_people_write_it(tmp_path: Path) -> None:
    config = Config(
        precision="fp32",
        device={
            "kind": "fake",
            "budget": "1.5GB",
            "path": str(tmp_path / "gpu"),
            "h2d_bytes_per_s": "12GB",
            "latency_s": 0,
        },
        host=HostConfig(budget="48GiB", pin=True),
        nvme={"paths": [str(tmp_path)], "budget": "1TiB", "engine": "buffered", "threads": 2, "block_nbytes": "2MiB"},
        stage=3,
        schedule="synchronous",
        chunk="64MiB",
        resident_threshold=0,
        unit_classes=[nn.TransformerEncoderLayer, "Block"],
        optimizer_threads=2,
    )
    assert config.precision is Precision.FP32
    assert config.device.kind is DeviceKind.FAKE
    assert config.device.budget == 1_500_000_000
    assert config.device.path == tmp_path / "gpu"
    assert config.device.h2d_bytes_per_s == 12_000_000_000
    assert config.nvme.paths == (tmp_path,)
    assert config.unit_classes == (nn.TransformerEncoderLayer, "Block")
    assert hash(config) == hash(copy.deepcopy(config))
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_tilde_is_the_users_home_and_no_folder_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = Config(nvme={"paths": ["~/a", Path("~/b")], "io_log": "~/log"}, device={"kind": "fake", "path": "~/gpu"})
    assert config.nvme.paths == (tmp_path / "a", tmp_path / "b")
    assert (config.nvme.io_log, config.device.path) == (tmp_path / "log", tmp_path / "gpu")
    with pytest.raises(ConfigError, match="listed twice"):
        Config(nvme={"paths": ["~/a", tmp_path / "a"]})


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Config(devic={}), ["devic = {}: unknown setting", "did you mean 'device'", "unit_classes"]),
        (lambda: Config(host_budget="1GiB"), ["did you mean host={'budget': ...}?", "schedule"]),
        (lambda: Config(nvme_path="/x"), ["did you mean nvme={'paths': ...}?"]),
        (lambda: Config(device={"budgt": 1}), ["device.budgt = 1: unknown", "did you mean 'budget'", "latency_s"]),
        (lambda: Config(zzzzzz=1), ["zzzzzz", "allowed: precision, device"]),
        (lambda: Config(schedule="defered"), ["schedule = 'defered': did you mean 'deferred'?", "'overlapped'"]),
        (lambda: Config(precision="bf17"), ["did you mean 'bf16'"]),
        (lambda: Config(precision=16), ["precision = 16: allowed: 'fp32', 'bf16'"]),
        (lambda: Config(device=3), ["device", "DeviceConfig"]),
        (lambda: Config(device=HostConfig()), ["device", "DeviceConfig"]),
        (lambda: Config(device={"budget": "20G"}), ["device.budget = '20G'", "20GiB or 20GB"]),
        (lambda: Config(chunk=0), ["chunk = 0", "greater than 0"]),
        (lambda: Config(stage=True), ["stage = True: allowed: 1, 2, 3"]),
        (lambda: Config(stage=4), ["stage = 4: allowed: 1, 2, 3"]),
        (lambda: Config(host={"pin": 1}), ["host.pin = 1", "boolean"]),
        (lambda: Config(nvme={"threads": "3"}), ["nvme.threads = '3'", "integer"]),
        (lambda: Config(nvme={"threads": 0}), ["nvme.threads = 0"]),
        (lambda: Config(nvme={"checksum": "crc32"}), ["nvme.checksum = 'crc32'", "'xxh3', 'none'"]),
        (lambda: Config(nvme={"calibrate": True}), ["nvme.calibrate = True", "'cached', 'missing', 'off'"]),
        (lambda: Config(nvme={"eio_retries": -1}), ["nvme.eio_retries = -1"]),
        (lambda: Config(nvme={"paths": []}), ["nvme.paths = []", "at least one"]),
        (lambda: Config(nvme={"paths": [""]}), ["nvme.paths = ['']"]),
        (lambda: Config(nvme={"paths": ["/a", "/a/"]}), ["listed twice"]),
        (lambda: Config(nvme={"paths": ["~nobody-of-this-name/a"]}), ["~nobody-of-this-name/a", "write it out"]),
        (lambda: Config(nvme={"block_nbytes": 1000}), ["nvme: block_nbytes = 1000", "4096"]),
        (lambda: Config(nvme={"io_timeout_s": 0}), ["nvme.io_timeout_s = 0"]),
        (lambda: Config(nvme={"io_timeout_s": float("inf")}), ["nvme.io_timeout_s = inf"]),
        (lambda: Config(nvme={"io_timeout_s": "60"}), ["nvme.io_timeout_s = '60'"]),
        (lambda: Config(unit_classes=3), ["unit_classes = 3", "module classes or their names"]),
        (lambda: Config(device={"kind": "cpu", "path": "/x", "latency_s": 1}), ["path, latency_s", "kind='fake'"]),
        (lambda: DeviceConfig(latency_s=0.5), ["latency_s", "kind='auto'"]),
        (lambda: NvmeConfig(engin="direct"), ["engin = 'direct'", "did you mean 'engine'"]),
        (lambda: Config().with_(stge=2), ["stge = 2", "did you mean 'stage'"]),
        (lambda: Config().with_(host={"pinn": True}), ["host.pinn", "did you mean 'pin'"]),
        (lambda: setattr(Config(), "stage", 2), ["stage = 2", "frozen", ".with_(stage=...)"]),
    ],
)
def test_mistakes(build: Callable[[], Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert isinstance(caught.value, InfinityError)
    for part in expected:
        assert part in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="3 settings are wrong") as caught:
        Config(precision="x", device={"budget": -1}, nvme={"thread": 1})
    lines = str(caught.value).splitlines()
    assert [line.split(" ")[2] for line in lines[1:]] == ["precision", "device.budget", "nvme.thread"]


def test_with_keeps_what_is_not_named() -> None:
    config = Config(precision="fp32", device={"kind": "cpu", "budget": "2GiB"})
    changed = config.with_(device={"budget": "1GiB"}, stage=3, host=HostConfig(pin=False))
    assert changed.device == DeviceConfig(kind="cpu", budget=GIB)
    assert changed.precision is Precision.FP32
    assert changed.host.pin is False
    assert config.device.budget == 2 * GIB
    assert config.with_() == config


def test_describe_shows_every_setting_and_marks_defaults() -> None:
    text = Config(
        device={"kind": "fake", "budget": "20GiB", "h2d_bytes_per_s": "1GiB"}, unit_classes=[nn.Linear]
    ).describe()
    lines = text.splitlines()
    assert "device.budget = 20 GiB" in lines
    assert "device.h2d_bytes_per_s = 1 GiB/s" in lines
    assert "host.budget = unset  (default)" in lines
    assert "unit_classes = Linear" in lines
    assert "nvme.block_nbytes = unset  (default)" in lines
    nested = {name: type(getattr(Config(), name)) for name in ("device", "host", "nvme", "activations")}
    expected = len(Config.model_fields) - len(nested) + sum(len(section.model_fields) for section in nested.values())
    assert len(lines) == expected


TOML = """
precision = "fp32"
unit_classes = ["Block"]
[device]
kind = "cpu"
budget = "1GiB"
[nvme]
paths = ["/a", "/b"]
"""


def test_load_toml_and_json_agree(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    settings = {
        "precision": "fp32",
        "unit_classes": ["Block"],
        "device": {"kind": "cpu", "budget": "1GiB"},
        "nvme": {"paths": ["/a", "/b"]},
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    assert Config.load(tmp_path / "run.toml") == Config.load(str(tmp_path / "run.json")) == Config(**settings)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", '[device]\nbudgt = "1GiB"', ["device.budgt", "did you mean 'budget'"]),
        ("a.toml", "[device\nx = 1", ["not valid TOML", "line 1"]),
        ("a.json", "{", ["not valid JSON", "line 1"]),
        pytest.param("a.json", "[" * 100_000, ["not valid JSON", "recursion"], id="nested too deep"),
        ("a.json", "[1]", ["holds list"]),
        ("a.yaml", "", ["allowed: .toml, .json"]),
        ("a.json", None, ["cannot be read: No such file"]),
    ],
)
def test_load_names_file_and_key(tmp_path: Path, name: str, text: str | None, expected: list[str]) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert str(caught.value).startswith(str(path))
    for part in expected:
        assert part in str(caught.value)


def test_load_reports_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(tmp_path / "a.toml")
