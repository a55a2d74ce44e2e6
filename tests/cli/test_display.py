"""What is shown of a step, on a terminal and elsewhere."""

from __future__ import annotations

import io
import json

from rich.console import Console

from infinity.cli.display import Display, step_line
from infinity.cli.records import StepRecord, seconds_of_a_step


def _record(step: int) -> StepRecord:
    before = {"nvme/read_bytes": 0.0, "nvme/write_bytes": 0.0, "stall/total_s": 1.0}
    after = {
        "nvme/read_bytes": 8.0 * (1 << 20),
        "nvme/write_bytes": 4.0 * (1 << 20),
        "stall/total_s": 1.25,
        "device/peak_bytes": 1024.0,
        "device/budget_bytes": 2048.0,
    }
    return StepRecord(step, 2.5, 0.75, 2.0, 512, after, before)


def test_a_line_tells_what_the_step_did() -> None:
    line = step_line(_record(7))
    assert line.startswith("step 7  loss 2.5000  norm 0.7500  2.000 s  256 tokens/s")
    assert "read 4 MiB/s  write 2 MiB/s  stalled 0.250 s" in line


def test_plain_output_has_a_line_per_step() -> None:
    console = Console(file=io.StringIO(), width=140)
    with Display(console, steps=2) as display:
        display.step(_record(0))
        display.step(_record(1))
    assert isinstance(console.file, io.StringIO)
    assert [line.split("  ")[0] for line in console.file.getvalue().splitlines()] == ["step 0", "step 1"]


def test_a_terminal_shows_tiers_and_rates() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    with Display(console, steps=2) as display:
        display.step(_record(0))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in ("1/2", "loss", "at most 1 KiB of 2 KiB", "nvme read", "4 MiB/s", "0.25 s of 2.00 s"):
        assert text in shown


def test_a_metrics_line_is_json() -> None:
    line = json.loads(json.dumps(_record(3).to_json()))
    assert line["step"] == 3
    assert line["nvme_read_bytes_per_second"] == 4 << 20


def test_the_first_step_does_not_count_for_speed() -> None:
    assert seconds_of_a_step([9.0, 1.0, 2.0]) == 1.5
    assert seconds_of_a_step([9.0]) == 9.0
