"""`infinity bench calibrate`: measures, keeps, shows; and a run with that drive uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage.backends.probe import probe_direct
from storage.calibration_cache import CalibrationCache
from storage.devices import identify_device
from tests.cli.command import call


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CalibrationCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CalibrationCache()


def test_what_is_found_is_kept_and_shown(tmp_path: Path, cache: CalibrationCache) -> None:
    if problem := probe_direct(tmp_path):
        pytest.skip(problem)
    drive = tmp_path / "drive"
    drive.mkdir()
    code, output, error = call("bench", "calibrate", drive, "--json", tmp_path / "c.json")
    assert code == 0, error
    assert list(drive.iterdir()) == []
    kept = cache.find(identify_device(drive), "direct")
    assert kept is not None
    assert kept.reason in " ".join(output.split())
    assert json.loads((tmp_path / "c.json").read_text())[str(drive)]["threads"] == kept.threads


def test_what_cannot_work_is_said_first(tmp_path: Path, cache: CalibrationCache) -> None:
    code, _, error = call("bench", "calibrate", tmp_path, tmp_path / "none")
    assert code == 2
    assert "there is no such directory" in error
    code, _, error = call("bench", "calibrate", tmp_path, "--json", tmp_path / "none" / "c.json")
    assert code == 2
    assert not cache.folder.exists()


def test_a_drive_without_direct_io_is_refused(
    tmp_path: Path, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.backends.probe.probe_direct", lambda _: "it is refused")
    code, _, error = call("bench", "calibrate", tmp_path)
    assert code == 1
    assert "cannot be calibrated: it is refused" in " ".join(error.split())


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem := probe_direct(tmp_path):
        pytest.skip(problem)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, _, error = call("bench", "calibrate", tmp_path)
    assert code == 1
    assert "XDG_CACHE_HOME" in error
