"""From measurements to the settings worth using: a configuration block to paste."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infinity.bench.engines import BenchEngine
from infinity.bench.result import BenchResult
from infinity.bench.tier import Series
from infinity.sizes import KIB, MIB

_PREFERRED = (BenchEngine.DIRECT, BenchEngine.AIO, BenchEngine.BUFFERED)  # of those that were measured
_GOOD_ENOUGH = 0.95  # of the best: what more depth or larger blocks bring beyond that is noise, and costs memory
_LEAST_BLOCK_NBYTES = 256 * KIB  # training moves shards, not pages


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the `nvme` section of `infinity.Config`."""

    engine: BenchEngine
    block_nbytes: int
    threads: int
    why: str


def recommend(series: Sequence[Series]) -> Settings | None:
    """The smallest settings that are about as fast as the best, on every drive; None when nothing tells."""
    usable = [
        one
        for one in series
        if len(one.directories) == 1
        and one.engine is not BenchEngine.AIOFILES
        and one.workload.block_nbytes >= _LEAST_BLOCK_NBYTES
    ]
    if not usable:
        return None
    engine = min((one.engine for one in usable), key=_PREFERRED.index)
    usable = [one for one in usable if one.engine is engine]
    group = _comparable(usable)
    best: dict[tuple[str, ...], float] = {}
    for one in group:
        best[one.directories] = max(best.get(one.directories, 0.0), one.bytes_per_s.median)
    worst_share: dict[tuple[int, int], float] = {}
    for one in group:
        key = (one.workload.block_nbytes, one.workload.depth)
        worst_share[key] = min(worst_share.get(key, 1.0), one.bytes_per_s.median / best[one.directories])
    enough = _GOOD_ENOUGH * max(worst_share.values())
    block, depth = min((k for k, share in worst_share.items() if share >= enough), key=lambda k: (k[0] * k[1], k[1]))
    tried = f"{len(worst_share)} settings" if len(worst_share) > 1 else "one setting"
    why = f"{worst_share[block, depth]:.0%} of the fastest of {tried}, measured on {group[0].workload.profile}"
    return Settings(engine, block, depth, why)


def _comparable(series: Sequence[Series]) -> list[Series]:
    """Of one mix of reads and writes: the sweep, else half and half, else whatever came first."""
    for wanted in (
        [one for one in series if one.workload.profile == "sweep"],
        [one for one in series if one.workload.read_percent == 50],
    ):
        if wanted:
            return wanted
    first = series[0].workload
    return [one for one in series if one.workload.read_percent == first.read_percent]


def config_block(result: BenchResult) -> str:
    """TOML for `infinity train --config`; empty when nothing was measured that tells."""
    settings = recommend(result.series)
    if settings is None:
        return ""
    paths = ", ".join(json.dumps(str(Path(drive.directory).absolute())) for drive in result.drives)
    return (
        f"# {settings.why}\n"
        "[nvme]\n"
        f"paths = [{paths}]\n"
        f'engine = "{settings.engine.value}"\n'
        f"threads = {settings.threads}\n"
        f'block_nbytes = "{_size(settings.block_nbytes)}"\n'
    )


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else f"{nbytes // KIB}KiB"
