"""DeepSpeed's learning-rate schedules as lines of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.migration.report import Outcome

_HF = "transformers"


def scheduler_line(values: Mapping[str, Any]) -> tuple[Outcome, str]:
    """The line that builds the schedule of `scheduler.type`; `values` are the settings by dotted name."""

    def of(name: str, default: object) -> object:
        value = values.get(f"scheduler.params.{name}", default)
        return default if value == "auto" else value

    warmup, total = of("warmup_num_steps", "warmup_steps"), of("total_num_steps", "total_steps")
    kind = values.get("scheduler.type")
    if kind == "WarmupLR":
        line = f"{_HF}.get_constant_schedule_with_warmup(optimizer, {warmup})"
    elif kind == "WarmupDecayLR":
        line = f"{_HF}.get_linear_schedule_with_warmup(optimizer, {warmup}, {total})"
    elif kind == "WarmupCosineLR":
        line = f"{_HF}.get_cosine_schedule_with_warmup(optimizer, {warmup}, {total})"
    elif kind == "OneCycle":
        peak = of("cycle_max_lr", "max_lr")
        line = f"torch.optim.lr_scheduler.OneCycleLR(optimizer, {peak}, total_steps=total_steps)"
    else:
        return Outcome.UNSUPPORTED, "use a scheduler of torch.optim.lr_scheduler or transformers; all work unchanged"
    return Outcome.LOOP, f"scheduler = {line}  # and scheduler.step() after optimizer.step()"
