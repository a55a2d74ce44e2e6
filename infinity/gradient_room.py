"""Host memory for gradients: whole or in parts, who waits for it, and who makes room.

Used by the training thread only; transfers and updates give memory back on other threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial

from infinity.errors import PlacementError
from infinity.gradient_measures import MeasuredGradients
from infinity.gradient_parts import CopyPart, take_parts
from infinity.gradient_spill import GradientSpill
from infinity.gradient_ways import GradientWay
from infinity.gradients import GroupGradient, gradient_key, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.host_block import HostBlock
from infinity.observe.stalls import StallCause, StallClock
from storage.budget import Reservation, TierBudget
from storage.pool import HostPool


class GradientRoom(MeasuredGradients):
    """The gradients that wait for their update, with the host memory that they take.

    Args:
        held: budget for gradients that stay in host memory until their update.
        transit: budget for gradients on their way to and from the swap file.
        spill: where gradients go that cannot stay in host memory.
        updates_in_flight: whether an update is running that will give held memory back.
        updates_awaited: entered while the sink waits for memory that updates give back.
        start_waiting: starts updates that wait for their groups to be used, and hold memory; False when there are none.
        advice: the end of the sentence that tells that there is no host memory for a gradient: why it cannot wait in
            the swap files, and what to do.
    """

    def __init__(
        self,
        *,
        pool: HostPool,
        spill: GradientSpill,
        held: TierBudget,
        transit: TierBudget,
        updates_in_flight: Callable[[], bool],
        updates_awaited: Callable[[], AbstractContextManager[None]],
        start_waiting: Callable[[], bool],
        advice: Callable[[], str],
        stalls: StallClock,
    ) -> None:
        super().__init__()
        self._pool = pool
        self._spill = spill
        self._held = held
        self._transit = transit
        self._updates_in_flight = updates_in_flight
        self._updates_awaited = updates_awaited
        self._start_waiting = start_waiting
        self._advice = advice
        self._stalls = stalls

    @abstractmethod
    def _spill_now(self, gradient: GroupGradient) -> None:
        """Let a gradient that is in host memory wait in the swap file."""

    def _way(self, group: FlatGroup, *, is_whole: bool, is_final: bool) -> GradientWay:
        """The way of what arrives of a group's gradient now; see `GradientWays.of`."""
        gradient, is_measured = self._gradients.get(group.index), self.wants_norms or self.wants_peaks
        ways = self._spill.ways
        return ways.of(group.index, gradient, is_whole=is_whole, is_final=is_final, is_measured=is_measured)

    def _take_parts(self, gradient: GroupGradient, copy: CopyPart) -> None:
        part_numel = self._spill.ways.part_numel
        if part_numel is None:
            raise RuntimeError(f"the gradient of {gradient.group.key} waits for more: it does not come in parts")
        with self._awaiting_updates() as begin:
            reserve = partial(self._reserve, gradient.group, begin)
            take_parts(gradient, part_numel, self._pool, reserve, copy)

    def _take_memory(self, gradient: GroupGradient) -> None:
        """Host memory for a whole gradient; see `_reserve`."""
        group, nbytes = gradient.group, gradient_nbytes(gradient.group)
        self._spill_open(group, nbytes)
        with self._awaiting_updates() as begin:
            reservation = self._reserve(group, begin, nbytes)
        gradient.block = HostBlock.take(self._pool, reservation, gradient_key(group))

    @contextmanager
    def _awaiting_updates(self) -> Iterator[Callable[[], object]]:
        """What is called in this block when it begins to wait for memory that updates give back."""
        with ExitStack() as awaited:
            yield cache(lambda: awaited.enter_context(self._updates_awaited()))

    def _reserve(self, group: FlatGroup, begin_waiting: Callable[[], object], nbytes: int) -> Reservation:
        """Host memory for a gradient or a part of it, waiting until there is room.

        Raises:
            PlacementError: there will be none before the end of backward.
        """
        budget = self._transit if self._spill.is_planned(group) else self._held
        with self._stalls.reporting():
            reservation = budget.request(nbytes, gradient_key(group))

        def check() -> None:
            # In this order: an update gives its memory back before it counts as finished.
            is_moving = self._updates_in_flight() or self._spill.is_writing
            is_stuck = not is_moving and not reservation.done
            if is_stuck and not self._start_waiting() and not self._spill_held(group):
                raise PlacementError(
                    f"no host memory for the gradient of {group.key}: the gradients held now ({budget.holders()}) wait "
                    "for the end of backward, because their parameters were used outside their modules, or their "
                    f"modules several times, and {self._advice()}"
                )

        try:
            with self._stalls.reporting():
                check()
            if budget is self._held and not reservation.done:
                begin_waiting()
            self._stalls.wait(reservation, StallCause.GRADIENT_SPACE, check)
        except BaseException:
            reservation.release()
            raise
        return reservation

    def _spill_held(self, group: FlatGroup) -> bool:
        """Let a gradient that waits for the end of backward wait in the swap file. False when that is not possible."""
        for other in list(self._gradients.values()) if self._spill.store is not None else []:
            is_like = self._spill.is_planned(other.group) == self._spill.is_planned(group)
            if other.group is not group and other.block is not None and is_like:
                self._spill_now(other)
                return True
        return False

    def _spill_open(self, group: FlatGroup, nbytes: int) -> None:
        """Where transit has not so much memory for a group, gradients that were read back too early give theirs.

        Those that wait for the step do where there will be none either when all writes under way are over.
        """
        is_planned = self._spill.is_planned
        if not is_planned(group) or self._transit.free_nbytes >= nbytes:
            return
        others = [g for g in self._gradients.values() if g.group is not group and g.block is not None]
        staying = [gradient_nbytes(g.group) for g in others if self._spill.is_lasting(g.group)]
        is_full = sum(staying) + nbytes > self._transit.limit_nbytes
        for other in others:
            if is_planned(other.group) and (is_full or not self._spill.is_lasting(other.group)):
                self._spill_now(other)
