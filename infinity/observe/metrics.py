"""Counters of a run: a flat dictionary, and the NVMe and link traffic of every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from infinity.observe.counters import stall_counters, store_counters
from infinity.runtime import Runtime
from storage.checksums import READ_BACK_KIND
from storage.types import Op

Counts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes moved. `per_step[i]` belongs to optimizer step i of this engine; `total` holds everything.

    Keys: `nvme_read_bytes`, `nvme_write_bytes` (payload; alignment padding under `nvme_read_padding_bytes`,
    `nvme_write_padding_bytes`), the same by shard kind (`nvme_read_bytes/param`, `…/state`, `…/grad`), `h2d_bytes`,
    `d2h_bytes`, and `nvme_read_back_bytes`: blocks read only to judge the checksum of a part of them, whose number
    depends on what was written before and is no part of the closed forms. What initialisation wrote is in `total` and
    in `initialisation`; reads ahead for a step that never ran, and what checkpoints move, are in `total` only.
    """

    per_step: list[Counts]
    initialisation: Counts
    total: Counts


def _empty() -> Counts:
    keys = ("nvme_read_bytes", "nvme_write_bytes", "nvme_read_padding_bytes", "nvme_write_padding_bytes")
    counts: Counts = defaultdict(int)
    for key in (*keys, "nvme_read_back_bytes", "h2d_bytes", "d2h_bytes"):
        counts[key] = 0
    for kind in ("param", "state", "grad"):
        counts[f"nvme_read_bytes/{kind}"] = counts[f"nvme_write_bytes/{kind}"] = 0
    return counts


def _sum(rows: Iterable[Counts]) -> Counts:
    total = _empty()
    for row in rows:
        for key, value in row.items():
            total[key] += value
    return total


class TrafficBook:
    """Makes `Traffic` of the counters. Notes the link counters at every step. Used by the training thread.

    Args:
        before: what an earlier runtime of the same engine has moved.
    """

    def __init__(self, runtime: Runtime, before: Traffic | None = None) -> None:
        self._runtime = runtime
        self._before = before or Traffic([], {}, {})
        self._first = len(self._before.per_step)
        self._links: list[tuple[int, int]] = [self._link_totals()]

    def _link_totals(self) -> tuple[int, int]:
        link = self._runtime.device.traffic
        return link.h2d_nbytes, link.d2h_nbytes

    def step_ended(self) -> None:
        """A step is over; those before it that were lost, or interrupted behind their updates, end here too."""
        ended = self._first + len(self._links) - 1
        self._links += [self._link_totals()] * (self._runtime.step - ended)

    def read(self) -> Traffic:
        """The traffic so far. Writes still under way are counted when they land."""
        by_step: dict[int, Counts] = defaultdict(_empty)
        if self._runtime.store is not None:
            for record in self._runtime.store.stats.snapshot():
                counts = by_step[record.tag.step]
                if record.tag.kind == READ_BACK_KIND:
                    counts["nvme_read_back_bytes"] += record.moved_nbytes
                    continue
                way = "read" if record.op is Op.READ else "write"
                counts[f"nvme_{way}_bytes"] += record.payload_nbytes
                counts[f"nvme_{way}_bytes/{record.tag.kind}"] += record.payload_nbytes
                counts[f"nvme_{way}_padding_bytes"] += record.moved_nbytes - record.payload_nbytes
        steps = self._first + len(self._links) - 1
        for number, step in enumerate(range(self._first, steps)):
            before, after = self._links[number], self._links[number + 1]
            by_step[step]["h2d_bytes"] += after[0] - before[0]
            by_step[step]["d2h_bytes"] += after[1] - before[1]
        others = [by_step[step] for step in by_step if step >= steps or step < -1]
        per_step = [dict(by_step[step]) for step in range(self._first, steps)]
        initialisation = dict(by_step[-1])
        total = _sum([*per_step, initialisation, *others, self._before.total])
        first = self._before.initialisation or initialisation
        return Traffic([*self._before.per_step, *per_step], first, dict(total))


def metrics_of(runtime: Runtime) -> dict[str, float]:
    """One flat dictionary of everything that is counted. Bytes end in `_bytes`, seconds in `_s`."""
    flat: dict[str, float] = {"step": runtime.step}
    flat |= store_counters(runtime.store)
    flat["nvme/capacity_bytes"] = runtime.placement.nvme_nbytes
    flat["host/budget_bytes"] = runtime.placement.host_budget_nbytes
    flat["host/held_bytes"] = runtime.pool.leased_nbytes
    flat["host/peak_bytes"] = runtime.pool.peak_nbytes
    flat["device/budget_bytes"] = runtime.device.budget.limit_nbytes
    flat["device/held_bytes"] = runtime.device.budget.used_nbytes
    flat["device/peak_bytes"] = runtime.device.budget.peak_nbytes
    for name, budget in runtime.budgets.items():
        if name != "device":
            flat[f"host/{name}_peak_bytes"] = budget.peak_nbytes
    link = runtime.device.traffic
    flat["link/h2d_bytes"], flat["link/d2h_bytes"] = link.h2d_nbytes, link.d2h_nbytes
    flat["link/shared_bytes"] = link.shared_nbytes
    if runtime.lockstep is not None:
        flat["ranks/sent_bytes"] = runtime.lockstep.collectives.sent_nbytes
        flat["ranks/received_bytes"] = runtime.lockstep.collectives.received_nbytes
        flat["ranks/rounds"], flat["ranks/served"] = runtime.lockstep.rounds, runtime.lockstep.served
    flat |= stall_counters(runtime.stalls)
    flat["readahead/reads_ahead"] = runtime.read_ahead.counts["ahead"]
    flat["readahead/reads_on_demand"] = runtime.read_ahead.counts["demand"]
    for name, count in runtime.gatherer.claims.waits.items():
        flat[f"readahead/gathers_{name}"] = count
    flat["order/hits"] = runtime.order.hits
    flat["order/misses"] = runtime.order.misses
    flat["optimizer/chunks"] = runtime.pipeline.chunks_done
    return flat
