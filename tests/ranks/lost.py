"""A step that fails on some ranks while updated spans are traded, and what all of them do then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import infinity
from storage.backends.base import Backend
from storage.backends.faulty import Fault, FaultyBackend
from storage.errors import StorageError
from storage.types import IoRequest, Op
from tests.parity.loops import gathered_parameters
from tests.ranks.jobs import rank_and_size
from tests.ranks.training import make_config
from tests.zoo import Net, batch, build, loss_of

_SETTINGS: dict[str, Any] = {"schedule": "synchronous", "host": {"budget": "800KiB"}, "rank_timeout_s": 20.0}


def _is_parameter(request: IoRequest) -> bool:
    return "/state" not in request.key and "/grad" not in request.key


def lose_a_step(folder: Path, stage: int, failing: Sequence[int], op: Op) -> list[dict[str, Any]]:
    """A run in which all goes well, and one in which drives fail."""
    return [_two_steps(folder / "whole", stage, [], op), _two_steps(folder / "lost", stage, failing, op)]


def _two_steps(folder: Path, stage: int, failing: Sequence[int], op: Op) -> dict[str, Any]:
    """Two steps, of which the second is made again after the drives of some ranks have failed in it."""
    rank, size = rank_and_size()
    drives: list[FaultyBackend] = []

    def wrap(backend: Backend) -> Backend:
        drives.append(FaultyBackend(backend))
        return drives[-1]

    model = build(Net)
    folder.mkdir(exist_ok=True)
    nvme = {"paths": [folder / "swap"], "io_timeout_s": 10.0}
    config = make_config(folder, _SETTINGS | {"stage": stage, "nvme": nvme})
    said = ""
    with infinity.offload(model, config, wrap_backend=wrap) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

        def backward(step: int) -> None:
            loss_of(model, batch(step).repeat(size, 1).chunk(size)[rank]).backward()  # type: ignore[no-untyped-call]

        backward(0)
        optimizer.step()
        optimizer.zero_grad()
        engine.save(folder / "saved")
        if failing:
            backward(1)
            engine._runtime.sink.check_writes()
            if rank in failing:
                drives[-1].inject(Fault.IO_ERROR, op=op, when=_is_parameter, times=None)
            try:
                optimizer.step()
            except (StorageError, infinity.InfinityError) as error:
                said = f"{type(error).__name__}: {error}"
            drives[-1].clear()
            engine.load(folder / "saved", optimizer=optimizer)
        backward(1)
        optimizer.step()
        optimizer.zero_grad()
        held = [copy.group.key for copy in engine._runtime.copies if copy.is_claimed]
        return {"said": said, "parameters": gathered_parameters(model), "held": held}
