"""The result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from infinity.bench.fio import Comparison
from infinity.bench.profiles import Workload
from infinity.bench.recommend import config_block
from infinity.bench.result import BenchResult, Drive, MemoryReport
from infinity.bench.statistics import Latencies, Spread
from infinity.bench.sustained import Sustained
from infinity.bench.tier import Series
from infinity.sizes import KIB, MIB, format_nbytes

_MB, _MIB = 1e6, float(MIB)


def show(result: BenchResult) -> RenderableType:
    """Every table, what a reader should know, and the configuration block."""
    parts: list[RenderableType] = [Text(_machine_line(result)), *(Text(_drive_line(drive)) for drive in result.drives)]
    for directories in dict.fromkeys(series.directories for series in result.series):
        parts.append(_series_table([one for one in result.series if one.directories == directories], directories))
    for directory, rows in result.comparisons.items():
        parts.append(_comparison_table(rows, directory, result.fio_version))
    if result.memory is not None:
        parts.append(_memory_table(result.memory))
        parts += [Text(note) for note in result.memory.notes]
    if result.sustained:
        parts.append(_sustained_table(result.sustained))
    parts += [Text(note) for note in result.notes]
    parts.append(Text(f"written to drives: {format_nbytes(result.written_nbytes)} in {result.elapsed_s:.0f} s"))
    if block := config_block(result):
        parts += [Text("\nto paste into the file given to infinity train --config:\n"), Text(block)]
    return Group(*parts)


def _machine_line(result: BenchResult) -> str:
    machine = result.machine
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {format_nbytes(machine['memory_bytes'])}, {machine['system']}, "
        f"load {machine['load']}"
    )


def _drive_line(drive: Drive) -> str:
    device = ", ".join(str(drive.device[key]) for key in ("device", "model") if key in drive.device)
    known = [part for part in (drive.file_system, device) if part]
    engine = "direct I/O" if drive.direct_problem is None else "through the page cache"
    line = f"{drive.directory}: {', '.join([*known, engine])}, file of {format_nbytes(drive.file_nbytes)}"
    return "; ".join([line, *drive.notes])


def _new_table(title: str, first: Iterable[str], figures: Iterable[str]) -> Table:
    """Where there is little room names are folded first; a figure is worth nothing without its last digits."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in first:
        table.add_column(name, overflow="fold", vertical="bottom")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _series_table(rows: Sequence[Series], directories: Sequence[str]) -> Table:
    title = f"{' + '.join(directories)}{' together' if len(directories) > 1 else ''}, median of the repeats"
    figures = ("MB/s", "MiB/s", "spread", "IOPS", "p50", "p99", "p99.9", "CPU\ns/GB", "Python\nµs/op")
    table = _new_table(title, ("engine", "profile", "mix", "size"), figures)
    for row in rows:
        rate, latencies = row.bytes_per_s, row.latencies()
        table.add_row(
            row.engine.value,
            row.workload.profile,
            row.workload.mix,
            size_of(row.workload),
            f"{rate.median / _MB:,.0f}",
            f"{rate.median / _MIB:,.0f}",
            percent(rate),
            f"{rate.median / row.workload.block_nbytes:,.0f}",
            *(milliseconds(latencies, p) for p in (50.0, 99.0, 99.9)),
            f"{row.cpu_s_per_gb.median:.3f}",
            f"{row.python_us_per_operation.median:.1f}",
        )
    return table


def size_of(workload: Workload) -> str:
    """Block size and depth, and the size of a transfer when it has several blocks."""
    block = _short(workload.block_nbytes)
    text = f"{block} x {workload.depth}"
    if workload.transfer_nbytes != workload.block_nbytes:
        text += f" of {_short(workload.transfer_nbytes)}"
    return text


def _short(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def percent(spread: Spread) -> str:
    """Distance between the fastest and the slowest repeat."""
    return f"{spread.relative:.0%}" if len(spread.values) > 1 else ""


def milliseconds(latencies: Latencies, percentile: float) -> str:
    """A percentile, readable."""
    if percentile not in latencies.percentiles_ns:
        return ""
    return f"{latencies.percentiles_ns[percentile] / 1e6:.2f} ms"


def _comparison_table(rows: Sequence[Comparison], directory: str, fio: str) -> Table:
    title = f"{directory}: taking turns with {fio}, medians of {len(rows[0].ours)}"
    figures = ("ours\nMB/s", "fio\nMB/s", "ours\nMiB/s", "fio\nMiB/s", "\nratio", "ratio of pairs")
    cpu = ("ours CPU\ns/GB", "fio CPU\ns/GB", "CPU\nratio")
    table = _new_table(title, ("mix", "size", "our\nengine", "fio's engine"), (*figures, *cpu))
    for row in rows:
        ours, fio_rate, pairs = row.our_bytes_per_s.median, row.fio_bytes_per_s.median, row.paired_ratio
        table.add_row(
            row.workload.mix,
            size_of(row.workload),
            row.engine,
            row.setup.name,
            f"{ours / _MB:,.0f}",
            f"{fio_rate / _MB:,.0f}",
            f"{ours / _MIB:,.0f}",
            f"{fio_rate / _MIB:,.0f}",
            f"{row.ratio:.2f}",
            f"{pairs.median:.2f} ({pairs.lowest:.2f} to {pairs.highest:.2f})",
            f"{row.our_cpu_s_per_gb.median:.3f}",
            f"{row.fio_cpu_s_per_gb.median:.3f}",
            f"{row.cpu_ratio:.2f}",
        )
    return table


def _memory_table(report: MemoryReport) -> Table:
    figures = ("alone", "spread", "beside a busy drive", "share kept", "drive meanwhile")
    table = _new_table("memory, links and kernels", ("what", "threads"), figures)
    for rate in report.rates:
        beside = rate.beside_disk
        table.add_row(
            rate.name,
            str(rate.threads),
            rate_text(rate.alone.median, rate.unit),
            percent(rate.alone),
            "" if beside is None else rate_text(beside.median, rate.unit),
            "" if beside is None else f"{beside.median / rate.alone.median:.0%}",
            "" if rate.disk_bytes_per_s is None else rate_text(rate.disk_bytes_per_s, "bytes/s"),
        )
    return table


def rate_text(value: float, unit: str) -> str:
    """A rate in both kinds of megabytes, or in millions of parameters."""
    if unit == "bytes/s":
        return f"{value / _MB:,.0f} MB/s ({value / _MIB:,.0f} MiB/s)"
    return f"{value / 1e6:,.0f} M parameters/s"


def _sustained_table(rows: Sequence[Sustained]) -> Table:
    table = _new_table("sustained write", ("directory",), ("written", "seconds", "mean", "where it becomes slower"))
    for row in rows:
        cliff = row.cliff
        where = "nowhere"
        if cliff is not None:
            rates = f"{cliff.before_bytes_per_s / _MB:,.0f} to {cliff.after_bytes_per_s / _MB:,.0f} MB/s"
            where = f"after {format_nbytes(cliff.written_nbytes)} ({cliff.at_s:.0f} s): {rates}"
        table.add_row(
            row.directory,
            format_nbytes(row.written_nbytes),
            f"{row.elapsed_s:.1f}",
            rate_text(row.bytes_per_s, "bytes/s"),
            where,
        )
    return table
