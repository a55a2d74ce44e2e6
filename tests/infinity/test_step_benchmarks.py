"""The benchmarks of a step, run small: `step_time.py` and what `peer_deepspeed.py` makes of its runs."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

import benchmarks.step_time
from benchmarks.peer_deepspeed import SIZES, differences, ratios
from benchmarks.peer_deepspeed import cases as sides_of
from benchmarks.peer_deepspeed import parse as parse_peer
from benchmarks.step_plots import page
from benchmarks.step_time import in_turns, measure, parse, with_line
from benchmarks.storage_throughput import PlainSide, Setting
from infinity.bench.arguments import duration_s


def test_cases_take_turns_and_are_noted_one_by_one() -> None:
    order: list[str] = []
    noted: list[dict[str, int]] = []

    def case(name: str) -> dict[str, float]:
        order.append(name)
        return {"step_s": float(len(order))}

    def note(found: dict[str, dict[str, dict[str, list[float]]]]) -> None:
        noted.append({name: len(figures["step_s"]["all"]) for name, figures in found.items()})

    found = in_turns(2, {"a": lambda: case("a"), "b": lambda: case("b")}, note)
    assert order == ["a", "b", "a", "b"]
    assert noted == [{"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 2}]
    assert found["a"]["step_s"] == {"median": 2.0, "min": 1.0, "max": 3.0, "all": [1.0, 3.0]}


@pytest.mark.parametrize(("seconds", "r_squared"), [([1.0], 1.0), ([1.0, 2.0, 3.0], 1.0), ([1.0, 3.0, 1.0], 0.0)])
def test_how_straight_growth_is(seconds: list[float], r_squared: float) -> None:
    sizes = {
        f"{number} M": {
            "parameters": {"median": number * 1e6},
            "step_s": {"median": step_s},
            "peak_rss_bytes": {"median": 100.0 + number},
        }
        for number, step_s in enumerate(seconds, 1)
    }
    line = with_line(sizes)["line"]
    assert line["r_squared"] == pytest.approx(r_squared)
    assert line["peak_rss_largest_over_smallest"] == pytest.approx((100 + len(seconds)) / 101)


def test_drives_from_the_command_line_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "found.json"
    shape = ["--layers", "3", "--hidden", "64", "--rounds", "1", "--steps", "2", "--read-mb", "4000"]
    budgets = ["--device-budget", "4MiB", "--host-budget", "2MiB", "--write-mb", "4000", "--precision", "fp32"]
    report = measure(parse(["drives", *shape, *budgets, "--directory", str(tmp_path), "--json", str(target)]))
    assert json.loads(target.read_text()) == report
    assert list(report["found"]) == ["1 drives", "2 drives", "3 drives"]
    assert all(figures["step_s"]["median"] > 0 for figures in report["found"].values())
    assert "3 of 3" in capsys.readouterr().out
    assert "3 drives" in page(report)
    assert [path.name for path in tmp_path.glob("*.part")] == []


def test_drives_that_nothing_lies_on_are_refused(tmp_path: Path) -> None:
    shape = ["--layers", "1", "--hidden", "64", "--rounds", "1", "--steps", "1", "--host-budget", "8MiB"]
    with pytest.raises(SystemExit, match="lower --host-budget"):
        measure(parse(["drives", *shape, "--directory", str(tmp_path)]))


def test_growth_takes_fewer_rounds_unless_told() -> None:
    assert [parse([what]).rounds for what in ("plain", "growth", "drives")] == [3, 2, 3]
    assert parse(["growth", "--rounds", "5"]).rounds == 5


def test_every_side_of_ours_beside_the_best_peer_and_memory() -> None:
    def side(tokens_per_s: float, peak_rss_bytes: float) -> dict[str, float]:
        return {"tokens_per_s": tokens_per_s, "peak_rss_bytes": peak_rss_bytes}

    sides = {
        "infinity": side(300, 1.0),
        "infinity bf16 moments": side(360, 1.0),
        "deepspeed": side(100, 2.0),
        "deepspeed pipelined": side(120, 4.0),
        "torch in memory": side(600, 5.0),
    }
    found = ratios(sides)
    assert list(found) == ["infinity", "infinity bf16 moments"]
    assert found["infinity bf16 moments"] == {
        "tokens_per_s_over_deepspeed": 3.0,
        "peak_rss_bytes_over_deepspeed": 0.25,
        "tokens_per_s_over_smallest_deepspeed": 3.6,
        "peak_rss_bytes_over_smallest_deepspeed": 0.5,
        "tokens_per_s_over_in_memory": 0.6,
        "peak_rss_bytes_over_in_memory": 0.2,
    }
    assert ratios({"infinity": side(300, 1.0)}) == {"infinity": {}}


def test_losses_are_compared_in_every_step() -> None:
    losses = {"torch in memory": [3.0, 2.0, 1.0], "infinity": [3.0, 2.5, 1.0], "deepspeed": [3.0, 2.0, 0.75]}
    assert differences(losses) == {"infinity": 0.5, "deepspeed": 0.25}
    assert differences({"infinity": [1.0]}) == {}


def test_all_formats_of_moments_and_no_checksums_are_compared(tmp_path: Path) -> None:
    options = parse_peer(["--driver", "train.py", "--python", "python", "--directory", str(tmp_path)])
    found = list(sides_of(options, SIZES["tiny"], tmp_path))
    ours = ["infinity", "infinity without checksums", "infinity bf16 moments", "infinity int8 moments"]
    assert found[: len(ours)] == ours


def test_a_ladder_adds_budgets_and_keeps_the_other_sides(tmp_path: Path) -> None:
    given = ["--driver", "train.py", "--python", "python", "--directory", str(tmp_path)]
    plain, ladder = parse_peer(given), parse_peer([*given, "--ladder", "480MiB,640MiB"])
    added = set(sides_of(ladder, SIZES["tiny"], tmp_path)) - set(sides_of(plain, SIZES["tiny"], tmp_path))
    assert added == {"infinity 480MiB", "infinity 640MiB"}


def test_folders_are_made_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, result = tmp_path / "new" / "swap", tmp_path / "results" / "found.json"
    options = parse(["plain", "--directory", str(new), "--json", str(result)])
    assert (options.directory, options.json) == (new, result)
    assert new.is_dir() and result.parent.is_dir() and not result.exists()
    (tmp_path / "file").write_text("")
    for given, why in (
        (("--directory", tmp_path / "file"), "File exists; give another folder"),
        (("--directory", tmp_path / "file" / "swap"), "Not a directory; give another folder"),
        (("--json", tmp_path), "this is a folder; give the name of a file"),
    ):
        with pytest.raises(SystemExit):
            parse(["plain", *map(str, given)])
        assert f"{given[1]}: {'cannot be made: ' if 'another' in why else ''}{why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("plain", "--rounds", "0"), "allowed: whole numbers from 1 on"),
        (("plain", "--batch", "4,x"), "allowed: whole numbers from 1 on"),
        (("growth", "--parameters", "50M,100"), "allowed: a number with K, M or B, such as 400M"),
        (("growth", "--parameters", "0M"), "allowed: a number with K, M or B, such as 400M"),
    ],
)
def test_what_no_figure_comes_of_is_refused(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...], why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(given)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_duration_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="seconds above 0"):
        duration_s(text)
    assert duration_s("0.5") == 0.5


def test_a_file_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        PlainSide(tmp_path, 1 << 60, Setting(1 << 20, 2), [])
    assert list(tmp_path.iterdir()) == []


def test_every_benchmark_makes_its_folders() -> None:
    scripts = [path.read_text() for path in Path(benchmarks.step_time.__file__).parent.glob("*.py")]
    options = re.findall(r'add_argument\(\s*"(?:--)?(?:directory|save-to|json)".*?\)\n', "".join(scripts), re.DOTALL)
    assert len(options) >= 15
    assert [option for option in options if "type=made_folder" not in option and "type=result_file" not in option] == []
