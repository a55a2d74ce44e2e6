"""`infinity plan`, as a user types it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from infinity.sizes import GIB
from tests.cli.command import call
from tests.infinity import chrome_format

SMALL = ("--preset", "350m", "--gpu", "rtx4090", "--host-memory", "6GiB", "--drive", "3.0:1.5:1TB:600TBW")
FEW_LAYERS = (*SMALL, "--layers", "4")  # where the model makes no difference: a quarter of a second instead of two


def plan_report(folder: Path, *arguments: str) -> dict[str, Any]:
    target = folder / "plan.json"
    code, _, error = call("plan", *arguments, "--json", target)
    assert code == 0, error
    report: dict[str, Any] = json.loads(target.read_text())
    return report


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report of a plan with advice, and what was shown."""
    target = tmp_path_factory.mktemp("planned") / "plan.json"
    code, output, error = call("plan", *SMALL, "--json", target)
    assert code == 0, error
    return json.loads(target.read_text()), output


def test_a_plan_shows_fit_traffic_time_and_wear(planned: tuple[dict[str, Any], str]) -> None:
    report, output = planned
    for words in ("Where everything lies", "NVMe bytes of a step", "lower bound", "(binds)", "Wear", "What to change"):
        assert words in output
    prediction = report["prediction"]
    assert prediction["step_seconds"] >= prediction["bound_seconds"] == max(prediction["bounds"].values())
    assert {"what", "fits"} <= set(report["changes"][0])
    wear = report["wear"][0]
    (written,) = report["traffic"]["nvme_write_bytes_per_drive"]
    assert wear["steps_to_rating"] == pytest.approx(600e12 / written, rel=0.01)


def test_the_same_options_give_the_same_bytes(tmp_path: Path) -> None:
    texts = set()
    for number in range(2):
        files = [tmp_path / f"{number}.{kind}" for kind in ("json", "html", "trace")]
        options = [text for file in files for text in (f"--{file.suffix[1:]}", file)]
        code, _, error = call("plan", *FEW_LAYERS, *options)
        assert code == 0, error
        texts.add(tuple(file.read_bytes() for file in files))
    assert len(texts) == 1


def test_the_page_needs_no_network_and_the_trace_has_every_lane(tmp_path: Path) -> None:
    call("plan", *SMALL, "--no-advice", "--html", tmp_path / "p.html", "--trace", tmp_path / "p.trace")
    page = (tmp_path / "p.html").read_text()
    assert "<script src" not in page
    assert "Plotly.react" in page
    trace = json.loads((tmp_path / "p.trace").read_text())
    chrome_format.check(trace)
    events = trace["traceEvents"]
    assert chrome_format.overlaps(events) == []
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"compute", "h2d", "d2h", "optimizer", "nvme read", "nvme write"} <= lanes


def test_budgets_of_ranks_are_told_as_such(tmp_path: Path) -> None:
    for gpus, told in (("1", "is the smallest that works"), ("2", "of each rank, for which 928 KiB is the smallest")):
        code, output, error = call("plan", "--preset", "tiny", "--gpus", gpus, "--no-advice")
        assert code == 0, error
        assert told in " ".join(output.split())
        assert ("for the 2 on this machine 1.82 MiB" in " ".join(output.split())) == (gpus == "2")


def test_more_of_what_binds_is_faster(tmp_path: Path) -> None:
    slow = plan_report(tmp_path, *SMALL[:-1], "0.1:0.1", "--no-advice")
    fast = plan_report(tmp_path, *SMALL[:-1], "2x0.1:0.1", "--no-advice")
    assert slow["prediction"]["binding"] == "nvme"
    assert fast["prediction"]["step_seconds"] < 0.6 * slow["prediction"]["step_seconds"]


