"""Kinds of models × schedule, tiers, accumulation, clipping, device: bit for bit what plain PyTorch gives.

The whole matrix has more than six thousand places. Run are those of a covering design, in which every pair of values
of two axes occurs, kinds of models included: one place per kind, with all pairs of settings (fast), and the rest, slow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.conftest import MakeEngine
from tests.covering import Pair, Place, cover, pairs, places
from tests.parity.loops import Loop, Outcome, assert_same, smallest_budget, train_offloaded, train_plain
from tests.parity.test_models_modules import KINDS
from tests.zoo import Attention, Frozen, Nested, Net, OddNet, build

MODELS: dict[str, Callable[[], nn.Module]] = {
    **KINDS,
    "plain": Net,
    "tied": partial(Net, tied=True),
    "checkpointed": partial(Net, checkpointing="nr"),
    "checkpointed reentrantly": partial(Net, checkpointing="re"),
    "nested checkpoints": partial(Net, checkpointing="nested"),
    "repeated": partial(Net, repeat=3),
    "frozen": Frozen,
    "odd": OddNet,
    "nested": Nested,
    "transformer": Attention,
}
AXES: dict[str, tuple[Any, ...]] = {
    "schedule": ("synchronous", "overlapped", "deferred"),
    "host": ("least", "some", "plenty"),
    "accumulate": ((1,), (2,), (1, 3)),
    "clip": ("none", "often"),
    "device": ("cpu", "fake"),
    "drives": (1, 2),
}


def _is_possible(place: Place) -> bool:
    """Whether plain PyTorch can be compared with: overlapped updates begin before all gradients are there.

    A thousand parameters take long to reach the file of the fake device; and plain PyTorch adds up and clips their
    gradients wrongly (see `test_torch_facts.test_gradients_of_a_stack_share_their_memory`).
    """
    is_simple = place["accumulate"] == (1,) and place["clip"] == "none"
    if place["model"] == "many tiny":
        return is_simple and place["device"] == "cpu"
    return is_simple or place["schedule"] != "overlapped"


PLACES = [place for place in places({"model": tuple(MODELS), **AXES}) if _is_possible(place)]


def _one_per_model() -> list[Place]:
    """For every model a place with pairs of settings that none before it has; again from the start when all occur."""
    settings = {pair for place in PLACES for pair in pairs(place) if "model" not in dict(pair)}
    missing: set[Pair] = set()
    chosen = []
    for model in MODELS:
        missing = missing or set(settings)
        mine = [place for place in PLACES if place["model"] == model]
        best = max(mine, key=lambda place: len(pairs(place) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


FAST = _one_per_model()
SLOW = [PLACES[number] for number in cover(PLACES, FAST)]


def _name(place: Place) -> str:
    return "-".join("".join(map(str, v)) if isinstance(v, tuple) else str(v).replace(" ", "_") for v in place.values())


@cache
def _plain(model: str, accumulate: tuple[int, ...], clip: str) -> tuple[Loop, Outcome]:
    loop = Loop(MODELS[model], steps=3, accumulate=accumulate)
    if clip == "often":
        norms = train_plain(replace(loop, max_norm=1e9)).norms
        loop = replace(loop, max_norm=sorted(map(float, norms))[0] / 2)
    return loop, train_plain(loop)


def _check(place: Place, offload: MakeEngine, folder: Path) -> None:
    loop, expected = _plain(place["model"], place["accumulate"], place["clip"])
    paths = [folder / f"drive{number}" for number in range(place["drives"])]
    for path in paths:
        path.mkdir()
    settings: dict[str, Any] = {"schedule": place["schedule"], "nvme": {"paths": paths}}
    least = smallest_budget(offload, "host", build(loop.make), **settings)
    host = {"least": least, "some": 2 * least, "plenty": 64 << 20}[place["host"]]
    device = {"kind": place["device"], "budget": "8MiB"}
    if place["device"] == "fake":
        device["path"] = folder
    ours, engine = train_offloaded(
        loop,
        lambda model: offload(model, host={"budget": host}, device=device, **settings),
        clip_in_optimizer=True,
    )
    assert_same(expected, ours)
    assert engine.metrics()["host/peak_bytes"] <= host


@pytest.mark.parametrize("place", FAST, ids=_name)
def test_every_kind_of_model_somewhere(place: Place, offload: MakeEngine, tmp_path: Path) -> None:
    _check(place, offload, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW, ids=_name)
def test_every_pair_of_model_and_setting(place: Place, offload: MakeEngine, tmp_path: Path) -> None:
    _check(place, offload, tmp_path)


def test_the_design_covers_what_it_says() -> None:
    found, possible = ({pair for place in chosen for pair in pairs(place)} for chosen in (FAST + SLOW, PLACES))
    assert found == possible
    settings = {pair for pair in possible if "model" not in dict(pair)}
    assert settings <= {pair for place in FAST for pair in pairs(place)}
    assert {place["model"] for place in FAST} == MODELS.keys()
    assert len(FAST) + len(SLOW) <= 5 * len(MODELS) < len(PLACES) // 15
