"""The page of a run: from a real run's record, from parts of one, from nothing; in a browser where there is one."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest

from infinity.cli import train
from infinity.cli.files import write_json
from infinity.cli.records import StepRecord
from infinity.cli.stopping import Terminated
from infinity.errors import ConfigError
from infinity.plan.timeline import Span
from infinity.report.charts import drives, losses, stalls_by_step, step_times, tiers, timeline
from infinity.report.ending import how_it_ended
from infinity.report.page import page
from infinity.report.plan_page import plan_page, sweep_figure, timeline_figure
from infinity.report.record import METRICS_FILE, RUN_FILE, TRACE_FILE, RunRecord, RunState
from infinity.report.remedies import remedy_of
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.types import Op
from tests.cli.command import call
from tests.drives import wrap_drives

pytest.importorskip("plotly", reason="the page needs the extra 'report'")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
    "--enable-logging=stderr",
]
_COUNTED = ("nvme/drive0/read_bytes", "nvme/drive0/write_bytes", "stall/nvme_read_s", "stall/link_s")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")


def run_of(n_steps: int) -> dict[str, Any]:
    """What `train --json` writes, as far as the page reads it."""
    return {
        "state": "finished",
        "error": None,
        "config": {"preset": "tiny <&>"},
        "environment": {"python": "3.11"},
        "model": {"parameters": 1000, "state_bytes": 12000, "units": 2},
        "first_step": 0,
        "losses": [5.0 / (1 + step) for step in range(n_steps)],
        "step_seconds": [0.5] * n_steps,
        "budgets": {"device": 1 << 20, "host": 2 << 20, "nvme": 0},
        "stalls": {"nvme_read": 0.1 * n_steps, "link": 0.0, "total": 0.1 * n_steps},
        "counters_at_start": dict.fromkeys(_COUNTED, 0.0),
        "traffic": {"per_step": [{"nvme_read_bytes": 100, "nvme_write_bytes": 50}] * n_steps},
        "expected_traffic": [{"nvme_read_bytes": 100, "nvme_write_bytes": 100}] * n_steps,
        "drives": [{"directory": "/mnt/nvme0", "read_bytes_per_s": 2e9, "write_bytes_per_s": None}],
        "prediction": {"step_seconds": 0.4, "measured_seconds": 0.5} if n_steps else {"step_seconds": None},
        "wear": [],
        "baseline": None,
    }


def rows_of(n_steps: int) -> list[dict[str, Any]]:
    before: dict[str, float] = {}
    rows = []
    for step in range(n_steps):
        counters = {
            "nvme/drive0/read_bytes": 1e6 * (step + 1),
            "nvme/drive0/write_bytes": 0.0,
            "stall/nvme_read_s": 0.1 * (step + 1),
            "stall/link_s": 0.0,
            "stall/total_s": 0.1 * (step + 1),
            "host/held_bytes": 1 << 20,
            "device/held_bytes": 1 << 19,
        }
        rows.append(StepRecord(step, 1.0, None, 0.5, 8, counters, before).to_json())
        before = counters
    return rows


def record_of(n_steps: int) -> RunRecord:
    spans = [
        {"name": "blocks.0", "cat": "forward", "ts": 10.0 * n, "dur": 5.0, "track": "training thread: units"}
        for n in range(n_steps)
    ]
    held = [{"ts": 10.0 * n, "name": "host", "bytes": 1 << 20} for n in range(n_steps)]
    return RunRecord("test", run_of(n_steps), rows_of(n_steps), spans, held)


def unfinished(folder: Path, n_steps: int, **more: Any) -> RunRecord:
    """A run that has not come to its end, from its files."""
    kept = ("config", "environment", "model", "first_step", "budgets", "counters_at_start")
    begun = {key: value for key, value in run_of(n_steps).items() if key in kept}
    (folder / RUN_FILE).write_text(json.dumps(begun | {"state": "running"} | more))
    (folder / METRICS_FILE).write_text("\n".join(map(json.dumps, rows_of(n_steps))))
    return RunRecord.load(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "swap").mkdir()
    run = ("train", "--preset", "tiny", "--layers", "2", "--steps", "4", "--device", "cpu", "--nvme", folder / "swap")
    code, _, error = call(*run, "--record", folder / "run1")
    assert code == 0, error
    return folder / "run1"


def test_a_recorded_run_has_every_figure(recorded: Path) -> None:
    assert {path.name for path in recorded.iterdir()} >= {RUN_FILE, METRICS_FILE, TRACE_FILE}
    record = RunRecord.load(recorded)
    for make in (losses, step_times, tiers, drives, timeline):
        assert make(record) is not None, make.__name__
    tracks = {span["track"] for span in record.spans}
    assert tracks >= {"training thread: units", "optimizer: updates", "link: host to device 1"}
    assert {each["name"] for each in record.held} == {"device", "host", "nvme"}
    waited = stalls_by_step(record)
    assert sum(map(sum, waited.values())) == pytest.approx(record.run["stalls"]["total"], abs=0.05)
    code, output, _ = call("report", recorded)
    assert code == 0
    assert (recorded / "report.html").exists()
    assert "report.html" in output


def test_the_page_needs_no_network_and_escapes_what_it_shows() -> None:
    html = page(record_of(3))
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', html) == []
    assert "tiny <&>" not in html
    assert "tiny &lt;&amp;&gt;" in html
    data = json.loads(html.split('id="figures">')[1].split("</script>")[0])
    assert set(data) == {f"figure-{name}" for name in ("losses", "steps", "timeline", "tiers", "drives")}


def test_the_median_of_an_even_number_of_steps_is_their_middle() -> None:
    record = record_of(4)
    record.run["step_seconds"] = [0.1, 0.4, 0.2, 0.9]
    assert "<dt>median step</dt><dd>0.300 s</dd>" in page(record)


def test_a_trace_of_nothing_but_the_order_of_use_has_no_timeline() -> None:
    record = record_of(1)
    for span in record.spans:
        span["cat"] = "use forward"
    assert timeline(record) is None
    assert "No trace was recorded" in page(record)


def test_a_comparison_without_losses_draws_none() -> None:
    record = record_of(2)
    record.run["baseline"] = {"parameters_equal": True}
    figure = losses(record)
    assert figure is not None
    assert [line.name for line in figure.data] == ["loss"]


def test_an_empty_run_says_so() -> None:
    html = page(RunRecord("empty", run_of(0)))
    assert "before its first step" in html
    assert "No trace was recorded" in html


def test_a_run_that_goes_on_says_what_comes_when_it_ends(tmp_path: Path) -> None:
    html = page(unfinished(tmp_path, 0))
    assert html.count("This is written when the run ends.") == 3  # timeline, prediction and wear
    assert "run with --record" not in html  # it is


def test_a_run_that_is_not_finished_has_a_page_of_its_rows(tmp_path: Path) -> None:
    record = unfinished(tmp_path, 3)
    assert record.run["losses"] == [1.0] * 3
    assert record.run["stalls"]["nvme_read"] == pytest.approx(0.3)
    html = page(record)
    assert "Not finished.</strong> This run has not ended, or its process was killed: 3 steps" in html
    for name in ("losses", "steps", "tiers", "drives"):
        assert f'id="figure-{name}"' in html


def test_a_run_that_failed_says_why_and_where_everything_was(tmp_path: Path) -> None:
    error = {"type": "SwapFullError", "message": "SwapFullError: no room <here>", "report": "residency: <all>"}
    html = page(unfinished(tmp_path, 2, state="failed", error=error))
    assert "Failed after 2 steps." in html
    assert "SwapFullError: no room &lt;here&gt;" in html
    assert "residency: &lt;all&gt;" in html


def test_a_run_that_failed_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    assert "Failed before its first step." in page(unfinished(tmp_path, 0, state="failed", error=None))


def test_the_first_step_has_its_own_traffic_only() -> None:
    record = record_of(2)
    record.run["counters_at_start"]["nvme/drive0/read_bytes"] = 4e5  # what initialisation moved
    figure = drives(record)
    assert figure is not None
    assert list(figure.data[0].y) == pytest.approx([1.2, 2.0])  # 0.6 and 1 MB in 0.5 s


def test_predicted_stands_beside_measured() -> None:
    html = page(record_of(3))
    section = html.split('id="prediction"')[1].split("<h2")[0]
    assert re.findall(r"<td[^>]*>([^<]*)</td>", section) == [
        *("seconds of a step", "0.4000", "0.5000", "-20.0%"),
        *("read in the last step", "100 B", "100 B", "exact"),
        *("written in the last step", "100 B", "50 B", "+100.0%"),
    ]


def test_time_adds_up_to_the_whole(tmp_path: Path) -> None:
    section = page(record_of(4)).split('id="stalls"')[1].split("<h2")[0]
    shares = [float(share) for share in re.findall(r"width:([\d.]+)%", section)]
    assert sum(shares) == pytest.approx(100, abs=0.01)
    assert shares == pytest.approx([80, 20], abs=0.01)
    assert remedy_of("nvme_read").split(",")[0] in section


def test_a_failed_run_leaves_a_record(tmp_path: Path) -> None:
    """A transfer that is stuck ends the run; its steps, its trace and where everything was are there to look at."""
    (tmp_path / "swap").mkdir()
    options = ("--preset", "tiny", "--layers", "2", "--steps", "20", "--device", "cpu", "--nvme", tmp_path / "swap")
    with pytest.MonkeyPatch.context() as patched:
        wrap_drives(patched, _stuck_after(20))
        code, _, error = call("train", *options, "--io-timeout", "0.5", "--record", tmp_path / "run")
    assert code == 1
    assert "Where everything was (engine.report()):" in error
    record = RunRecord.load(tmp_path / "run")
    assert record.state is RunState.FAILED
    assert record.run["error"]["type"] == "IoTimeoutError"
    assert "residency:" in record.run["error"]["report"]
    assert len(record.steps) == len(record.run["losses"])
    assert record.spans
    assert "Failed after" in page(record)
    (wear,) = record.run["wear"]
    assert " written by the steps" in wear["text"] and escape(wear["text"]) in page(record)


def test_a_run_that_was_stopped_is_not_called_failed(tmp_path: Path) -> None:
    """One step is one step, wherever the page counts them."""
    html = page(unfinished(tmp_path, 1, **how_it_ended(KeyboardInterrupt())))
    assert "<strong>Interrupted after 1 step.</strong><p>stopped by Ctrl-C</p>" in html
    assert "<p>1 step, " in html
    assert "1 steps" not in html and "Failed after" not in html
    stopped = page(unfinished(tmp_path, 0, **how_it_ended(Terminated())))
    assert "<strong>Interrupted before its first step.</strong><p>stopped by SIGTERM</p>" in stopped


def _stuck_after(n_transfers: int) -> Callable[[Backend], Backend]:
    """Backends that stand still after so many transfers."""

    def wrap(backend: Backend) -> Backend:
        faulty = FaultyBackend(backend)
        faulty.inject(Fault.STUCK, op=Op.READ, times=None, skip=n_transfers)
        return faulty

    return wrap


def test_a_file_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(run_of(2)))
    code, _, _ = call("report", tmp_path / "one.json")
    assert code == 0
    assert "every step" not in (tmp_path / "one.html").read_text()[:100]


def test_the_file_alone_of_a_run_that_has_not_ended_has_a_page(tmp_path: Path) -> None:
    unfinished(tmp_path, 3)
    assert "Not finished.</strong>" in page(RunRecord.load(tmp_path / RUN_FILE))


def test_a_loss_that_is_no_number_is_shown_as_one(tmp_path: Path) -> None:
    """Files hold null for it, as JSON has no NaN."""
    run = run_of(2) | {"losses": [1.0, math.nan]}
    write_json(tmp_path / RUN_FILE, run)
    assert json.loads((tmp_path / RUN_FILE).read_text(), parse_constant=pytest.fail)["losses"] == [1.0, None]
    html = page(RunRecord.load(tmp_path / RUN_FILE))
    assert "<dt>last loss</dt><dd>nan</dd>" in html
    json.loads(html.split('id="figures">')[1].split("</script>")[0], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("losses_equal", "parameters_equal", "shown"),
    [
        (True, True, "every bit equal"),
        (True, False, "different"),
        (False, None, "not compared bit for bit"),  # bf16
        (None, None, "not compared bit for bit"),
    ],
)
def test_the_comparison_with_plain_pytorch_is_told_as_it_was_made(
    losses_equal: bool | None, parameters_equal: bool | None, shown: str
) -> None:
    record = record_of(2)
    equal = {"losses_equal": losses_equal, "parameters_equal": parameters_equal}
    record.run["baseline"] = {"losses": record.run["losses"]} | equal
    assert f"<dt>beside plain PyTorch</dt><dd>{shown}</dd>" in page(record)


def test_the_rows_of_a_killed_run_are_read_to_the_last_whole_one(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(run_of(2)))
    (tmp_path / METRICS_FILE).write_text("\n".join(map(json.dumps, rows_of(2)))[:-10])
    assert len(RunRecord.load(tmp_path).steps) == 1


_NO_ROWS = ("5", "null", "[1]", '"x"', "[" * 100_000, '{"loss": 1.0}', "\0", "counters", "seconds")


@pytest.mark.parametrize("row", _NO_ROWS, ids=[row[:10] for row in _NO_ROWS])
def test_rows_are_read_to_the_first_that_is_none(tmp_path: Path, row: str) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(run_of(3)))
    rows = rows_of(3)
    damaged = {"counters": {"counters": {"stall/nvme_read_s": None}}, "seconds": {"step_seconds": 0}}.get(row)
    second = row if damaged is None else json.dumps(rows[1] | damaged)
    (tmp_path / METRICS_FILE).write_text("\n".join([json.dumps(rows[0]), second, json.dumps(rows[2])]))
    record = RunRecord.load(tmp_path)
    assert [step["step"] for step in record.steps] == [0]
    assert "<h1>Run " in page(record)


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("losses", None, "losses: "),
        ("losses", ["x"], "losses.0: "),
        ("step_seconds", [None], "step_seconds.0: "),
        ("stalls", {"link": "x"}, "stalls.link: "),
        ("model", {}, "model.parameters: "),
        ("budgets", [], "budgets: "),
        ("state", "odd", "state: "),
        ("traffic", {"per_step": [None]}, "traffic.per_step.0: "),
        ("drives", [{}], "drives.0.directory: "),
        ("counters_at_start", {"stall/link_s": None}, "counters_at_start.stall/link_s: "),
    ],
)
def test_a_damaged_run_is_refused_with_the_place(tmp_path: Path, key: str, value: object, where: str) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(run_of(2) | {key: value}))
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / RUN_FILE}: is damaged: {where}")):
        RunRecord.load(tmp_path)


_SPAN = {"ph": "X", "pid": 1, "tid": 1, "name": "n", "cat": "forward", "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="nested too deep"),
        ("5", "no list of events"),
        (json.dumps({"traceEvents": [_SPAN | {"cat": []}]}), "event 0: X.cat: "),
        (json.dumps({"traceEvents": [{"ph": "o"}, _SPAN | {"dur": None}]}), "event 1: X.dur: "),
        (json.dumps({"traceEvents": [{"ph": "C", "name": "host", "ts": 1, "args": {}}]}), "event 0: C.args.bytes: "),
    ],
)
def test_a_damaged_trace_is_refused_with_the_way_out(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(run_of(2) | {"prediction": None}))
    (tmp_path / TRACE_FILE).write_text(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path / TRACE_FILE}: .*{re.escape(why)}.*remove it to see the rest"):
        RunRecord.load(tmp_path)
    (tmp_path / TRACE_FILE).unlink()
    assert "<h1>Run " in page(RunRecord.load(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"), [("{", "not valid JSON"), ("[]", "without config"), ('{"losses": []}', "without config")]
)
def test_something_else_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        RunRecord.load(tmp_path / "run.json")
    code, _, error = call("report", tmp_path / "run.json")
    assert (code, message in error) == (2, True)


def test_rows_that_cannot_be_read_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text(json.dumps(run_of(2)))
    (tmp_path / METRICS_FILE).mkdir()
    code, _, error = call("report", tmp_path)
    assert code == 2
    assert f"{tmp_path / METRICS_FILE}: cannot be read" in error and "remove it to see the rest" in error


@pytest.mark.parametrize("name", [RUN_FILE, METRICS_FILE, TRACE_FILE])
def test_the_page_does_not_take_the_place_of_the_record(tmp_path: Path, name: str) -> None:
    unfinished(tmp_path, 2)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    code, _, error = call("report", tmp_path, "--output", tmp_path / name)
    assert code == 2
    assert f"--output {tmp_path / name}: it is read, and would be lost" in error
    assert call("report", tmp_path / RUN_FILE, "--output", tmp_path / RUN_FILE)[0] == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_run_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, _, error = call("report", tmp_path / "none.json")
    assert code == 2
    assert "none.json: cannot be read" in error


def test_a_run_that_is_stopped_while_it_prepares_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes nothing of an earlier one, which is replaced when the new run begins."""

    def stop(*arguments: object, **options: object) -> None:
        assert RunRecord.load(folder).state is (RunState.RUNNING if not kept else RunState.FINISHED)
        raise KeyboardInterrupt

    folder, kept = tmp_path / "run", False
    options = ("--preset", "tiny", "--layers", "2", "--steps", "1", "--device", "cpu", "--record", folder)
    with monkeypatch.context() as patched:
        patched.setattr(train, "load_training_text", stop)
        assert call("train", *options)[0] == 130
        assert RunRecord.load(folder).state is RunState.INTERRUPTED
        assert call("report", folder)[0] == 0
        assert "<strong>Interrupted before its first step.</strong>" in (folder / "report.html").read_text()
        assert call("train", *options, "--host-budget", "1KiB")[0] == 130  # the text comes before the budgets
    assert call("train", *options, "--host-budget", "1KiB")[0] == 2
    assert "PlacementError: the host budget of 1 KiB" in RunRecord.load(folder).run["error"]["message"]
    assert call("train", *options)[0] == 0
    kept = True
    with monkeypatch.context() as patched:
        patched.setattr(train, "load_training_text", stop)
        assert call("train", *options)[0] == 130
    assert RunRecord.load(folder).state is RunState.FINISHED


