"""Every kind of model gives the bits of plain PyTorch under every schedule, and moves the bytes of the closed forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from tests.conftest import MakeEngine
from tests.parity.loops import Loop, assert_parity
from tests.zoo import Attention, Frozen, Nested, Net, OddNet, Skipping

SCHEDULES = ("overlapped", "synchronous", "deferred")

# Models in which every unit runs once per forward: their traffic is a closed form.
REGULAR: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "non-reentrant": partial(Net, checkpointing="nr"),
    "reentrant": partial(Net, checkpointing="re"),
    "one region": partial(Net, checkpointing="span"),
    "nested regions": partial(Net, checkpointing="nested"),
    "dropout": partial(Net, dropout=0.3),
    "dropout recomputed": partial(Net, dropout=0.3, checkpointing="nr"),
    "attention": Attention,
    "frozen": Frozen,
    "frozen bf16": partial(Frozen, frozen_dtype=torch.bfloat16),
    "odd shapes": OddNet,
    "nested units": Nested,
    "tied": partial(Net, tied=True),
    "tied recomputed": partial(Net, tied=True, checkpointing="re"),
}
# The order of their backward is known after one step, in which something may be read that the next one finds there.
LEARNED = ("one region", "nested regions")
IRREGULAR: dict[str, Callable[[], nn.Module]] = {
    "repeated": partial(Net, repeat=3),
    "repeated recomputed": partial(Net, repeat=2, checkpointing="nr"),
    "repeated reentrant": partial(Net, repeat=2, checkpointing="re"),
    "skipping": Skipping,
    "frozen embedding": partial(Frozen, trains_embedding=False),
    "nested units recomputed": partial(Nested, checkpointing="nr"),
    "nested units reentrant": partial(Nested, checkpointing="re"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", REGULAR)
def test_regular(offload: MakeEngine, schedule: str, model: str) -> None:
    from_step = 2 if model in LEARNED else 0
    assert_parity(Loop(REGULAR[model]), offload, schedule=schedule, traffic_from_step=from_step)


@pytest.mark.somewhere
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", IRREGULAR)
def test_irregular(offload: MakeEngine, schedule: str, model: str) -> None:
    assert_parity(Loop(IRREGULAR[model], steps=8), offload, schedule=schedule, check_traffic=False)