def test_what_does_not_fit_is_refused_with_the_nearest_plan_that_works(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    code, _, error = call("plan", "--preset", "7b", "--batch", "64", "--host-memory", "64GiB", "--json", target)
    assert code == 2
    assert "Use a smaller batch" in error
    assert "the nearest plan that works: --batch 32" in error
    report = json.loads(target.read_text())
    assert report["fits"] is False
    assert report["nearest"]["fits"] is True


def test_the_reserve_of_host_memory_is_told_and_the_least_memory_works() -> None:
    few = ("plan", "--preset", "tiny", "--no-advice", "--host-memory")
    code, _, error = call(*few, "3GiB")
    assert code == 2
    told = " ".join(error.split())
    assert "of 3 GiB of host memory 4 GiB are kept for the system, the interpreter and libraries" in told
    found = re.search(r"the smallest that works: --host-memory ([\d.]+)([KMG]iB)", told)
    assert found is not None
    assert found[2] == "GiB" and 4 < float(found[1]) < 5
    assert found[0].endswith(found[1] + found[2])  # to be pasted
    code, _, error = call(*few, found[1] + found[2])
    assert code == 0, error


def test_the_device_of_a_cpu_has_a_share_of_the_memory_given(tmp_path: Path) -> None:
    few = ("--preset", "tiny", "--no-advice", "--gpu", "cpu")
    report = plan_report(tmp_path, *few, "--host-memory", "8GiB")
    assert report["placement"]["budgets"]["device"] + report["placement"]["budgets"]["host"] <= 8 * GIB
    report = plan_report(tmp_path, *few, "--host-memory", "8GiB", "--device-memory", "3GiB")
    assert 2 * GIB < report["placement"]["budgets"]["device"] + GIB <= 3 * GIB


def test_smaller_state_is_advised_where_a_format_exists(planned: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    advised = {change["what"]: change for change in planned[0]["changes"]}
    smaller = [f"--state-format {name} (moments are rounded)" for name in ("bf16", "int8")]
    assert all(advised[what]["gain"] > 1 for what in smaller)
    for option in (("--precision", "fp32"), ("--state-format", "int8")):
        other = plan_report(tmp_path, *FEW_LAYERS, *option)["changes"]
        assert other
        assert not any("--state-format" in change["what"] for change in other)


def test_stages_are_compared(tmp_path: Path) -> None:
    arguments = ("--layers", "4", "--hidden", "64", "--gpus", "8", "--nodes", "8", "--stages")
    report = plan_report(tmp_path, *arguments)
    names = [row["name"] for row in report["stages"]]
    assert names == ["data parallel", "stage 1", "stage 2", "stage 3", "stage 3, host", "stage 3, NVMe"]
    assert report["stages"][0]["device_nbytes"] == pytest.approx(64 * report["stages"][3]["device_nbytes"])


def test_a_sweep_gives_a_table_and_a_plot(tmp_path: Path) -> None:
    report = plan_report(tmp_path, *SMALL, "--sweep", "host-memory=6GiB..24GiB", "--html", str(tmp_path / "sweep.html"))
    steps = [point["step_seconds"] for point in report["sweep"]["points"]]
    assert len(steps) == 3
    assert steps == sorted(steps, reverse=True)
    assert "Plotly.react" in (tmp_path / "sweep.html").read_text()


def test_a_search_ranks_plans(tmp_path: Path) -> None:
    report = plan_report(tmp_path, *FEW_LAYERS, "--batch", "4", "--search")
    steps = [row["step_seconds"] for row in report["search"] if row["fits"]]
    assert len(steps) >= 6
    assert steps == sorted(steps)


@pytest.mark.slow
def test_a_cluster_of_64_nodes_and_ten_trillion_parameters_is_planned(tmp_path: Path) -> None:
    cluster = ("--gpu", "h100", "--gpus", "8", "--nodes", "64", "--host-memory", "2TiB", "--drive", "8x6.5:3.4")
    model = ("--layers", "780", "--hidden", "32768", "--heads", "256", "--seq", "256", "--batch", "1")
    report = plan_report(tmp_path, *model, *cluster, "--no-advice")
    assert report["model"]["parameters"] > 9.9e12
    assert report["workload"]["ranks"] == 512
    assert report["placement"]["nvme_bytes_per_node"] == 8 * report["placement"]["nvme_bytes"]
    assert report["prediction"]["bounds"]["all-gather"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "rtx9090"), "allowed: rtx3090"),
        (("--drive", "fast"), "allowed: READ:WRITE"),
        (("--preset", "8b"), "unknown; allowed"),
        (("--precision", "fp8"), "allowed: fp32, bf16"),
        (("--schedule", "overlapped", "--accumulate", "2"), "contradicts"),
        (("--schedule", "overlapped", "--precision", "fp16"), "contradicts"),
        (("--batch", "2", "--micro-batches", "4"), "cannot be cut"),
        (("--host-memory", "lots"), "cannot read"),
        (("--sweep", "colour=1..2"), "NAME one of"),
        (("--sweep", "drives=4..1"), "not above the last"),
        (("--stages", "--html", "page.html"), "leave out --stages"),
        (("--search", "--trace", "t.json"), "--trace shows one step"),
        (("--json", "no/such/folder/plan.json"), "a folder that exists"),
        (("--dram", "-1"), "greater than 0"),
        (("--dram", "nan"), "greater than 0"),
        (("--dram", "inf"), "greater than 0"),
        (("--network", "1e308"), "greater than 0"),
        (("--link", "0"), "greater than 0"),
        (("--efficiency", "nan"), "--efficiency"),
        (("--device-memory", "0"), "greater than 0"),
        (("--host-memory", "0B"), "greater than 0"),
        (("--drive", "nan:nan"), "must be positive"),
        (("--sweep", "drives=1..x"), "'x' is not a whole number"),
        (("--sweep", "gpus=0..4"), "must be positive"),
        (("--search", "--sweep", "drives=1..2"), "--search and --sweep: each shows something of its own"),
        (("--calibrate", "--stages"), "--calibrate and --stages"),
        (("--calibrate", "--html", "page.html"), "leave out --calibrate"),
        (("--calibrate", "--trace", "t.json"), "leave out --calibrate"),
        (("--nvme", "."), "names what --calibrate measures"),
        (("--model", "a:b", "--layers", "4", "--heads", "2"), "has sizes of its own; leave out --layers, --heads"),
    ],
)
def test_bad_usage_is_refused(arguments: tuple[str, ...], message: str) -> None:
    code, _, error = call("plan", "--preset", "tiny", *arguments)
    assert code == 2
    assert message in error


def test_a_factory_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` finds it; the import path is as it was afterwards."""
    (tmp_path / "models_here.py").write_text(
        "import torch\n\n\ndef make():\n    import shapes_here\n\n    return torch.nn.Linear(8, shapes_here.WIDTH)\n"
    )
    (tmp_path / "shapes_here.py").write_text("WIDTH = 4\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    for name in ("models_here", "shapes_here"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, output, error = call("plan", "--model", "models_here:make", "--seq", "4", "--batch", "1")
    assert code == 0, error
    assert "models_here:make" in output
    assert sys.path == before
    code, _, error = call("plan", "--model", "none_here:make", "--seq", "4", "--batch", "1")
    assert code == 2
    assert f"No module named 'none_here'; looked in the current folder {tmp_path}" in error.replace("\n", " ")