def test_a_file_of_a_run_names_the_folder_that_is_wanted(tmp_path: Path) -> None:
    unfinished(tmp_path, 2)
    code, _, error = call("report", tmp_path / METRICS_FILE)
    assert code == 2
    assert "give the folder that `infinity train --record` or a RunRecorder was given" in error


def test_record_refuses_files_elsewhere(tmp_path: Path) -> None:
    code, _, error = call("train", "--record", tmp_path / "run", "--json", tmp_path / "run.json")
    assert code == 2
    assert "leave --json out" in error
    assert not (tmp_path / "run").exists()


def test_every_stall_has_a_remedy() -> None:
    from infinity.observe.stalls import StallCause

    assert [cause for cause in StallCause if not remedy_of(cause.value)] == []


# In a browser --------------------------------------------------------------------------------------------------


# A browser's own window is never narrower than 500 pixels, so the page lies in a frame. Its script says what it found.
FRAME = """<!DOCTYPE html><body style="margin: 0"><script>
    addEventListener('message', event => { document.title = event.data; });
    </script><iframe src="page.html" style="width: %dpx; height: 800px; border: 0"></iframe></body>"""
SAY = "const say = text => parent.postMessage(text, '*');"


def browse(
    folder: Path, html: str, *options: str, script: str = "", width_px: int | None = None
) -> tuple[str, list[str]]:
    """The page after its scripts, or the frame of this width that it was shown in, and what was written to the console.

    A script that knows nothing of frames sets the title of the page.
    """
    assert BROWSER is not None
    page_file, shown = folder / "page.html", folder / "frame.html"
    page_file.write_text(html.replace("</body>", f"<script>{SAY}{script}</script></body>"))
    shown.write_text(FRAME % (width_px or 0))
    target = ["--dump-dom", (shown if width_px else page_file).as_uri()]
    command = [BROWSER, *_QUIET, f"--user-data-dir={folder / 'profile'}", *options, *target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=os.environ)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_steps", "width_px", "options"),
    [
        (3, 1200, []),
        (3, 1200, ["--blink-settings=preferredColorScheme=0"]),  # dark
        (3, 360, []),
        (10_000, 1200, []),
        (0, 1200, []),
    ],
    ids=["light", "dark", "narrow", "10,000 steps", "empty"],
)
def test_a_browser_draws_every_figure_without_an_error(
    tmp_path: Path, n_steps: int, width_px: int, options: list[str]
) -> None:
    """Inside the window's width, tables too."""
    html = page(record_of(n_steps))
    measure = """setTimeout(() => {
        const figures = [...document.querySelectorAll('figure')];
        const wide = figures.filter(figure =>
            figure.querySelector('.main-svg').getBoundingClientRect().width > figure.clientWidth + 1);
        const tables = [...document.querySelectorAll('table')].filter(table =>
            table.scrollWidth > table.parentElement.clientWidth + 1);
        const over = Math.max(document.documentElement.scrollWidth - innerWidth, 0);
        say(`${innerWidth} px, ${figures.length} figures, ${wide.length + tables.length} too wide, ${over} over`);
    }, 3000);"""
    drawn, console = browse(tmp_path, html, "--window-size=1300,900", *options, script=measure, width_px=width_px)
    assert console == []
    (said,) = re.findall("<title>(.*)</title>", drawn)
    assert said == f"{width_px} px, {html.count('<figure')} figures, 0 too wide, 0 over"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width_px", [1200, 360])
