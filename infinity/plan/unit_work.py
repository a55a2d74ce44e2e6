"""What the units of a model compute; for our own transformer without running it.

Its forward on the meta device would say the same (`infinity.plan.tracing`, with which tests compare this), a second
later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infinity.models.gpt import VOCABULARY, GptShape
from infinity.units import RESIDENT_NAME

LOGSUMEXP_NBYTES = 4  # what fused attention keeps of each row of its matrix, in fp32
_INDEX_NBYTES = 8


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What one micro-batch computes in a unit.

    Attributes:
        forward_flops: floating-point operations of one forward.
        saved_nbytes: activations that are kept until the backward, when nothing is recomputed.
        boundary_nbytes: what the unit returns, which is kept in any case.
    """

    forward_flops: float
    saved_nbytes: int
    boundary_nbytes: int


def gpt_work(
    shape: GptShape, units: Sequence[str], seq: int, batch: int, itemsize: int
) -> tuple[dict[str, UnitWork], tuple[str, ...]] | None:
    """The work of every unit of a `Gpt`, and their names in the order of their forwards.

    Args:
        units: names of those that are not resident, in the order of the model.
        itemsize: bytes of one number in an activation.

    Returns:
        None where it is cut otherwise than between its blocks, or where attention copies less than it mostly does.
    """
    if 1 in (seq, shape.heads, shape.hidden // shape.heads):  # what lies side by side already need not be put there
        return None
    parts = dict(_parts(shape, seq, batch, itemsize))
    if not parts.keys() >= set(units):
        return None
    work = {name: parts[name] for name in units}
    work[RESIDENT_NAME] = _sum_of(part for name, part in parts.items() if name not in work)
    return work, tuple(name for name in parts if name in units)


def _sum_of(parts: Iterator[UnitWork]) -> UnitWork:
    """Of what lies outside of all units, whose results nobody keeps as such."""
    flops, saved_nbytes = 0.0, 0
    for part in parts:
        flops += part.forward_flops
        saved_nbytes += part.saved_nbytes
    return UnitWork(flops, saved_nbytes, 0)


def _parts(shape: GptShape, seq: int, batch: int, itemsize: int) -> Iterator[tuple[str, UnitWork]]:
    """Modules of a `Gpt` by name, and what it does itself, in the order of its forward."""
    tokens, h = batch * seq, shape.hidden
    stream_nbytes = tokens * h * itemsize
    statistics_nbytes = 2 * tokens * itemsize  # of a norm: mean and deviation of every token
    yield "tokens", UnitWork(0.0, tokens * _INDEX_NBYTES, stream_nbytes)
    yield "positions", UnitWork(0.0, seq * _INDEX_NBYTES, seq * h * itemsize)
    # Inputs of both norms and of all products, of which the inner ones of the MLP are four times as wide; queries, keys
    # and values, attention's result as it comes, and what comes out of the GELU.
    kept = 2 + 3 + 1 + (1 + 1 + 1) + 4 + 4
    block = UnitWork(
        2.0 * tokens * (12 * h * h + 2 * seq * h),
        kept * stream_nbytes + 2 * statistics_nbytes + tokens * shape.heads * LOGSUMEXP_NBYTES,
        stream_nbytes,
    )
    for number in range(shape.layers):
        yield f"blocks.{number}", block
    logits_nbytes = tokens * VOCABULARY * itemsize
    yield "norm", UnitWork(0.0, stream_nbytes + statistics_nbytes, stream_nbytes)
    yield "head", UnitWork(2.0 * tokens * h * VOCABULARY, stream_nbytes, logits_nbytes)
    yield "loss", UnitWork(0.0, logits_nbytes + itemsize, 0)  # log-probabilities, and the weight of all targets
