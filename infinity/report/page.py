"""The page of a run: one HTML file that needs no network, in the reader's light or dark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from infinity.plan.timeline import graph_objects
from infinity.report import charts
from infinity.report.record import RunRecord
from infinity.report.remedies import remedy_of
from infinity.sizes import format_nbytes

_CONFIG: dict[str, Any] = {"responsive": True, "displaylogo": False, "scrollZoom": True}
_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2128; --soft: #57606a; --paper: #ffffff; --line: #d8dee4; --accent: #0b6bcb }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --paper: #14181d; --line: #30363d; --accent: #6cb6ff }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; margin: .5rem 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
a { color: var(--accent) } p, figcaption { color: var(--soft); margin: .25rem 0 }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0 1rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; margin: 1rem 0 }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem }
dt { color: var(--soft); font-size: .85rem } dd { margin: 0; font-size: 1.15rem; overflow-wrap: anywhere }
figure { margin: 0; min-height: 20rem; border: 1px solid var(--line); border-radius: .5rem; overflow: hidden }
figure:focus { outline: 2px solid var(--accent) }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; font-size: .85rem }
"""
# Colours follow the page; keys move and zoom a figure that has the focus.
_SCRIPT = """
const ink = () => getComputedStyle(document.documentElement).getPropertyValue('--ink').trim();
const line = () => getComputedStyle(document.documentElement).getPropertyValue('--line').trim();
const axis = () => ({gridcolor: line(), zerolinecolor: line(), linecolor: line()});
function look(layout) {
  return Object.assign({}, layout, {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', font: {color: ink()}, autosize: true,
    margin: {l: 60, r: 20, t: 20, b: 50}, legend: {orientation: 'h', y: -0.25}, dragmode: 'pan',
    modebar: {bgcolor: 'rgba(0,0,0,0)', color: line(), activecolor: ink()},
    shapes: (layout.shapes || []).map(
      one => Object.assign({}, one, {line: Object.assign({}, one.line, {color: ink()})})),
    xaxis: Object.assign({}, layout.xaxis, axis()), yaxis: Object.assign({}, layout.yaxis, axis()),
  });
}
const figures = JSON.parse(document.getElementById('figures').textContent);
function draw() {
  for (const [name, figure] of Object.entries(figures)) {
    Plotly.react(name, figure.data, look(figure.layout), figure.config);
  }
}
draw();
const sizes = new ResizeObserver(entries => entries.forEach(entry => Plotly.Plots.resize(entry.target)));
Object.keys(figures).forEach(name => sizes.observe(document.getElementById(name)));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
document.addEventListener('keydown', event => {
  const figure = document.activeElement;
  if (!figure || figure.tagName !== 'FIGURE') return;
  const [from, to] = figure._fullLayout.xaxis.range, width = to - from;
  const moves = {ArrowLeft: [-.1, -.1], ArrowRight: [.1, .1], '+': [.1, -.1], '=': [.1, -.1], '-': [-.15, .15]};
  const change = moves[event.key];
  if (event.key === '0') { Plotly.relayout(figure, {'xaxis.autorange': true}); event.preventDefault(); }
  if (!change) return;
  Plotly.relayout(figure, {'xaxis.range': [from + change[0] * width, to + change[1] * width]});
  event.preventDefault();
});
"""
_SECTIONS = (
    ("losses", "Losses", charts.losses, "Each step's loss."),
    ("steps", "Step time", charts.step_times, "What the training thread waited for, and everything else."),
    ("timeline", "Timeline", charts.timeline, "The newest steps, a row per track."),
    ("tiers", "Tiers", charts.tiers, "Memory held at the end of each step, and its budget."),
    (
        "drives",
        "Drives",
        charts.drives,
        "Bytes per second over whole steps, and what the drive gave while it was busy.",
    ),
)
_WITHOUT = {
    "losses": "The run ended before its first step.",
    "steps": "The run ended before its first step.",
    "timeline": "No trace was recorded; run with --record.",
    "tiers": "No rows per step were recorded; run with --record.",
    "drives": "No rows per step were recorded, or nothing lay on drives.",
}