def test_a_browser_draws_the_page_of_a_plan_without_an_error(tmp_path: Path, width_px: int) -> None:
    spans = [Span(lane, "blocks.0 <&>", n, n + 0.8) for n, lane in enumerate(("compute", "nvme read", "nvme read"))]
    figures = [timeline_figure(spans), sweep_figure("host-memory", ["64 GiB", "128 GiB"], {"predicted": [2.0, 1.0]})]
    count = "setTimeout(() => say(document.querySelectorAll('.main-svg').length > 0 ? 'drawn' : 'nothing'), 2000);"
    for figure in figures:
        html = plan_page("a plan <&>", "Figure", figure)
        drawn, console = browse(tmp_path, html, script=count, width_px=width_px)
        assert console == []
        assert "<title>drawn</title>" in drawn


@needs_browser
@pytest.mark.slow
def test_keys_move_a_figure_that_has_the_focus(tmp_path: Path) -> None:
    press = """
    const figure = document.getElementById('figure-losses'), before = figure._fullLayout.xaxis.range.slice();
    figure.focus();
    for (const key of ['ArrowRight', '+'])
      document.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    const after = figure._fullLayout.xaxis.range;
    document.title = after[0] > before[0] && after[1] - after[0] < before[1] - before[0] ? 'moved' : 'stuck';
    """
    drawn, console = browse(tmp_path, page(record_of(20)), script=press)
    assert console == []
    assert "<title>moved</title>" in drawn


