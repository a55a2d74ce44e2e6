"""What became of every setting of another engine: the configuration it gives here, and the lines for the loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from infinity.config import Config


class Outcome(StrEnum):
    """What becomes of a setting."""

    MAPPED = "mapped"  # the same thing is a setting here
    LOOP = "in your loop"  # the other engine did it; here a line of the training loop does
    BETTER = "better default"  # chosen or measured here
    UNNEEDED = "unneeded"  # works around something that does not happen here, or has no effect on the numbers
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"  # no setting of the other engine either


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting of the file: its dotted name, its value, and what became of it."""

    key: str
    value: object
    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True)
class Migration:
    """A file of settings, translated: `str(migration)` is the report."""

    config: Config
    findings: tuple[Finding, ...]
    loop: tuple[str, ...]

    def with_outcome(self, outcome: Outcome) -> list[Finding]:
        """The findings of one kind, in the order of the file."""
        return [finding for finding in self.findings if finding.outcome is outcome]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `config` (what differs from the defaults), `loop` (lines of code), `findings`."""
        return {
            "config": self.config.model_dump(mode="json", exclude_unset=True),
            "loop": list(self.loop),
            "findings": [
                {"key": f.key, "value": f.value, "outcome": f.outcome.value, "text": f.text} for f in self.findings
            ],
        }

    def __str__(self) -> str:
        lines: list[str] = []
        for outcome in Outcome:
            findings = self.with_outcome(outcome)
            if findings:
                lines.append(f"{outcome.value}:")
                lines += [f"  {f.key} = {f.value!r}: {f.text}" for f in findings]
        lines.append("in Python:")
        return "\n".join([*lines, *(f"  {line}" for line in self.loop)])
