"""Checkpoints in a series: the latest one that can be read is loaded, whatever has happened to those after it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.checkpoint.format import VERSION, checksum
from tests.conftest import small_config
from tests.infinity.test_checkpoint_damage import DAMAGES, GROUP, change, flip
from tests.resume import Run
from tests.zoo import Net

MakeEngine = Callable[..., infinity.Engine]


def rewritten(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the index and make its checksum right again: a bug of the program that wrote it."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    edit(content)
    path.write_text(json.dumps({**content, "checksum": checksum(json.dumps(content, sort_keys=True).encode())}))


def _pieces(content: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = content["parameters"]["blocks.1.up.weight"]["tensors"]["exp_avg"]
    return found


_DIGEST = r"is damaged: bytes \d+ to \d+ of '\S+' (and bytes \d+ to \d+ of '\S+' )*have the wrong checksum"
CONTENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped bit of a parameter": (lambda f: change(f / GROUP, lambda d: flip(d, 4096)), _DIGEST),
    "flipped bit of a moment": (lambda f: change(f / GROUP, lambda d: flip(d, len(d) - 3000)), _DIGEST),
    "zeroed page": (lambda f: change(f / GROUP, lambda d: d.__setitem__(slice(4096, 8192), bytes(4096))), _DIGEST),
    "lost piece": (lambda f: rewritten(f, lambda c: _pieces(c).clear()), "exp_avg of 'blocks.1.up.weight' has 1961 el"),
    "piece of nothing": (
        lambda f: rewritten(f, lambda c: _pieces(c)[0].update(at=1 << 40)),
        "exp_avg of 'blocks.1.up.weight' is not what the index says",
    ),
    "piece of another file": (lambda f: rewritten(f, lambda c: _pieces(c)[0].update(file="x")), "of which 0 are there"),
    "no parameters": (lambda f: rewritten(f, lambda c: c.pop("parameters")), "does not have the expected content"),
}
EVERY = DAMAGES | CONTENT


class Saved:
    """A series of two checkpoints, one step apart, an engine to load them with, and what follows the first."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(lambda model: infinity.offload(model, small_config(folder, host={"budget": "300KiB"})), Net)
        self.series = folder / "series"
        self.run.train(0, 1)
        self.run.engine.save(self.series / "step1", scheduler=self.run.scheduler, keep=3)
        self.losses = self.run.train(1, 2)
        self.run.engine.save(self.series / "step2", scheduler=self.run.scheduler, keep=3)

    def load(self, path: Path) -> None:
        self.run.engine.load(path, optimizer=self.run.optimizer, scheduler=self.run.scheduler)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    made = Saved(tmp_path_factory.mktemp("saved"))
    yield made
    made.run.engine.close()


def test_there_are_more_than_twenty() -> None:
    assert len(EVERY) > 20
    assert VERSION == 3


@pytest.mark.parametrize("name", EVERY)
def test_damaged_it_is_refused_and_the_one_before_is_loaded(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    damage, message = EVERY[name]
    series = tmp_path / "series"
    shutil.copytree(saved.series, series)
    damage(series / "step2")
    with pytest.raises(infinity.CheckpointError, match=message) as caught:
        saved.load(series / "step2")
    assert str(series) in str(caught.value)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        saved.load(series)
    assert f"The checkpoint before it is tried: {series / 'step1'}" in caplog.text
    assert str(caught.value) in caplog.text
    assert saved.run.train(1, 2) == saved.losses


def test_the_latest_is_loaded(saved: Saved, tmp_path: Path) -> None:
    saved.load(saved.series)
    later = saved.run.train(2, 3)
    saved.load(saved.series / "step2")
    assert saved.run.train(2, 3) == later


def test_all_damaged(saved: Saved, tmp_path: Path) -> None:
    series = tmp_path / "series"
    shutil.copytree(saved.series, series)
    for name in ("step1", "step2"):
        (series / name / GROUP).unlink()
    with pytest.raises(infinity.CheckpointError, match=r"can be loaded, of 2; the latest: .*step2.*file is missing"):
        saved.load(series)
    (series / "latest").write_text('{"kind": "infinity checkpoints", "checkpoints": ["../step1"]}')
    with pytest.raises(infinity.CheckpointError, match="latest is damaged: it does not name checkpoints"):
        saved.load(series)
    (series / "latest").write_text("{")
    with pytest.raises(infinity.CheckpointError, match="latest is damaged: "):
        saved.load(series)
    saved.load(saved.series)


def test_another_model_is_no_reason_to_go_back(offload: MakeEngine, saved: Saved) -> None:
    engine = offload(Net(blocks=3))
    with pytest.raises(infinity.CheckpointError, match=r"step2 belongs to another model: it has 'blocks\.3"):
        engine.load(saved.series)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_old_ones_are_removed(offload: MakeEngine, tmp_path: Path, wait: bool) -> None:
    engine = offload(Net(), host={"budget": "16MiB"})
    series = tmp_path / "series"
    series.mkdir()
    (series / "step0").mkdir()  # nothing of ours
    for step in range(1, 6):
        engine.save(series / f"step{step}", keep=2, wait=wait)
    engine.wait_saved()
    assert names(series) == ["latest", "step0", "step4", "step5"]
    engine.save(series / "step4", keep=2, wait=wait)  # again: it is the newest now
    engine.wait_saved()
    assert json.loads((series / "latest").read_text())["checkpoints"] == ["step5", "step4"]
    engine.save(series / "step6", keep="all", wait=wait)
    engine.save(series / "apart")
    engine.wait_saved()
    assert names(series) == ["apart", "latest", "step0", "step4", "step5", "step6"]
    engine.save(series / "step7", keep=1, wait=wait)
    engine.wait_saved()
    assert names(series) == ["apart", "latest", "step0", "step7"]
    (series / "latest").write_text("{")
    engine.save(series / "step8", keep=1)
    assert names(series) == ["apart", "latest", "step0", "step7", "step8"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "none"])
def test_what_cannot_be_kept(offload: MakeEngine, tmp_path: Path, keep: Any) -> None:
    engine = offload(Net())
    with pytest.raises(infinity.ConfigError, match=r"keep is .*; allowed: a number of checkpoints from 1 on"):
        engine.save(tmp_path / "saved", keep=keep)