def test_a_run_without_a_device_budget_has_a_page() -> None:
    """The state of parameters that are not offloaded: nothing of it is on the device."""
    record = record_of(3)
    del record.run["budgets"]["device"]
    figure = tiers(record)
    assert figure is not None
    assert [trace.name for trace in figure.data] == ["host held"]
    html = page(record)
    assert "host budget" in html
    assert "device budget" not in html


@needs_browser
@pytest.mark.slow
def test_the_wheel_scrolls_the_page_until_a_figure_has_the_focus(tmp_path: Path) -> None:
    turn = """
    const figure = document.getElementById('figure-losses');
    const wide = () => { const [from, to] = figure._fullLayout.xaxis.range; return to - from; };
    const turn = () => figure.querySelector('.nsewdrag').dispatchEvent(
      new WheelEvent('wheel', {deltaY: -300, clientX: 300, clientY: 300, bubbles: true, cancelable: true}));
    const before = wide();
    turn();
    setTimeout(() => {
      const without = wide();
      figure.focus();
      turn();
      setTimeout(() => { document.title = without === before && wide() < before ? 'zoomed' : 'wrong'; }, 1000);
    }, 1000);
    """
    drawn, console = browse(tmp_path, page(record_of(20)), script=turn)
    assert console == []
    assert "<title>zoomed</title>" in drawn


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_a_failed_run_without_an_error(tmp_path: Path) -> None:
    error = {"type": "SwapFullError", "message": "SwapFullError: no room", "report": "residency:\n  blocks.0: clean"}
    html = page(unfinished(tmp_path, 3, state="failed", error=error))
    drawn, console = browse(tmp_path, html)
    assert console == []
    assert drawn.count('class="main-svg"') >= html.count("<figure")
