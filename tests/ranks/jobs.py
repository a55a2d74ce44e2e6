"""What the ranks of a test run; each function is called in a process of its own, with torchrun's environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.ranks.training import Case, Outcome, train_share


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_cases(folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    """Several runs, one after another, started by nothing but the environment."""
    outcomes = []
    for number, case in enumerate(cases):
        outcomes.append(train_share(folder / f"swap{number}", case, *rank_and_size()))
        assert not list((folder / f"swap{number}").rglob("*.swap"))
    return outcomes
