"""Checks what `infinity train --json` wrote: it learned, moved bytes, kept its budgets and equals plain PyTorch."""

import json
import sys
from pathlib import Path

KEYS = (
    *("config", "model", "first_step", "losses", "grad_norms", "step_seconds", "tokens_per_second", "peak_rss_bytes"),
    *("budgets", "peaks", "traffic", "stalls", "io_engine", "prediction"),
)
STEPS = 6


def check(path: Path) -> None:
    """Raises AssertionError with what is wrong."""
    run = json.loads(path.read_text())
    missing = [key for key in KEYS if key not in run]
    assert not missing, f"missing {missing}"
    losses, steps = run["losses"], run["traffic"]["per_step"]
    assert len(losses) == len(steps) == len(run["step_seconds"]) == STEPS
    assert losses[-1] < losses[0], f"the loss did not fall: {losses}"
    budgets, peaks = run["budgets"], run["peaks"]
    assert run["model"]["state_bytes"] > budgets["device"] + budgets["host"], f"the state fits in {budgets}"
    assert all(peaks[tier] <= budgets[tier] for tier in ("device", "host")), f"peaks {peaks}, budgets {budgets}"
    assert all(step["nvme_read_bytes"] > 0 and step["nvme_write_bytes"] > 0 for step in steps[1:])
    baseline = run.get("baseline")
    if baseline is not None:
        assert baseline["parameters_equal"] is True
        assert baseline["losses"] == losses
    print(f"{path.name}: {run['model']['parameters']} parameters, losses {losses[0]:.4f} to {losses[-1]:.4f}")


for name in sys.argv[1:]:
    check(Path(name))
