"""From the transfers of a run to how fast its drives are: alone in a direction, and beside the other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from infinity.observe.trace import TraceEvent
from infinity.plan.drives import DriveModel
from infinity.plan.phases import Step
from storage.types import Op

INSTANT_BYTES_PER_S = 1e18
_OPS = tuple(op.value for op in Op)
_LEAST_BUSY_S = 1e-4
_LEAST_SHARE = 0.01  # of the time of both that a direction gets while both wait


@dataclass(slots=True)
class _Phase:
    """Time in which certain directions were busy, and the bytes that moved in it."""

    seconds: float = 0.0
    read_nbytes: float = 0.0
    write_nbytes: float = 0.0


def fit_drives(
    steps: Sequence[Step], events: Sequence[TraceEvent], directories: Sequence[str]
) -> tuple[DriveModel, ...]:
    """Every drive as it was while something was in flight, in the order of `directories`."""
    return tuple(
        _fit([event for event in events if event.track == directory and event.category in _OPS], steps)
        for directory in directories
    )


def _fit(transfers: Sequence[TraceEvent], steps: Sequence[Step]) -> DriveModel:
    phases = {(reads, writes): _Phase() for reads in (False, True) for writes in (False, True)}
    for first, last in steps:
        for seconds, read_rate, write_rate in _rates(transfers, first.at_s, last.at_s):
            phase = phases[read_rate > 0, write_rate > 0]
            phase.seconds += seconds
            phase.read_nbytes += seconds * read_rate
            phase.write_nbytes += seconds * write_rate
    reads, writes, both = phases[True, False], phases[False, True], phases[True, True]
    read, read_part = _alone((reads.seconds, reads.read_nbytes), (both.seconds, both.read_nbytes))
    write, write_part = _alone((writes.seconds, writes.write_nbytes), (both.seconds, both.write_nbytes))
    return _model(read, write, read_part, write_part)


def _rates(transfers: Iterable[TraceEvent], begin_s: float, end_s: float) -> Iterator[tuple[float, float, float]]:
    """Spans of time in which the same transfers were in flight: seconds, and bytes/s read and written.

    A transfer moves its bytes evenly from its submission to its end.
    """
    turns: list[tuple[float, str, float, int]] = []
    for each in transfers:
        start_s, stop_s = max(each.start_s, begin_s), min(each.start_s + each.duration_s, end_s)
        if stop_s > start_s:
            rate = each.nbytes / each.duration_s
            turns += [(start_s, each.category, rate, 1), (stop_s, each.category, -rate, -1)]
    rates, counts, at_s = dict.fromkeys(_OPS, 0.0), dict.fromkeys(_OPS, 0), begin_s
    for time_s, op, rate, count in sorted(turns):
        if time_s > at_s:
            read_rate, write_rate = (rates[way] if counts[way] else 0.0 for way in (Op.READ.value, Op.WRITE.value))
            yield time_s - at_s, read_rate, write_rate
            at_s = time_s
        rates[op] += rate
        counts[op] += count


def _alone(alone: tuple[float, float], beside: tuple[float, float]) -> tuple[float, float]:
    """Rate of a direction alone, in bytes/s, and the part of it that it keeps beside the other one.

    Args:
        alone, beside: seconds and bytes. What is slower alone than beside the other waits for something else then, such
            as its own latency with nothing queued: it has one rate.
    """
    (alone_s, alone_nbytes), (beside_s, beside_nbytes) = alone, beside
    if alone_s + beside_s < _LEAST_BUSY_S:
        return INSTANT_BYTES_PER_S, 1.0
    mean = (alone_nbytes + beside_nbytes) / (alone_s + beside_s)
    if min(alone_s, beside_s) < _LEAST_BUSY_S or alone_nbytes / alone_s <= beside_nbytes / beside_s:
        return mean, 1.0
    return alone_nbytes / alone_s, beside_nbytes / beside_s * alone_s / alone_nbytes


def _model(read: float, write: float, read_part: float, write_part: float) -> DriveModel:
    """The drive that has these rates alone and keeps these parts of them beside each other.

    Where no drive of this model keeps so little of both, the parts count, and its rates alone are lower.
    """
    less, more = sorted((read_part, write_part))
    duplex = min(max(1 - (1 - more) / less, 0.0), 1.0)
    share = min(max(read_part / (read_part + write_part), _LEAST_SHARE), 1 - _LEAST_SHARE)
    model = DriveModel(read, write, latency_s=0.0, duplex=duplex, read_share=share)
    reads, writes = model.utilisation()
    return DriveModel(read * min(read_part / reads, 1.0), write * min(write_part / writes, 1.0), 0.0, duplex, share)
