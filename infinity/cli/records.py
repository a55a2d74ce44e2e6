"""What a run writes down while it goes on, and what is left of it at the end. Plain data; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infinity.observe.names import stalls_between

Counters = dict[str, float]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. `counters` are the engine's, as they stood when the step ended (they only grow)."""

    step: int
    loss: float
    grad_norm: float | None
    seconds: float
    tokens: int
    counters: Counters
    before: Counters

    def moved(self, name: str) -> float:
        """How much a counter grew during this step."""
        return self.counters.get(name, 0.0) - self.before.get(name, 0.0)

    def stalls(self) -> dict[str, float]:
        """Seconds that this step waited, by cause."""
        found = stalls_between(self.before, self.counters)
        return {cause: seconds for cause, seconds in found.items() if cause != "total"}

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step by its seconds, over all ranks."""
        return self.tokens / self.seconds

    def rate(self, name: str) -> float:
        """Growth of a counter per second of this step."""
        return self.moved(name) / self.seconds

    def to_json(self) -> dict[str, Any]:
        """One line of the metrics file."""
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "step_seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "nvme_read_bytes_per_second": self.rate("nvme/read_bytes"),
            "nvme_write_bytes_per_second": self.rate("nvme/write_bytes"),
            "stall_seconds": self.moved("stall/total_s"),
            "counters": self.counters,
        }


@dataclass(slots=True)
class PlainRun:
    """What the same training in plain PyTorch gave. Hashes by parameter name."""

    losses: list[float]
    grad_norms: list[float | None]
    step_seconds: list[float]
    peak_rss_bytes: int
    hashes: dict[str, str] = field(default_factory=dict)


def seconds_of_a_step(step_seconds: list[float]) -> float:
    """Mean without the first step, which reads no state and fills caches; 0 when there is none."""
    counted = step_seconds[1:] or step_seconds
    return sum(counted) / len(counted) if counted else 0.0
