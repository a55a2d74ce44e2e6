"""`infinity train` on a terminal, and the library beside the progress bars of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

import infinity
from tests.cli.screen import Screen, Terminal
from tests.conftest import small_config
from tests.zoo import Net, batch, build, loss_of

LONG = ("--steps", "100000")


def train(folder: Path, *arguments: str, columns: int = 80, **environment: str) -> Terminal:
    """A run of the smallest preset that somebody looks at."""
    command = ("-m", "infinity", "train", "--preset", "tiny", "--device", "cpu", "--nvme", folder, *arguments)
    return Terminal(*command, columns=columns, environment=environment)


def frames(output: str) -> list[str]:
    """What was drawn, without colours, each drawing by itself."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    return re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)+", plain)


@pytest.mark.slow
def test_the_display_follows_the_window_and_ctrl_c_gives_the_cursor_back(tmp_path: Path) -> None:
    with train(tmp_path, *LONG, columns=110) as terminal:
        terminal.read_until(lambda: "tokens/s" in terminal.output)
        assert not terminal.screen.has_cursor
        assert any(len(line) > 80 for line in frames(terminal.output)[-1].splitlines())
        terminal.resize(50)
        seen = len(terminal.output)
        terminal.read_until(lambda: len(frames(terminal.output[seen:])) > 6)
        narrow = frames(terminal.output[seen:])[3:-1]  # those under way when the size changed are left out
        assert max(len(line) for frame in narrow for line in frame.splitlines()) < 50
        for name in ("loss", "device", "host", "nvme", "waited"):
            assert all(f"\n{name}" in frame for frame in narrow)
        terminal.press("\x03")
        code = terminal.read_to_end()
    assert code == 130
    assert terminal.screen.has_cursor
    assert "stopped: swap files, threads and memory have been given back" in terminal.output
    assert "Traceback" not in terminal.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_whole_run_leaves_one_display_and_the_summary(tmp_path: Path) -> None:
    with train(tmp_path, "--steps", "12", columns=120) as terminal:
        assert terminal.read_to_end() == 0
    lines = terminal.screen.lines
    assert terminal.screen.has_cursor
    assert sum(line.startswith("step ") and "12/12" in line for line in lines) == 1
    assert sum(line.startswith("loss ") for line in lines) == 1
    assert any("Summary" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}], ids=str)
def test_where_nothing_can_be_drawn_anew_there_is_a_line_per_step(tmp_path: Path, environment: dict[str, str]) -> None:
    with train(tmp_path, "--steps", "3", **environment) as terminal:
        assert terminal.read_to_end() == 0
    assert "\x1b[1A" not in terminal.output
    assert "\x1b[?25l" not in terminal.output
    assert len(re.findall(r"^step \d  loss", terminal.output, re.MULTILINE)) == 3


@pytest.mark.slow
def test_without_colours_the_display_is_the_same_text(tmp_path: Path) -> None:
    with train(tmp_path, "--steps", "3", NO_COLOR="1") as terminal:
        assert terminal.read_to_end() == 0
    assert "━" in terminal.output
    assert re.findall(r"\x1b\[[\d;]*3[0-7]m", terminal.output) == []


def test_the_screen_of_these_tests_does_what_is_written() -> None:
    screen = Screen()
    screen.feed("one\r\ntwo\r\nthree\x1b[?25l")
    screen.feed("\r\x1b[2K\x1b[1A\x1b[2K2\r\n\x1b[32m3\x1b[0m")
    assert (screen.lines, screen.has_cursor) == (["one", "2", "3"], False)


def test_the_library_writes_nothing_between_the_progress_bars_of_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for number in tqdm(range(4), desc="mine", ascii=True, mininterval=0.0):
            loss_of(model, batch(number)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        engine.metrics()
        engine.report()
        with torch.no_grad():
            model(batch(0))
        engine.save(tmp_path / "saved", optimizer=optimizer)
    output, error = capfd.readouterr()
    assert output == ""
    assert all(part.startswith("mine: ") for part in re.split(r"[\r\n]+", error) if part)
