"""Wear of the drives in a training loop: what a run writes goes into their ledger, and `nvme.wear_budget` is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from infinity.config import WearAction
from infinity.engine import Engine
from infinity.lockstep import Want
from infinity.plan.wear_guard import WearGuard, WearReport
from storage.closing import Closing

_log = logging.getLogger(__name__)


class WearWatch(Closing):
    """Watches what an engine writes to its drives. Used by the training thread; several ranks have one each.

    Bytes are entered in the ledger of the drives (`~/.local/state/infinity/wear.sqlite3`) while the run lasts and when
    the block ends, however it ends. `infinity train` does the same by itself.

    Args:
        engine: must stay open for as long as this is used.
        tell: given each warning once; default: the log.
        pause: given the seconds of a pause, which `wear_action = "slow"` makes between steps.

    Example:
        ```python
        with infinity.offload(model, config) as engine, WearWatch(engine) as wear:
            for batch in loader:
                ...
                optimizer.step()
                if wear.step_ended():
                    engine.save("ckpt")
                    break
        ```
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tell: Callable[[str], None] = _log.warning,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._tell = tell
        self._pause = pause
        nvme = engine.config.nvme
        self._stops = nvme.wear_budget is not None and nvme.wear_action is WearAction.STOP
        self._guard = WearGuard.of_store(engine._runtime.store, nvme.wear_budget, nvme.wear_action)

    def step_ended(self, *, is_last: bool = False) -> bool:
        """Call it after each optimizer step, on all ranks: it warns or pauses as `nvme.wear_action` says.

        Args:
            is_last: no step follows, so there is nothing to pause for.

        Returns:
            Whether the budget is spent and the action is "stop", the same on all ranks: save, and end the loop.
        """
        verdict = self._guard.step_ended()
        if verdict.message:
            self._tell(verdict.message)
        if self._any_rank(must_stop=verdict.must_stop):
            return True
        if verdict.pause_s and not is_last:
            self._pause(verdict.pause_s)
        return False

    def report(self) -> list[WearReport]:
        """What each drive took in since this was made, by the run's own count and by the drive's."""
        return self._guard.report()

    def close(self) -> None:
        """Enter what has been written since the last time. Idempotent; before the engine closes."""
        self._guard.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._engine.is_closed:
                self._engine.metrics()  # waits for the writes of the last step, which count too
        finally:
            self.close()

    def _any_rank(self, *, must_stop: bool) -> bool:
        lockstep = self._engine._runtime.lockstep
        if not self._stops or lockstep is None:
            return must_stop
        return any(brought[0] for brought in lockstep.meet(Want.WEAR, int(must_stop)))
