"""What a run wears off its drives, as predicted: bytes written against what the makers rate the drives for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.hardware import Drive
from infinity.sizes import format_nbytes

_SECONDS_OF_A_DAY = 86_400.0
_FILLS_SHARE = 0.99  # of what a cache drains in a step: as much fills it, sooner or later


@dataclass(frozen=True, slots=True)
class DriveWear:
    """One drive. `None` where its endurance is not known or nothing is written.

    Attributes:
        written_per_step_nbytes: bytes.
        share_per_1000_steps: of the rated endurance.
        steps_to_rating: steps after which the rated bytes are written.
        days_to_rating: the same at the predicted speed, day and night.
        warning: in words; empty when there is nothing to say.
    """

    name: str
    written_per_step_nbytes: int
    share_per_1000_steps: float | None
    steps_to_rating: float | None
    days_to_rating: float | None
    warning: str


def predict_wear(drives: Sequence[Drive], written_nbytes: Sequence[int], step_s: float) -> list[DriveWear]:
    """Wear of every drive of a node, of which a step writes `written_nbytes`, by drive."""
    return [_wear(drive, nbytes, step_s) for drive, nbytes in zip(drives, written_nbytes, strict=True)]


def steps_to_rating(drive: Drive, written_per_step_nbytes: float) -> float | None:
    """Steps until the rated bytes are written."""
    if not drive.endurance_nbytes or not written_per_step_nbytes:
        return None
    return drive.endurance_nbytes / written_per_step_nbytes


def _wear(drive: Drive, written_nbytes: int, step_s: float) -> DriveWear:
    steps = steps_to_rating(drive, written_nbytes)
    days = steps * step_s / _SECONDS_OF_A_DAY if steps is not None else None
    share = 1000 / steps if steps is not None else None
    return DriveWear(drive.name, written_nbytes, share, steps, days, _warning(drive, written_nbytes, step_s))


def _warning(drive: Drive, written_nbytes: int, step_s: float) -> str:
    """What a fast cache does not take, of one step or of many."""
    cache_nbytes, drained_bytes_per_s = drive.model.slc_nbytes, drive.model.write_bytes_per_s
    if not cache_nbytes:
        return ""
    cache = f"the fast cache of {format_nbytes(int(cache_nbytes))}"
    falls = f"the drive falls to {drained_bytes_per_s / 1e9:.1f} GB/s"
    if written_nbytes > cache_nbytes:
        return f"a step writes {format_nbytes(written_nbytes)}, more than {cache}: {falls}"
    if written_nbytes >= drained_bytes_per_s * step_s * _FILLS_SHARE:
        return f"steps write as fast as {cache} is drained, so it fills up: {falls}"
    return ""