def page(record: RunRecord) -> str:
    """The whole page.

    Raises:
        ConfigError: plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    figures: dict[str, Any] = {}
    parts = [_heading(record), _overview(record)]
    for name, title, make, caption in _SECTIONS:
        figure = make(record)
        parts.append(f'<h2 id="{name}">{title}</h2>')
        if figure is None:
            parts.append(f"<p>{_WITHOUT[name]}</p>")
            continue
        figures[f"figure-{name}"] = json.loads(figure.to_json()) | {"config": _CONFIG}
        parts.append(f'<p>{caption}</p><figure id="figure-{name}" tabindex="0" aria-label="{title}"></figure>')
    parts += [_stalls(record), _prediction(record), _wear(record), _settings(record)]
    for figure in figures.values():
        figure["layout"].pop("template", None)
    data = json.dumps(figures).replace("</", "<\\/")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(record.name)} · Infinity</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>'
        "<body>\n"
        + "\n".join(parts)
        + f'\n<script type="application/json" id="figures">{data}</script>\n<script>{get_plotlyjs()}</script>\n'
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _heading(record: RunRecord) -> str:
    names = [(name, title) for name, title, _, _ in _SECTIONS]
    names += [("stalls", "Stalls"), ("prediction", "Prediction"), ("wear", "Wear"), ("settings", "Settings")]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in names)
    keys = "Figures: drag to move, wheel to zoom; with the keyboard, Tab to one, then ← → + − and 0 for all of it."
    return f"<h1>Run {escape(record.name)}</h1><nav>{links}</nav><p>{keys}</p>"


def _overview(record: RunRecord) -> str:
    run = record.run
    steps = run["step_seconds"]
    losses = run["losses"]
    facts = [
        ("parameters", f"{run['model']['parameters']:,}"),
        ("state", format_nbytes(int(run["model"]["state_bytes"]))),
        ("steps", f"{len(steps)}"),
        ("last loss", f"{losses[-1]:.4f}" if losses else "none"),
        ("median step", f"{sorted(steps)[len(steps) // 2]:.3f} s" if steps else "none"),
        ("waited", f"{_share(run):.0%} of the time" if steps else "none"),
        ("device budget", format_nbytes(int(run["budgets"]["device"]))),
        ("host budget", format_nbytes(int(run["budgets"]["host"]))),
    ]
    if run.get("peak_rss_bytes"):
        facts.append(("peak of the process", format_nbytes(int(run["peak_rss_bytes"]))))
    if run.get("baseline"):
        equal = run["baseline"].get("parameters_equal") and run["baseline"]["losses"] == losses
        facts.append(("beside plain PyTorch", "every bit equal" if equal else "different"))
    return "<dl>" + "".join(f"<div><dt>{n}</dt><dd>{escape(v)}</dd></div>" for n, v in facts) + "</dl>"


def _share(run: dict[str, Any]) -> float:
    total = sum(run["step_seconds"])
    return min(run["stalls"].get("total", 0.0) / total, 1.0) if total else 0.0


def _stalls(record: RunRecord) -> str:
    causes = {c: s for c, s in record.run["stalls"].items() if c != "total" and s > 0}
    rows = [
        (cause.replace("_", " "), f"{seconds:.3f} s", remedy_of(cause))
        for cause, seconds in sorted(causes.items(), key=lambda item: -item[1])
    ]
    body = _table(("waited for", "seconds", "what removes it"), rows) if rows else "<p>Nothing was waited for.</p>"
    return f'<h2 id="stalls">Stalls</h2>{body}'


def _prediction(record: RunRecord) -> str:
    found = record.run.get("prediction") or {}
    rows = [(key.replace("_", " "), _shown(value)) for key, value in found.items() if isinstance(value, int | float)]
    body = _table(("", ""), rows) if rows else "<p>The run was too short for a prediction of its own.</p>"
    return f'<h2 id="prediction">Predicted and measured</h2>{body}'


def _wear(record: RunRecord) -> str:
    rows = [(str(one.get("device", "")), str(one.get("text", ""))) for one in record.run.get("wear", [])]
    body = _table(("drive", ""), rows) if rows else "<p>Nothing was written to drives.</p>"
    return f'<h2 id="wear">Wear</h2>{body}'


def _settings(record: RunRecord) -> str:
    parts = ['<h2 id="settings">Settings and environment</h2>']
    for title in ("environment", "config"):
        if record.run.get(title):
            text = escape(json.dumps(record.run[title], indent=2))
            parts.append(f"<details open><summary>{title}</summary><pre tabindex='0'>{text}</pre></details>")
    return "".join(parts)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
