"""Counters of real steps, written to every kind of sink and read back with the tools that people use."""

import csv
import json
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError
from infinity.observe.exporters import Csv, JsonLines, MetricsLog, TensorBoard, Wandb
from infinity.observe.prometheus import PrometheusFile, PrometheusServer
from tests.full_disk import full_disk

DOCUMENT = Path(infinity.__file__).parent.parent / "docs" / "metrics.md"


class Counting:
    """Counters that grow as told."""

    def __init__(self) -> None:
        self.values = {"nvme/read_bytes": 0.0, "stall/total_s": 0.0}

    def counters(self) -> dict[str, float]:
        return dict(self.values)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[infinity.Engine, torch.nn.Module, infinity.AdamW]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    swap = tmp_path / "swap"
    swap.mkdir()
    config = infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "1MiB"},
        host={"budget": "400KiB"},
        nvme={"paths": [swap]},
        resident_threshold=0,
    )
    with infinity.offload(model, config) as engine:
        yield engine, model, infinity.AdamW(model.parameters())


def train(
    training: tuple[infinity.Engine, torch.nn.Module, infinity.AdamW], log: MetricsLog, steps: int
) -> list[float]:
    _, model, optimizer = training
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        log.step(loss=losses[-1])
    return losses


def test_json_lines_and_csv_hold_every_step(
    training: tuple[infinity.Engine, torch.nn.Module, infinity.AdamW], tmp_path: Path
) -> None:
    with MetricsLog(training[0], [tmp_path / "run.jsonl", tmp_path / "run.csv"]) as log:
        losses = train(training, log, 3)
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == losses
    assert [row["step"] for row in rows] == [0, 1, 2]
    with (tmp_path / "run.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == losses
    assert [float(row["nvme/read_bytes"]) for row in table] == [row["nvme/read_bytes"] for row in rows]
    assert rows[-1]["nvme/read_bytes"] > rows[0]["nvme/read_bytes"] > 0


def test_counters_do_not_wait_and_metrics_do(
    training: tuple[infinity.Engine, torch.nn.Module, infinity.AdamW],
) -> None:
    engine = training[0]
    assert engine.counters().keys() == engine.metrics().keys()
    engine.close()
    with pytest.raises(infinity.InfinityError, match="closed"):
        engine.counters()


def _metrics_of_a_state_tier(folder: Path) -> dict[str, float]:
    """Of an optimizer over parameters that no engine holds."""
    config = infinity.Config(host={"budget": "4MiB"}, nvme={"paths": [folder]})
    optimizer: Any = infinity.AdamW([torch.nn.Parameter(torch.ones(64))], config=config)
    with closing(optimizer):
        return dict(optimizer.state_tier.metrics())


def documented() -> list[str]:
    """Names in the tables of docs/metrics.md; capital letters stand for what differs."""
    return re.findall(r"`([a-z0-9]+(?:/[A-Za-z0-9_/]+)?)`", DOCUMENT.read_text())


def test_every_name_is_documented(
    training: tuple[infinity.Engine, torch.nn.Module, infinity.AdamW], tmp_path: Path
) -> None:
    with MetricsLog(training[0], []) as log:
        train(training, log, 2)
    patterns = [
        re.escape(name)
        .replace("driveN", r"drive\d+")
        .replace("CAUSE", "[a-z_]+")
        .replace("NAME", "[a-z_]+")
        .replace("KIND", "[a-z_]+")
        for name in documented()
    ]
    names = training[0].metrics() | _metrics_of_a_state_tier(tmp_path)
    assert [name for name in names if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []
    counted = [p for p in patterns if re.match(r"(nvme|host|device|link|stall|readahead|order|optimizer)/", p)]
    assert [p for p in counted if "per_s" not in p and not any(re.fullmatch(p, name) for name in names)] == []


def test_every_documented_name_is_there_before_anything_is_counted(
    training: tuple[infinity.Engine, torch.nn.Module, infinity.AdamW],
) -> None:
    """Also where everything fits in memory, so that a loop may read any of them."""
    in_memory = infinity.Config(precision="fp32", device={"kind": "cpu", "budget": "8MiB"}, host={"budget": "8MiB"})
    only_sometimes = ("step/", "ranks/", "host/kept_bytes")
    fixed = {name for name in documented() if "/" in name and name.islower() and not name.startswith(only_sometimes)}
    assert {"nvme/read_bytes", "nvme/capacity_bytes", "link/h2d_bytes", "order/misses"} <= fixed
    with infinity.offload(torch.nn.Sequential(torch.nn.Linear(8, 8)), in_memory) as engine:
        counted = engine.metrics()
        assert engine.io_engine == "none"
    assert fixed - counted.keys() == set()
    assert {value for name, value in counted.items() if name.startswith("nvme/")} == {0.0}
    on_drives = {name for name in training[0].counters() if not name.startswith("nvme/drive")}
    assert on_drives == counted.keys()


def test_rates_are_of_the_steps_since_the_last_row() -> None:
    counting = Counting()
    seen: list[tuple[int, dict[str, float]]] = []

    class Keep:
        def write(self, step: int, values: dict[str, float]) -> None:
            seen.append((step, dict(values)))

        def close(self) -> None:
            pass

    with MetricsLog(counting, [Keep()], every=2, first_step=10) as log:  # type: ignore[list-item]
        for _ in range(4):
            counting.values["nvme/read_bytes"] += 500.0
            counting.values["stall/total_s"] += 0.25
            log.step()
    assert [step for step, _ in seen] == [11, 13]
    for _, row in seen:
        assert row["step/stall_s"] == 0.25
        assert row["step/nvme_read_bytes_per_s"] == pytest.approx(1000.0 / (2 * row["step/seconds"]))


def test_a_value_that_appears_later_adds_a_column(tmp_path: Path) -> None:
    sink = Csv(tmp_path / "m.csv")
    sink.write(0, {"a": 1.0})
    sink.write(1, {"a": 2.0, "b": 3.0})
    sink.write(2, {"b": 4.0})
    sink.close()
    with (tmp_path / "m.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["a"], row["b"]) for row in rows] == [
        ("0", "1.0", ""),
        ("1", "2.0", "3.0"),
        ("2", "", "4.0"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["m.csv"]


def test_a_run_that_goes_on_continues_its_files(tmp_path: Path) -> None:
    """Rows of earlier steps stay; those of steps that come again, and a line that a kill cut off, go."""
    files = [tmp_path / "run.jsonl", tmp_path / "run.csv"]
    with MetricsLog(Counting(), [*files]) as log:
        for loss in (5.0, 4.0, 3.0):
            log.step(loss=loss)
    for file in files:
        file.write_text(file.read_text()[:-4])
    with MetricsLog(Counting(), [*files], first_step=1) as log:
        log.step(loss=4.5, accuracy=0.5)
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 5.0), (1, 4.5)]
    with files[1].open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["accuracy"]) for row in rows] == [("0", "5.0", ""), ("1", "4.5", "0.5")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.jsonl"]
    with MetricsLog(Counting(), [*files]) as log:  # another run
        log.step(loss=1.0)
    assert [len(file.read_text().splitlines()) for file in files] == [1, 2]


@pytest.mark.parametrize("first_step", [0, 3])
def test_a_pipe_stays_a_pipe(tmp_path: Path, first_step: int) -> None:
    pipe = tmp_path / "rows.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        sink = JsonLines(pipe, first_step=first_step)
        sink.write(first_step, {"loss": 2.0})
        assert json.loads(os.read(reader, 4096)) == {"step": first_step, "loss": 2.0}
        sink.close()
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    table = tmp_path / "rows.csv"
    os.mkfifo(table)
    with pytest.raises(ConfigError, match=r"rows\.csv is no file"):
        Csv(table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv", "rows.jsonl"]


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_link_and_the_mode_of_a_file_stay(tmp_path: Path, kind: type[JsonLines] | type[Csv]) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for first_step in (0, 1):
        sink = kind(link, first_step=first_step)
        sink.write(first_step, {"loss": 2.0})
        sink.close()
        target.chmod(0o640)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    rows = target.read_text().splitlines()
    assert len(rows) == (2 if kind is JsonLines else 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_file_that_cannot_be_continued_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(infinity.ConfigError, match=r"run\.jsonl: cannot be written: .*utf-8"):
        MetricsLog(Counting(), [tmp_path / "run.jsonl"], first_step=1)
    assert (tmp_path / "run.jsonl").read_bytes() == b"\xff\xfe"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer, MetricsLog(Counting(), [TensorBoard(writer)]) as log:
        for loss in (3.0, 2.0):
            log.step(loss=loss)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 3.0), (1, 2.0)]
    assert "nvme/read_bytes" in events.Tags()["scalars"]


def test_wandb_gets_one_row_a_step() -> None:
    rows: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log(self, data: dict[str, float], step: int) -> None:
            rows.append((step, data))

    with MetricsLog(Counting(), [Wandb(Run())]) as log:
        log.step(loss=1.0)
    assert [(step, row["loss"]) for step, row in rows] == [(0, 1.0)]


ROW = {"nvme/read_bytes": 5.0, "nvme/drive0/held_bytes": 1.0, "nvme/drive1/held_bytes": 2.0, "stall/link_s": 0.5}


def test_prometheus_file_parses(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    sink = PrometheusFile(tmp_path / "infinity.prom", {"rank": "3"})
    sink.write(0, {"nvme/read_bytes": 1.0})
    sink.write(7, ROW)
    text = (tmp_path / "infinity.prom").read_text()
    samples = {
        (sample.name, sample.labels.get("drive"), sample.labels.get("cause")): (sample.value, sample.labels["rank"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples == {
        ("infinity_step", None, None): (7.0, "3"),
        ("infinity_nvme_read_bytes_total", None, None): (5.0, "3"),
        ("infinity_drive_held_bytes", "0", None): (1.0, "3"),
        ("infinity_drive_held_bytes", "1", None): (2.0, "3"),
        ("infinity_stall_seconds_total", None, "link"): (0.5, "3"),
    }
    assert [path.name for path in tmp_path.iterdir()] == ["infinity.prom"]


def _parsed(path: Path) -> dict[str, tuple[float, dict[str, str]]]:
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(path.read_text()) for sample in family.samples]
    assert len({sample.name for sample in samples}) == len(samples)
    return {sample.name: (sample.value, sample.labels) for sample in samples}


def test_two_values_that_come_to_one_name_are_told_apart(tmp_path: Path) -> None:
    """By Prometheus' rule for any text as a name; the counters of the engine keep theirs, whatever a loop passes in."""
    path = tmp_path / "run.prom"
    sink = PrometheusFile(path)
    given = {"loss/a": 1.0, "loss_a": 2.0, "stall_seconds": 3.0, "nvme_read_bytes_total": 4.0}
    sink.write(0, {**given, "stall/link_s": 5.0, "nvme/read_bytes": 6.0})
    assert _parsed(path) == {
        "infinity_step": (0.0, {}),
        "infinity_loss_a": (1.0, {}),
        "U__infinity__loss__a": (2.0, {}),
        "U__infinity__stall__seconds": (3.0, {}),
        "U__infinity__nvme__read__bytes__total": (4.0, {}),
        "infinity_stall_seconds_total": (5.0, {"cause": "link"}),
        "infinity_nvme_read_bytes_total": (6.0, {}),
    }
    late: dict[str, Any] = {"loss.a": 7.0, "loss_a": 8.0, "loss/a": 9.0, "note": "no number"}
    sink.write(1, late)
    assert _parsed(path) == {
        "infinity_step": (1.0, {}),
        "U__infinity__loss_2e_a": (7.0, {}),
        "U__infinity__loss__a": (8.0, {}),
        "infinity_loss_a": (9.0, {}),
    }


def test_prometheus_server_answers_here_and_stops() -> None:
    server = PrometheusServer()
    server.write(1, ROW)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=100) as answer:
        assert "infinity_nvme_read_bytes_total 5.0" in answer.read().decode()
    for port in (server.port, -1, 99_999):
        with pytest.raises(infinity.ConfigError, match=rf"port {port} on 127\.0\.0\.1: .*choose another"):
            PrometheusServer(port)
    for label in ("1st", "a-b", "", "drive", "cause"):
        with pytest.raises(infinity.ConfigError, match=f"label '{label}': allowed"):
            PrometheusServer(labels={label: "x"})
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=100)


def test_bad_files_are_refused_and_what_was_opened_is_closed(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match=r"\.jsonl, \.csv, \.prom"):
        MetricsLog(Counting(), [tmp_path / "m.txt"])
    with pytest.raises(infinity.ConfigError, match="cannot be written"):
        MetricsLog(Counting(), [tmp_path / "good.csv", tmp_path / "none" / "m.csv"])
    with pytest.raises(infinity.ConfigError, match="no directory"):
        MetricsLog(Counting(), [tmp_path / "none" / "m.prom"])
    with pytest.raises(infinity.ConfigError, match="every=0"):
        MetricsLog(Counting(), [], every=0)


def test_a_loss_that_is_no_number_is_null_in_json_lines(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    with MetricsLog(Counting(), [tmp_path / "run.jsonl"]) as log:
        log.step(loss=float("nan"), best=float("-inf"), lr=1e-3)
    row = json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=refuse)
    assert (row["loss"], row["best"], row["lr"]) == (None, None, 1e-3)


def test_counters_that_start_again_give_no_negative_rate() -> None:
    """`engine.adopt()` makes the parts that count anew."""
    engine, run = Counting(), _Run()
    log = MetricsLog(engine, [run])
    engine.values = {"nvme/read_bytes": 1e9, "stall/total_s": 5.0}
    log.step()
    engine.values = {"nvme/read_bytes": 1e3, "stall/total_s": 0.5}
    log.step()
    assert run.rows[1]["step/nvme_read_bytes_per_s"] > 0
    assert run.rows[1]["step/stall_s"] == 0.5


def test_what_a_loop_passes_in_is_no_counter_to_prometheus(tmp_path: Path) -> None:
    with MetricsLog(Counting(), [PrometheusFile(tmp_path / "run.prom")]) as log:
        log.step(accuracy=0.5, tokens_per_second=10.0)
    text = (tmp_path / "run.prom").read_text()
    assert "# TYPE infinity_accuracy gauge" in text
    assert "infinity_accuracy 0.5" in text
    assert "# TYPE infinity_nvme_read_bytes_total counter" in text


def test_all_sinks_are_closed_whatever_goes_wrong_with_one(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(_Run):
        def close(self) -> None:
            raise OSError("the disk is full")

    class Wrong(_Run):
        def close(self) -> None:
            raise ValueError("a bug")

    run = _Run()
    log = MetricsLog(Counting(), [run, Wrong(), Broken()])
    with pytest.raises(ValueError, match="a bug"):
        log.close()
    assert run.is_closed
    assert caplog.messages == ["the log of Broken is not complete: the disk is full. Training goes on"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_training_outlives_a_log_whose_disk_is_full(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, run = tmp_path / f"run.{suffix}", _Run()
    with MetricsLog(Counting(), [path, run]) as log:
        log.step(loss=1.0)
        before = path.read_bytes()
        with full_disk(len(before) + 20):
            for _ in range(3):
                log.step(loss=1.0)
    (message,) = caplog.messages
    assert message == f"the log {path} ends before step 1: [Errno 27] File too large. Training goes on"
    assert path.read_bytes().startswith(before)
    assert len(run.rows) == 4


class _Run:
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.is_closed = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append(dict(values))

    def close(self) -> None:
        self.is_closed = True


def test_a_csv_file_that_is_none_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text('step,loss\n1,"' + "x" * 200_000)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"run\.csv: cannot be written: field larger than"):
        Csv(path, first_step=2)
    assert path.read_bytes() == before
