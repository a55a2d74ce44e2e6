"""What is shown of a run, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

import infinity
from infinity.cli.console import can_redraw, is_terminal
from infinity.cli.display import Display, step_line
from infinity.cli.live import LiveView, clock
from infinity.cli.records import Counters, StepRecord, seconds_of_a_step
from infinity.cli.sparks import BLOCKS, PLAIN, bar, sparkline
from infinity.cli.tables import preflight
from infinity.sizes import format_nbytes
from tests.conftest import small_config
from tests.zoo import Net, build

_MIB = float(1 << 20)


def _record(step: int, loss: float = 2.5) -> StepRecord:
    before = {"nvme/read_bytes": 0.0, "nvme/write_bytes": 0.0, "stall/total_s": 1.0, "stall/nvme_read_s": 0.8}
    after = before | {
        "nvme/read_bytes": 8.0 * _MIB,
        "nvme/write_bytes": 4.0 * _MIB,
        "stall/total_s": 1.25,
        "stall/nvme_read_s": 1.05,
    }
    return StepRecord(step, loss, 0.75, 2.0, 512, after, before)


class _Engine:
    """Counters and a clock that move as a test says."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def counters(self) -> Counters:
        return {
            "device/held_bytes": 1.0 * _MIB,
            "device/budget_bytes": 2.0 * _MIB,
            "device/peak_bytes": 2.0 * _MIB,
            "host/held_bytes": 3.0 * _MIB,
            "host/budget_bytes": 3.0 * _MIB,
            "host/peak_bytes": 3.0 * _MIB,
            "nvme/capacity_bytes": 40.0 * _MIB,
            "nvme/drive0/held_bytes": 10.0 * _MIB,
            "nvme/drive0/read_bytes": 5.0 * _MIB * self.at_s,
            "nvme/drive0/write_bytes": 3.0 * _MIB * self.at_s,
        }


def _console(width: int = 100, encoding: str = "utf-8", **options: Any) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file, width=width, legacy_windows=False, **options)


def _shown(view: LiveView, width: int, encoding: str = "utf-8") -> list[str]:
    """The lines that a terminal of this width gets."""
    console = _console(width, encoding)
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def _view(n_done: int, n_steps: int = 10) -> tuple[LiveView, _Engine]:
    engine = _Engine()
    view = LiveView(n_steps, engine.counters, ["/mnt/nvme0"], engine.now_s)
    _shown(view, 80)  # the first sample
    for step in range(n_done):
        engine.at_s += 2.0
        view.step(_record(step, loss=5.0 - step / 2))
    return view, engine


def test_a_line_tells_what_the_step_did() -> None:
    line = step_line(_record(7))
    assert line.startswith("step 7  loss 2.5000  norm 0.7500  2.000 s  256 tokens/s")
    assert "read 4 MiB/s  write 2 MiB/s  stalled 0.250 s" in line


def test_plain_output_has_a_line_per_step() -> None:
    console = Console(file=io.StringIO(), width=140)
    with Display(console, 2, dict) as display:
        display.step(_record(0))
        display.step(_record(1))
    assert isinstance(console.file, io.StringIO)
    assert [line.split("  ")[0] for line in console.file.getvalue().splitlines()] == ["step 0", "step 1"]
    assert [line.split("  ")[-1] for line in console.file.getvalue().splitlines()] == ["1 of 2", "2 of 2"]


def test_the_live_display_shows_progress_loss_tiers_drives_and_waits() -> None:
    view, _ = _view(4)
    lines = _shown(view, 120)
    assert lines[0].startswith("step 4/10 ")
    assert lines[0].endswith(" 40%  0:08 gone  0:12 left")
    assert "━" in lines[0]
    assert lines[1].startswith("loss 3.5000 █")
    assert lines[1].endswith("▁  2.000 s/step  256 tokens/s  norm 0.750")
    assert [line.split()[0] for line in lines[2:5]] == ["device", "host", "nvme"]
    assert "1 MiB of 2 MiB, at most 2 MiB" in lines[2]
    assert lines[3].count("━") == 40
    assert "10 MiB of 40 MiB" in lines[4]
    assert lines[5] == "/mnt/nvme0  read 5 MiB/s  write 3 MiB/s"
    assert lines[6] == "waited 12% of the step (0.25 s): nvme read 0.25 s"


