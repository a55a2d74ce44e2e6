"""The parts of a run's page that are words and numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from infinity.report.palette import SERIES, colour_of_cause
from infinity.report.record import RunRecord, RunState
from infinity.report.remedies import remedy_of
from infinity.sizes import format_nbytes

WHEN_IT_ENDS = "This is written when the run ends."
Cell = str | tuple[str, str]
"""Text, or text with a class."""


def count_steps(record: RunRecord) -> str:
    """How many steps are recorded, with the word."""
    steps = len(record.run["step_seconds"])
    return f"{steps:,} step{'s' if steps != 1 else ''}"


def overview(record: RunRecord) -> str:
    """The run in a few figures."""
    run = record.run
    steps, losses = run["step_seconds"], run["losses"]
    model = run["model"]  # None of a run that ended before it was offloaded
    facts = [
        ("parameters", f"{model['parameters']:,}" if model else "not known yet"),
        ("state", format_nbytes(int(model["state_bytes"])) if model else "not known yet"),
        ("steps", f"{len(steps):,}"),
        ("last loss", f"{losses[-1]:.4f}" if losses else "none"),
        ("median step", f"{statistics.median(steps):.3f} s" if steps else "none"),
        ("waited, of the time", f"{_waited_share(run):.0%}" if steps else "none"),
        *(
            (f"{tier} budget", format_nbytes(int(run["budgets"][tier])))
            for tier in ("device", "host")
            if tier in run["budgets"]
        ),
    ]
    if run.get("tokens_per_second"):
        facts.insert(5, ("speed", f"{run['tokens_per_second']:,.0f} tokens/s"))
    if run.get("peak_rss_bytes"):
        facts.append(("peak of the process", format_nbytes(int(run["peak_rss_bytes"]))))
    if run.get("baseline"):
        facts.append(("beside plain PyTorch", _compared_bits(run["baseline"])))
    return "<dl>" + "".join(f"<div><dt>{n}</dt><dd>{escape(v)}</dd></div>" for n, v in facts) + "</dl>"


def stalls(record: RunRecord) -> str:
    """All steps' time as one bar, and each cause with what removes it."""
    run = record.run
    total_s = sum(run["step_seconds"])
    if not total_s:
        return "<p>The run ended before its first step.</p>"
    causes = sorted(((c, s) for c, s in run["stalls"].items() if c != "total" and s > 0), key=lambda item: -item[1])
    if not causes:
        return "<p>Nothing was waited for.</p>"
    shares = [(cause, seconds / total_s) for cause, seconds in causes]
    rest = max(1.0 - sum(share for _, share in shares), 0.0)
    parts = [(f"waiting: {_spaced(cause)}", share, colour_of_cause(cause)) for cause, share in shares]
    bar = "".join(
        f'<span style="width:{100 * share:.3f}%;background:{colour}" title="{escape(name)} {share:.1%}"></span>'
        for name, share, colour in [("everything else", rest, SERIES[0]), *parts]
    )
    rows: list[Sequence[Cell]] = [
        (_key(colour_of_cause(cause)) + escape(_spaced(cause)), *_seconds(share, total_s), escape(remedy_of(cause)))
        for cause, share in shares
    ]
    rest_row = (_key(SERIES[0]) + "everything else", *_seconds(rest, total_s), "")
    head = ("waited for", ("seconds", "number"), ("of all steps", "number"), "what removes it")
    caption = f"<p>{count_steps(record)}, {total_s:,.2f} s: the training thread's waits by cause.</p>"
    table = _table(head, [*rows, rest_row], kind="words")
    return f'{caption}<div class="time" aria-hidden="true">{bar}</div>{table}'


def prediction(record: RunRecord) -> str:
    """Seconds and bytes of a step, as predicted and as measured."""
    found = record.run.get("prediction") or {}
    rows: list[Sequence[Cell]] = []
    if found.get("step_seconds") is not None and found.get("measured_seconds"):
        predicted, measured = found["step_seconds"], found["measured_seconds"]
        rows.append(_compared("seconds of a step", f"{predicted:.4f}", f"{measured:.4f}", predicted / measured - 1))
    expected, counted = record.run.get("expected_traffic") or [], record.run["traffic"].get("per_step") or []
    if expected and counted:
        for key, name in (
            ("nvme_read_bytes", "read in the last step"),
            ("nvme_write_bytes", "written in the last step"),
        ):
            there, here = expected[-1].get(key, 0), counted[-1].get(key, 0)
            rows.append(_compared(name, f"{there:,} B", f"{here:,} B", there / here - 1 if here else 0.0))
    if not rows and record.state is RunState.RUNNING:
        return f"<p>{WHEN_IT_ENDS}</p>"
    if not rows:
        return "<p>The run was too short for a prediction of its own.</p>"
    head = ("", ("predicted", "number"), ("measured", "number"), ("difference", "number"))
    note = "<p>Seconds from the simulated scheduler, fitted to the first steps; bytes from the closed forms.</p>"
    return note + _table(head, rows)


def wear(record: RunRecord) -> str:
    """What the run wrote to each drive, and what that means for its life."""
    told = [str(one.get("text", "")) for one in record.run.get("wear", [])]
    if not told and record.state is RunState.RUNNING:
        return f"<p>{WHEN_IT_ENDS}</p>"
    if not told:
        return "<p>Nothing was written to drives, or it was not recorded.</p>"
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in told) + "</ul>"


def settings(record: RunRecord) -> str:
    """The machine, and every setting."""
    parts = []
    for title in ("environment", "config"):
        if record.run.get(title):
            text = escape(json.dumps(record.run[title], indent=2))
            parts.append(f"<details open><summary>{title}</summary><pre tabindex='0'>{text}</pre></details>")
    return "".join(parts)


def _compared(name: str, predicted: str, measured: str, difference: float) -> Sequence[Cell]:
    shown = "exact" if predicted == measured else f"{difference:+.1%}"
    return name, (predicted, "number"), (measured, "number"), (shown, "number")


def _compared_bits(baseline: dict[str, Any]) -> str:
    """What came of the comparison of losses and parameters; None of either means that it was not made."""
    found = (baseline.get("losses_equal"), baseline.get("parameters_equal"))
    return "different" if found[1] is False else "every bit equal" if all(found) else "not compared bit for bit"


def _waited_share(run: dict[str, Any]) -> float:
    total = sum(run["step_seconds"])
    return min(run["stalls"].get("total", 0.0) / total, 1.0) if total else 0.0


def _seconds(share: float, total_s: float) -> tuple[Cell, Cell]:
    return (f"{share * total_s:,.3f} s", "number"), (f"{share:.1%}", "number")


def _key(colour: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>'


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _table(head: Sequence[Cell], rows: Sequence[Sequence[Cell]], *, kind: str = "numbers") -> str:
    """Cells are HTML already. Of the kind "words" the last column is sentences."""
    top = "".join(_cell("th", cell) for cell in head)
    body = "".join("<tr>" + "".join(_cell("td", cell) for cell in row) + "</tr>" for row in rows)
    table = f"<table class={kind!r}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(tag: str, cell: Cell) -> str:
    text, kind = (cell, "") if isinstance(cell, str) else cell
    return f"<{tag}{f' class={kind!r}' if kind else ''}>{text}</{tag}>"
