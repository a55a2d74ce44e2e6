"""The result as JSON in the shape of fio's own output, which fio-plot and other tools read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infinity.bench.fio import Comparison
from infinity.bench.profiles import Order, Workload
from infinity.bench.recommend import config_block
from infinity.bench.result import BenchResult, MemoryReport
from infinity.bench.statistics import Latencies, Spread, shares
from infinity.bench.tier import Series
from storage.types import Op

_NAMES = {100: "read", 0: "write"}


def to_json(result: BenchResult) -> dict[str, Any]:
    """fio's object, and beside it what fio has no place for, in keys of our own.

    Times are in the units of fio: `runtime` in milliseconds, latencies in nanoseconds, `bw` in KiB/s, `bw_bytes` in
    bytes/s.
    """
    report: dict[str, Any] = {
        **_frame(result, [_job(series, number) for number, series in enumerate(result.series)]),
        "machine": result.machine,
        "drives": [asdict(drive) for drive in result.drives],
        "memory": _memory(result.memory) if result.memory else None,
        "sustained": [asdict(one) for one in result.sustained],
        "config": config_block(result),
        "notes": result.notes,
        "written_bytes": result.written_nbytes,
        "elapsed_s": round(result.elapsed_s, 3),
    }
    if result.comparisons:
        report["compare_fio"] = _comparisons(result)
    return report


def to_files(result: BenchResult) -> dict[str, dict[str, Any]]:
    """File name to fio's object, one workload in each: fio-plot takes the jobs of one file for parts of one job."""
    files = {}
    for number, series in enumerate(result.series):
        name = "-".join([*series.workload.name.lower().replace("/", "-").split(), series.engine.value])
        files[f"{number:03d}-{name}.json"] = _frame(result, [_job(series, 0)])
    return files


