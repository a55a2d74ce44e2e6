"""The result as one page that needs nothing else: no scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from infinity.bench.recommend import config_block
from infinity.bench.result import BenchResult
from infinity.bench.statistics import Spread
from infinity.bench.svg import Bar, Line, bars, lines
from infinity.bench.tables import milliseconds, percent, rate_text, size_of
from infinity.bench.tier import Series
from infinity.sizes import MIB, format_nbytes

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.85rem; width: 100%; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid rgba(128, 128, 128, 0.3); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
figure { margin: 1.2rem 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: currentColor; }
pre { padding: 0.8rem; background: rgba(128, 128, 128, 0.15); overflow-x: auto; }
"""


def to_html(result: BenchResult) -> str:
    """The whole page."""
    parts = [
        "<h1>infinity bench tier</h1>",
        _table(("what", "value"), _facts(result)),
        *(_drive_part(result, directories) for directories in _groups(result)),
        _comparison_part(result),
        _memory_part(result),
        _sustained_part(result),
        _notes_part(result),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>infinity bench tier</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines_of = ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines_of)}</table></div>'


def _facts(result: BenchResult) -> list[tuple[str, str]]:
    facts = [(name, format_nbytes(v) if name == "memory_bytes" else str(v)) for name, v in result.machine.items()]
    for drive in result.drives:
        device = " ".join(str(drive.device[key]) for key in ("device", "model") if key in drive.device)
        facts.append((drive.directory, "; ".join(filter(None, (drive.file_system, device, *drive.notes)))))
    facts.append(("written to drives", format_nbytes(result.written_nbytes)))
    return facts


def _groups(result: BenchResult) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(series.directories for series in result.series))


def _drive_part(result: BenchResult, directories: tuple[str, ...]) -> str:
    rows = [series for series in result.series if series.directories == directories]
    engines = list(dict.fromkeys(row.engine for row in rows))
    plot = bars([_bar(row, engines.index(row.engine)) for row in rows], "Throughput, median and range of the repeats")
    head = ("workload", "engine", "size", "MB/s", "MiB/s", "spread", "p50", "p99", "p99.9", "CPU s/GB", "Python µs/op")
    return f"<h2>{escape(' + '.join(directories))}</h2>{plot}{_latency_plot(rows)}" + _table(
        head, (_series_cells(row) for row in rows)
    )


def _bar(row: Series, group: int) -> Bar:
    return _side(f"{row.workload.name} {size_of(row.workload)} {row.engine.value}", row.bytes_per_s, group)


def _latency_plot(rows: Sequence[Series]) -> str:
    """Of single blocks only: the time of a large transfer says little about the drive."""
    single = [row for row in rows if row.workload.transfer_nbytes == row.workload.block_nbytes][:5]
    plotted = [
        Line(row.workload.name, tuple((p, ns / 1e6) for p, ns in row.latencies().percentiles_ns.items() if p <= 99))
        for row in single
    ]
    return lines(plotted, "Latency of single blocks", "percentile", "ms") if plotted else ""


def _series_cells(row: Series) -> tuple[str, ...]:
    rate, latencies = row.bytes_per_s, row.latencies()
    return (
        row.workload.name,
        row.engine.value,
        size_of(row.workload),
        f"{rate.median / 1e6:,.0f}",
        f"{rate.median / MIB:,.0f}",
        percent(rate),
        *(milliseconds(latencies, p) for p in (50.0, 99.0, 99.9)),
        f"{row.cpu_s_per_gb.median:.3f}",
        f"{row.python_us_per_operation.median:.1f}",
    )


def _comparison_part(result: BenchResult) -> str:
    parts = []
    for directory, rows in result.comparisons.items():
        shown = []
        cells = []
        for row in rows:
            sides = (("infinity", row.our_bytes_per_s), ("fio", row.fio_bytes_per_s))
            shown += [_side(f"{row.workload.mix} {name}", rate, group) for group, (name, rate) in enumerate(sides)]
            cpu = (f"{row.our_cpu_s_per_gb.median:.3f}", f"{row.fio_cpu_s_per_gb.median:.3f}", f"{row.cpu_ratio:.2f}")
            ratios = (f"{row.ratio:.2f}", f"{row.paired_ratio.median:.2f}")
            cells.append((row.workload.mix, row.engine, row.setup.name, *ratios, *cpu))
        head = ("mix", "our engine", "engine of fio", "ratio", "ratio of pairs", "CPU s/GB", "CPU s/GB of fio", "ratio")
        parts.append(bars(shown, f"{directory}, median of {len(rows[0].ours)}, in turns") + _table(head, cells))
    title = f"<h2>Beside {escape(result.fio_version)}</h2>"
    return title + "".join(parts) if parts else ""


def _side(label: str, rate: Spread, group: int) -> Bar:
    return Bar(label, rate.median, rate.lowest, rate.highest, f"{rate.median / 1e6:,.0f} MB/s", group)


def _memory_part(result: BenchResult) -> str:
    if result.memory is None:
        return ""
    rows = [
        (
            rate.name,
            str(rate.threads),
            rate_text(rate.alone.median, rate.unit),
            "" if rate.beside_disk is None else rate_text(rate.beside_disk.median, rate.unit),
        )
        for rate in result.memory.rates
    ]
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.memory.notes)
    head = ("what", "threads", "alone", "beside a busy drive")
    return f"<h2>Memory, links and kernels</h2>{_table(head, rows)}{notes}"


def _sustained_part(result: BenchResult) -> str:
    parts = []
    for row in result.sustained:
        points = tuple((point.written_nbytes / 1e9, point.bytes_per_s / 1e6) for point in row.points)
        parts.append(lines([Line(row.directory, points)], "Sustained write", "GB written", "MB/s"))
        if row.cliff is not None:
            parts.append(
                f"<p>Slower after {row.cliff.written_nbytes / 1e9:,.1f} GB: {row.cliff.before_bytes_per_s / 1e6:,.0f} "
                f"to {row.cliff.after_bytes_per_s / 1e6:,.0f} MB/s.</p>"
            )
    return f"<h2>Sustained write</h2>{''.join(parts)}" if parts else ""


def _notes_part(result: BenchResult) -> str:
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.notes)
    block = config_block(result)
    return notes + (f"<h2>Configuration</h2><pre>{escape(block)}</pre>" if block else "")
