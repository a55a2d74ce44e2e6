"""`infinity bench tier` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

from tests.cli.command import TIMEOUT_S, call, start

SMALL = ("--size", "32MiB", "--seconds", "0.05", "--repeats", "2")


def test_shows_figures_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    outputs = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html", "--fio-files", tmp_path / "jobs")
    code, output, error = call("bench", "tier", swap, "--profile", "seq1m", *SMALL, *outputs)
    assert code == 0, error
    for text in ("SEQ1M Q8T1", "MB/s", "MiB/s", "s/GB", "p99.9", "written to drives", "[nvme]"):
        assert text in output
    assert "…" not in output  # no figure is cut
    report = json.loads((tmp_path / "r.json").read_text())
    assert [job["job options"]["rw"] for job in report["jobs"]] == ["read", "write", "rw"]
    assert tomllib.loads(report["config"])["nvme"]["paths"] == [str(swap)]
    assert len(list((tmp_path / "jobs").glob("*.json"))) == 3
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert list(swap.iterdir()) == []


def test_brackets_in_a_directory_are_no_markup(tmp_path: Path) -> None:
    swap = tmp_path / "[b]old[" / "]"
    swap.mkdir(parents=True)
    code, output, error = call("bench", "tier", swap, "--profile", "seq1m", *SMALL, "--sustained", "96MiB")
    assert code == 0, error
    assert f"{swap},medianoftherepeats" in "".join(output.split())


def test_engines_are_compared(tmp_path: Path) -> None:
    code, output, error = call(
        "bench", "tier", tmp_path, "--profile", "seq1m", "--engines", "buffered,aiofiles,aio", *SMALL
    )
    assert code == 0, error
    assert "buffered" in output
    assert "aiofiles" in output
    assert "page cache" in output


def test_sustained_says_before_what_it_will_write(tmp_path: Path) -> None:
    code, output, error = call("bench", "tier", tmp_path, "--sustained", "96MiB")
    assert code == 0, error
    assert output.index("--sustained will write 96 MiB (100,663,296 bytes)") < output.index("where it becomes slower")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "seq9m"), "allowed: SEQ1M Q8T1"),
        (("--engines", "uring"), "allowed: direct, aio, buffered, aiofiles"),
        (("--size", "1G"), "1GiB"),
        (("--sustained", "0"), "more than nothing"),
        (("--block", "1000"), "multiples of 4096"),
        (("--compare-fio", "--block", "5000"), "multiples of 4096"),
        (("--json", "/nowhere/r.json"), "does not exist"),
        (("--size", "1EB", "--profile", "seq1m"), "larger than|cannot|unknown unit"),
        (("--size", "900TiB", "--profile", "seq1m"), "are free there"),
    ],
)
def test_bad_usage_ends_before_anything_is_written(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = call("bench", "tier", tmp_path, *arguments)
    assert code == 2
    assert any(part in error for part in message.split("|")), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [(), ("--sustained", "96MiB"), ("--compare-fio",)])
def test_a_directory_that_is_not_there(tmp_path: Path, option: tuple[str, ...]) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    code, _, error = call("bench", "tier", there, missing, "--profile", "seq1m", *SMALL, *option)
    assert code == 2
    assert f"{missing}: there is no such directory" in error
    assert list(there.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = ("--fio-files", tmp_path / "file")
    code, output, error = call("bench", "tier", tmp_path, "--profile", "seq1m", *SMALL, *files)
    assert code == 2
    assert "--fio-files" in error
    assert "SEQ1M" not in output


def test_without_fio_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, error = call("bench", "tier", tmp_path, "--compare-fio")
    assert code == 2
    assert "there is no fio on PATH" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_file_is_gone_after_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    process = start("bench", "tier", tmp_path, "--sustained", "100GiB", "--profile", "rnd4k", "--seconds", "60")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("--sustained will write")
        while process.poll() is None and not list(tmp_path.glob("*/bench.data")):
            os.sched_yield()  # until the file is there
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_no_argument_shows_help() -> None:
    code, output, _ = call("bench", "tier", "--help")
    assert code == 0
    assert "--compare-fio" in output