def _frame(result: BenchResult, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    now_s = time.time()
    return {
        "fio version": f"infinity-{result.machine['infinity']}",
        "timestamp": int(now_s),
        "timestamp_ms": int(now_s * 1000),
        "time": time.ctime(now_s),
        "global options": {},
        "jobs": jobs,
        "disk_util": [],
    }


def _memory(report: MemoryReport) -> dict[str, Any]:
    rates = [
        {
            "name": rate.name,
            "threads": rate.threads,
            "unit": rate.unit,
            "alone": _spread(rate.alone),
            "beside_disk": _spread(rate.beside_disk) if rate.beside_disk else None,
            "disk_bytes_per_s": rate.disk_bytes_per_s,
        }
        for rate in report.rates
    ]
    return {"rates": rates, "notes": list(report.notes)}


def _job(series: Series, number: int) -> dict[str, Any]:
    """All repeats of a workload as one job."""
    workload = series.workload
    runtime_s = sum(run.elapsed_s for run in series.runs)
    return {
        "jobname": f"{workload.name} {series.engine.value}",
        "groupid": number,
        "error": 0,
        "eta": 0,
        "elapsed": max(1, round(runtime_s)),
        "job options": _options(series),
        "read": _direction(series, Op.READ, runtime_s),
        "write": _direction(series, Op.WRITE, runtime_s),
        "trim": _nothing(),
        "job_runtime": round(runtime_s * 1000),
        "usr_cpu": 100 * sum(run.cpu.user_s for run in series.runs) / runtime_s,
        "sys_cpu": 100 * sum(run.cpu.system_s for run in series.runs) / runtime_s,
        "ctx": 0,
        "majf": 0,
        "minf": 0,
        "iodepth_level": {str(workload.depth): 100.0},
        **{f"latency_{unit}": rows for unit, rows in shares(series.latencies_ns()).items()},
        "repeats": {
            "bw_bytes": _spread(series.bytes_per_s),
            "cpu_s_per_gb": _spread(series.cpu_s_per_gb),
            "python_us_per_operation": _spread(series.python_us_per_operation),
        },
    }


def _options(series: Series) -> dict[str, str]:
    workload = series.workload
    return {
        "name": workload.name,
        "filename": ":".join(series.directories),
        "rw": rw_of(workload),
        "rwmixread": str(workload.read_percent),
        "bs": str(workload.block_nbytes),
        "transfer": str(workload.transfer_nbytes),
        "iodepth": str(workload.depth),
        "numjobs": "1",
        "direct": "0" if series.engine.is_cached else "1",
        "ioengine": f"infinity-{series.engine.value}",
    }


def rw_of(workload: Workload) -> str:
    """The workload in fio's words."""
    return ("rand" if workload.order is Order.RANDOM else "") + _NAMES.get(workload.read_percent, "rw")


def _direction(series: Series, op: Op, runtime_s: float) -> dict[str, Any]:
    nbytes = sum(run.moved_nbytes[op] for run in series.runs)
    latencies = series.latencies(op)
    if not latencies.count:
        return _nothing()
    rates = series.rate(op)
    # A transfer of several blocks counts as so many operations, as the drive saw it.
    operations = nbytes // series.workload.block_nbytes
    per_operation = nbytes / operations
    return {
        "io_bytes": nbytes,
        "io_kbytes": nbytes // 1024,
        "bw_bytes": round(rates.median),
        "bw": round(rates.median / 1024),
        "iops": rates.median / per_operation,
        "runtime": round(runtime_s * 1000),
        "total_ios": operations,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": _latency(Latencies(0, 0, 0, 0.0, 0.0, {})),
        "clat_ns": _latency(latencies, with_percentiles=True),
        "lat_ns": _latency(latencies),
        **_samples("bw", rates, 1024.0),
        "bw_agg": 100.0,
        **_samples("iops", rates, per_operation),
    }


def _samples(name: str, rates: Spread, divisor: float) -> dict[str, float]:
    values = [value / divisor for value in rates.values]
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    last = "dev" if name == "bw" else "stddev"
    return {
        f"{name}_min": round(min(values)),
        f"{name}_max": round(max(values)),
        f"{name}_mean": mean,
        f"{name}_{last}": deviation,
        f"{name}_samples": len(values),
    }


def _nothing() -> dict[str, Any]:
    empty = Latencies(0, 0, 0, 0.0, 0.0, {})
    numbers = ("io_bytes", "io_kbytes", "bw_bytes", "bw", "runtime", "total_ios", "short_ios", "drop_ios")
    return {
        **dict.fromkeys(numbers, 0),
        "iops": 0.0,
        **{f"{kind}_ns": _latency(empty) for kind in ("slat", "clat", "lat")},
        **_samples("bw", Spread((0.0,)), 1.0),
        "bw_agg": 0.0,
        **_samples("iops", Spread((0.0,)), 1.0),
    }


def _latency(latencies: Latencies, *, with_percentiles: bool = False) -> dict[str, Any]:
    report: dict[str, Any] = {
        "min": latencies.least_ns,
        "max": latencies.most_ns,
        "mean": latencies.mean_ns,
        "stddev": latencies.deviation_ns,
        "N": latencies.count,
    }
    if with_percentiles:
        report["percentile"] = {f"{p:.6f}": value for p, value in latencies.percentiles_ns.items()}
    return report


def _spread(spread: Spread) -> dict[str, Any]:
    return {"median": spread.median, "min": spread.lowest, "max": spread.highest, "values": list(spread.values)}


def _comparisons(result: BenchResult) -> dict[str, Any]:
    """The first directory's workloads at the top, every directory's under `directories`."""
    by_directory = {name: _comparison_of(rows) for name, rows in result.comparisons.items()}
    first = next(iter(result.comparisons))
    return {
        **by_directory[first],
        "directory": first,
        "directories": by_directory,
        "fio_version": result.fio_version,
    }


def _comparison_of(rows: Sequence[Comparison]) -> dict[str, Any]:
    return {_NAMES.get(row.workload.read_percent, "mixed"): _compared(row) for row in rows}


def _compared(row: Comparison) -> dict[str, Any]:
    return {
        "engine": row.engine.value,
        "fio_engine": row.setup.engine,
        "fio_huge_pages": row.setup.huge_pages,
        "ours": row.our_bytes_per_s.median,
        "fio": row.fio_bytes_per_s.median,
        "ratio": row.ratio,
        "paired_ratio": _spread(row.paired_ratio),
        "ours_values": list(row.our_bytes_per_s.values),
        "fio_values": list(row.fio_bytes_per_s.values),
        "ours_cpu_s_per_gb": row.our_cpu_s_per_gb.median,
        "fio_cpu_s_per_gb": row.fio_cpu_s_per_gb.median,
        "cpu_ratio": row.cpu_ratio,
        "block_bytes": row.workload.block_nbytes,
        "depth": row.workload.depth,
    }