@pytest.mark.parametrize("width", [20, 40, 59, 60, 80, 120, 200])
@pytest.mark.parametrize("n_done", [0, 1, 10])
def test_the_live_display_fits_every_width(width: int, n_done: int) -> None:
    view, _ = _view(n_done)
    lines = _shown(view, width)
    assert len(lines) >= 5
    assert max(map(cell_len, lines)) < width


def test_a_run_without_drives_has_no_bar_for_them() -> None:
    engine = _Engine()
    counters = engine.counters() | {"nvme/capacity_bytes": 0.0}
    view = LiveView(10, lambda: counters, [], engine.now_s)
    assert [line.split()[0] for line in _shown(view, 80)][2:] == ["device", "host"]


def test_nothing_is_known_before_the_first_step() -> None:
    lines = _shown(_view(0)[0], 80)
    assert "left" not in lines[0]
    assert "first step" in lines[1]


def test_the_time_left_counts_down_within_a_step_and_leaves_the_first_step_out() -> None:
    view, engine = _view(0)
    slow = StepRecord(0, 5.0, None, 100.0, 1, {}, {})
    view.step(slow)
    assert view.left_s(engine.at_s) == 900.0  # nothing else is known yet
    view.step(_record(1))
    assert view.left_s(engine.at_s) == 8 * 2.0
    assert view.left_s(engine.at_s + 1.5) == 8 * 2.0 - 1.5
    assert view.left_s(engine.at_s + 50.0) == 7 * 2.0  # the step takes longer: no more than it comes off


def test_without_unicode_it_draws_with_ascii() -> None:
    view, _ = _view(4)
    lines = _shown(view, 80, encoding="ascii")
    assert "".join(lines).isascii()
    assert "####" in lines[2]


def test_a_loss_that_is_no_number_does_not_break_the_line() -> None:
    view, _ = _view(2)
    view.step(_record(2, loss=float("nan")))
    view.step(_record(3, loss=float("inf")))
    assert _shown(view, 80)[1].startswith("loss inf ")


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([1.0, 1.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([float(n) for n in range(8)], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 8.0, 8.0], 2, "▁█"),
        ([0.0, float("nan"), 7.0], 3, "▁ █"),
        ([float("nan")], 3, " "),
        ([1.0, 2.0], 0, ""),
    ],
)
def test_sparklines(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width, BLOCKS) == expected


@pytest.mark.parametrize(("share", "full"), [(-1.0, 0), (0.0, 0), (0.001, 1), (0.5, 5), (1.0, 10), (3.0, 10)])
def test_bars(share: float, full: int) -> None:
    assert bar(share, 10, PLAIN) == "#" * full + "." * (10 - full)


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "0:00"), (83, "1:23"), (3723, "1:02:03"), (200_000, "2 d 7 h")])
def test_times(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "redraws"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "xterm", "CI": "false"}, True),
        ({"TERM": "xterm", "CI": "true"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": "unknown"}, False),
        ({}, False),
    ],
)
def test_where_the_display_can_be_drawn_anew(environment: dict[str, str], redraws: bool) -> None:
    assert can_redraw(Console(file=_Tty()), environment) == redraws
    assert not can_redraw(Console(file=io.StringIO(), force_terminal=True), environment)
    assert not can_redraw(Console(file=_Tty(), quiet=True), environment)


def test_a_closed_file_is_no_terminal(tmp_path: Path) -> None:
    file = (tmp_path / "out").open("w")
    file.close()
    assert not is_terminal(Console(file=file))


def test_a_metrics_line_is_json() -> None:
    line = json.loads(json.dumps(_record(3).to_json()))
    assert line["step"] == 3
    assert line["nvme_read_bytes_per_second"] == 4 << 20


def test_a_step_knows_what_it_waited_for() -> None:
    assert _record(0).stalls() == {"nvme_read": pytest.approx(0.25)}


def test_the_first_step_does_not_count_for_speed() -> None:
    assert seconds_of_a_step([9.0, 1.0, 2.0]) == 1.5
    assert seconds_of_a_step([9.0]) == 9.0


def test_no_figure_of_the_plan_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    console = Console(width=60, file=io.StringIO())
    with infinity.offload(build(Net), small_config(tmp_path)) as engine:
        console.print(preflight(engine.plan, accumulate=1, io_engine="direct", notes=(), is_resumed=False))
        steps = [engine.plan.expected_traffic(step, 1) for step in (0, 1)]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in output
    (told,) = [line.split() for line in output.splitlines() if line.split()[:1] == ["all"]]
    assert " ".join(told[1:]) == " ".join(
        format_nbytes(n) for one in steps for n in (one.read_nbytes, one.write_nbytes)
    )
