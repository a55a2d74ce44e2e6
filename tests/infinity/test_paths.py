"""Whatever takes a path takes text, a `Path`, and any other object that stands for a path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import infinity
from infinity.checkpoint.dcp_reader import InfinityReader
from infinity.checkpoint.dcp_writer import InfinityWriter
from infinity.migration.deepspeed import read_deepspeed
from infinity.observe.exporters import Csv, JsonLines, MetricsLog
from infinity.observe.prometheus import PrometheusFile
from infinity.report.recorder import RunRecorder
from infinity.state_dicts import get_model_state_dict
from infinity.testing import FakeGpu
from infinity.weights.importing import import_checkpoint
from storage.paths import StrPath


class Named:
    """Stands for a path and is nothing else: no `Path`, and its text is another one."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


Kind = Callable[[Path], StrPath]
KINDS = pytest.mark.parametrize("kind", [str, Path, Named], ids=["text", "Path", "PathLike"])


SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "device": {"kind": "cpu", "budget": "1MiB"},
    "host": {"budget": "400KiB"},
    "resident_threshold": 0,
}


def build() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))


@KINDS
def test_an_engine_takes_every_kind_of_path(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "swap").mkdir()
    log = tmp_path / "io.log"
    nvme = {"paths": [kind(tmp_path / "swap")], "io_log": kind(log)}
    model = build()
    with infinity.offload(model, infinity.Config(**SETTINGS, nvme=nvme)) as engine:
        optimizer = infinity.AdamW(model.parameters())
        sinks = [kind(tmp_path / f"rows.{suffix}") for suffix in ("jsonl", "csv", "prom")]
        with RunRecorder(optimizer, kind(tmp_path / "run")) as recorder, MetricsLog(engine, sinks) as metrics:
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=1.0)
            metrics.step(loss=1.0)
        engine.save(kind(tmp_path / "saved"))
        engine.load(kind(tmp_path / "saved"))
        (tmp_path / "saved" / "config.json").write_text("{}")
        engine.export(kind(tmp_path / "exported"), config=kind(tmp_path / "saved"))
        engine.trace.write_chrome(kind(tmp_path / "trace.json"))
        state = get_model_state_dict(engine)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all((tmp_path / f"rows.{suffix}").stat().st_size for suffix in ("jsonl", "csv", "prom"))
    assert (tmp_path / "run" / "run.json").is_file()
    assert log.is_file()
    assert sorted(path.name for path in (tmp_path / "exported").glob("*.json")) == ["config.json"]  # no checkpoint's
    for weights in ("saved", "exported"):
        config = infinity.Config(**SETTINGS, nvme={"paths": kind(tmp_path / "swap")})
        with infinity.offload(build(), config, weights=kind(tmp_path / weights)) as engine:
            loaded = get_model_state_dict(engine)
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())


@KINDS
def test_settings_take_every_kind_of_path(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text('precision = "bf16"')
    (tmp_path / "deepspeed.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert infinity.Config.load(kind(tmp_path / "settings.toml")).precision is infinity.Precision.BF16
    assert infinity.Config.from_deepspeed(kind(tmp_path / "deepspeed.json"), on_report=lambda report: None).stage == 3
    assert read_deepspeed(kind(tmp_path / "deepspeed.json")).config.stage == 3
    assert infinity.DeviceConfig(kind="fake", path=kind(tmp_path / "gpu")).path == tmp_path / "gpu"


@pytest.mark.filterwarnings("ignore:.*torch.distributed is (disabled|unavailable|not initialized).*")
@KINDS
def test_checkpoints_of_others_take_every_kind_of_path(kind: Kind, tmp_path: Path) -> None:
    model = torch.nn.Linear(16, 16)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    import_checkpoint(kind(tmp_path / "model.pt"), kind(tmp_path / "imported"))
    dcp.save(model.state_dict(), storage_writer=InfinityWriter(kind(tmp_path / "saved"), model), no_dist=True)
    for saved in ("imported", "saved"):
        read = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
        dcp.load(read, storage_reader=InfinityReader(kind(tmp_path / saved)), no_dist=True)
        assert all(torch.equal(value, read[name]) for name, value in model.state_dict().items())
    other = Path("elsewhere")  # what torch hands on as its `checkpoint_id`
    assert InfinityReader.validate_checkpoint_id(kind(other))
    assert InfinityWriter.validate_checkpoint_id(kind(other))


@KINDS
def test_tools_take_every_kind_of_path(kind: Kind, tmp_path: Path) -> None:
    JsonLines(kind(tmp_path / "rows.jsonl")).close()
    Csv(kind(tmp_path / "rows.csv")).close()
    PrometheusFile(kind(tmp_path / "rows.prom")).close()
    FakeGpu(kind(tmp_path / "gpu"), "64KiB").close()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "rows.csv"}


def test_a_path_of_bytes_is_no_path_of_swap_files() -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return b"/nowhere"

    assert isinstance(OfBytes(), os.PathLike)
    with pytest.raises(infinity.ConfigError, match="paths"):
        infinity.NvmeConfig(paths=OfBytes())
