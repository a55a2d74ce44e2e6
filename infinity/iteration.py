"""One training or evaluation iteration as the hooks see it: what is gathered, harvested and released when."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from infinity.call_counts import CallCounts
from infinity.config import DeviceKind
from infinity.conversions import CONVERSIONS, keep_or_refuse
from infinity.dtype_notes import note_dtypes
from infinity.durable.journal import Journal
from infinity.errors import DeviceOutOfMemoryError, IterationError, UnsupportedModelError, cause_for
from infinity.graph_ages import GraphAges, refuse_create_graph
from infinity.groups import FlatGroup, Unit
from infinity.hooks import GraphTasks, watch_outputs
from infinity.lending import Lending
from infinity.lockstep import Want
from infinity.observe.shortages import hand_on_report
from infinity.observe.timeline import UnitTimeline
from infinity.occupancy import Occupancy
from infinity.order import Access, Mode, Phase
from infinity.released import fresh_grad, set_fresh_grad
from infinity.released_uses import ReleasedUses, differentiates, refuse_outside
from infinity.repeats import Repeats
from infinity.runs import OpenRuns, Run
from infinity.runtime import Runtime
from infinity.shortage import explain_shortage
from infinity.structure import Structure
from infinity.territory import Territory
from infinity.torch_compat import in_backward
from infinity.updates import Updates

_ON_USE = "gathered on use"
_log = logging.getLogger(__name__)


class Iteration:
    """Implements `hooks.UnitEvents` and `released.Access`. Used by the training thread."""

    def __init__(self, runtime: Runtime, updates: Updates, journal: Journal | None = None) -> None:
        self._runtime = runtime
        self._updates = updates
        self._journal = journal
        self._timeline = UnitTimeline(runtime.trace, runtime.held())
        self._runs = OpenRuns(self._end_run)
        self._tasks = GraphTasks(self._runs.end_task, self.end_backward)
        self._mode = Mode.TRAIN
        self._occupancy = Occupancy(runtime.model)
        self._structure: Structure | None = None
        self._is_in_forward = False  # an outermost forward has begun and has not been seen to end
        self._calls = CallCounts()
        self._used_elsewhere: set[int] = set()
        self._used_in_forward: set[int] = set()  # by the forward under way, outside of the parameters' units
        self._uses = ReleasedUses(runtime.groups, runtime.gatherer.is_gathered)
        self._resident = {group.index for group in runtime.resident_groups}
        self._lending = Lending(group for group in runtime.groups if group.index not in self._resident)
        self._unit_of = {index: min(g.units) for index, g in enumerate(runtime.groups)}
        self._repeats = Repeats(self._release)
        self._ages = GraphAges(runtime.states)

    def watch_structure(self, territory: Territory) -> None:
        """From now on the modules have to keep their parameters; the stand-ins are in place."""
        self._structure = Structure(territory, self._runtime.groups)

    # Forward ---------------------------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        if in_backward() or not self._occupancy.enter(backward_is_open=self._tasks.any_open):
            return
        runtime = self._runtime
        self._updates.consistency.check()
        if self._tasks.any_open:
            _log.warning("the last backward failed; its gradients are discarded")
            self._abandon()
        elif self._is_in_forward:  # see [Note: interrupted forwards]
            self._drop_forward()
        if self._structure is not None:
            self._structure.refuse_changed()
        if torch.is_grad_enabled():
            runtime.sink.spill_kept()
        self._is_in_forward = True
        runtime.gatherer.release_unviewed()  # now: what this forward saves for its backward cannot be told from views
        self._mode = Mode.TRAIN if torch.is_grad_enabled() else Mode.EVAL
        self._updates.warn_without_optimizer()
        if self._journal is not None:
            self._journal.forward_begins(trains=self._mode is Mode.TRAIN)
        self._calls.begin_forward(trains=self._mode is Mode.TRAIN)
        self._repeats.begin()
        runtime.order.begin(self._mode)
        runtime.passage.mode = self._mode
        trace, position = runtime.order.upcoming()
        runtime.io.post(runtime.read_ahead.begin, self._mode, trace, position)

    def leave_forward(self, output: Any) -> Any:
        """What the caller of the forward gets; `output` is None when it failed."""
        if output is None:
            self._updates.consistency.notice_failure()
            note_dtypes(sys.exception(), self._runtime)
        if not in_backward() and self._occupancy.leave():
            self._is_in_forward = False
            self._repeats.make_way()
            used = [self._runtime.groups[index] for index in sorted(self._used_in_forward)]
            self._used_in_forward.clear()
            for group in used:
                self._runtime.gatherer.release(group, _ON_USE)
            if used and output is not None and torch.is_grad_enabled():
                ages = self._ages.of(used)
                watch_outputs(output, lambda: self._pre_backward_on_use(used, ages))
            self._calls.end_forward(output)
            self._meet_after_forward(is_complete=output is not None)
            return self._lending.take_back(output)
        return output

    def pre_forward(self, unit: Unit) -> None:
        recomputing = in_backward()
        if recomputing:
            self._tasks.join()  # what it gathers is released at the end, though no backward may ever come by here
        else:
            self._occupancy.check()
        if self._gather(unit, Phase.BACKWARD if recomputing else Phase.FORWARD):
            self._upload_ahead()
        if not recomputing:
            self._calls.called(unit)
            self._timeline.begins(unit, Phase.FORWARD)

    def post_forward(self, unit: Unit, output: Any) -> None:
        self._refuse_edited(unit)
        # In a recomputation the coming backward needs the unit; the end of its run or of backward frees it.
        if not in_backward():
            self._timeline.ends(unit, Phase.FORWARD)
            self._gather_on_use(self._lending.groups_in(output))
            self._repeats.run_over(unit)

    # Backward --------------------------------------------------------------------------------------------------

    def before_backward(self, run: Run) -> Callable[[], None]:
        ages = self._ages.of(run.unit.groups)
        return lambda: self._begin_run(run, ages)

    def behind_backward(self, run: Run) -> None:
        self._runs.pass_by(run)

    def join_backward(self) -> None:
        """A backward reaches parameters of this engine. Idempotent."""
        self._tasks.join()
        refuse_create_graph()
        self._updates.check_backward()

    def _begin_run(self, run: Run, ages: Sequence[int]) -> None:
        self.join_backward()
        self._runs.begin(run)
        unit = run.unit
        self._ages.refuse_stale(unit.groups, ages)
        is_fetched = self._gather(unit, Phase.BACKWARD)
        self._expect_gradients(unit.groups)
        if is_fetched:  # behind the gradients, for which it would have to give way, and be read once more
            self._upload_ahead()
        self._timeline.begins(unit, Phase.BACKWARD)

    def _end_run(self, unit: Unit) -> None:
        self._timeline.ends(unit, Phase.BACKWARD)
        is_over = self._calls.end_backward_of(unit)
        if is_over:
            self._refuse_edited_with_gradient([group for group in unit.trainable() if self._has_one_user(group)])
        self._repeats.run_over(unit)  # before the updates, which may change the memory that it computes with
        for group in unit.trainable():
            self._harvest(group, is_final=is_over and self._has_one_user(group))

    def end_backward(self) -> None:
        """The last open graph task ends: harvest and release everything that is left."""
        runtime = self._runtime
        waiting = runtime.sink.pending()
        others = [g for g in runtime.groups if g.trainable and g not in waiting]
        self._refuse_edited_with_gradient([*waiting, *others])
        self._repeats.forget()
        runtime.gatherer.release_all()
        for group in (*waiting, *others):  # first those that hold memory, which their updates give back
            self._harvest(group, is_final=True)
        runtime.sink.end_backward()
        self._calls.end_backward()
        if runtime.lockstep is not None:
            runtime.lockstep.end(Want.END_BACKWARD)

    def end_step(self) -> None:
        """The optimizer step is over: counts start again."""
        self._calls.clear()
        self._timeline.note_held()

    def refuse_failed(self) -> None:
        """A step is about to use the gradients.

        Raises:
            IterationError: the last backward failed and left some of them out.
        """
        if self._tasks.any_open and not in_backward():
            raise IterationError(
                "the last backward failed before it was over, so only some gradients are there. Call "
                "optimizer.zero_grad() and run forward and backward again"
            )

    def refuse_inside(self, what: str) -> None:
        """Something is about to happen that no forward or backward may see.

        Raises:
            IterationError: one is under way.
        """
        if self._occupancy.is_inside or in_backward():
            raise IterationError(f"{what} between two steps, but a forward or a backward is under way")
        self.refuse_failed()

    def discard(self) -> None:
        """Forget all gradients; a backward that failed, or a forward that was interrupted, is forgotten with them."""
        if self._tasks.any_open and not in_backward():
            self.reset()
            return
        if self._is_in_forward and self._occupancy.has_gone():
            self._drop_forward()
        self._updates.gradients.discard()

    def reset(self) -> None:
        """Abandon a failed iteration: nothing gathered, no gradient, no open graph task. The engine is usable again."""
        self._occupancy.clear()
        self._abandon()

    def _abandon(self) -> None:
        self._tasks.clear()
        self._runs.clear()
        self._drop_forward()
        self.end_step()
        for group in self._runtime.groups:
            for parameter in group.parameters:
                set_fresh_grad(parameter, None)
        self._updates.gradients.discard()
        self._updates.abandon()

    def _drop_forward(self) -> None:
        """Nothing of a forward that was interrupted is left; gradients that wait stay."""
        self._is_in_forward = False
        self._runtime.activations.abandon()
        self._calls.drop_forward()
        self._used_in_forward.clear()
        self._repeats.forget()
        self._runtime.gatherer.release_all()
        self._runtime.gatherer.claims.end_all()

    # Gather on use ---------------------------------------------------------------------------------------------

    # What a use leaves in the graph (a view, a product with one, a second use of what was gathered by then) cannot be
    # followed, so these groups are gathered again when the backward of the whole forward begins.

    def use_released(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation touches released parameters: gather them inside a forward or backward, refuse outside."""
        if differentiates(func):
            return self._uses.differentiate(func, args, kwargs)
        used = self._uses.among(args, kwargs)
        if not self._occupancy.is_inside and not in_backward():
            if func in CONVERSIONS:
                return keep_or_refuse(func, used[0], args, kwargs)
            refuse_outside(func, used[0].ref.name)
        groups = list({leaf.ref.group.index: leaf.ref.group for leaf in used}.values())
        self._gather_on_use(groups)
        return self._uses.call(func, args, kwargs)

    def _gather_on_use(self, groups: Iterable[FlatGroup]) -> None:
        phase = Phase.BACKWARD if in_backward() else Phase.FORWARD
        for group in groups:
            self._used_elsewhere.add(group.index)
            self._used_in_forward.add(group.index)
            if self._gather_group(group, _ON_USE, phase):
                self._record(Access(phase, self._unit_of[group.index]))

    def _pre_backward_on_use(self, groups: Sequence[FlatGroup], ages: Sequence[int]) -> None:
        self.join_backward()
        self._ages.refuse_stale(groups, ages)
        self._gather_on_use(groups)
        self._expect_gradients(groups)

    # Parts -----------------------------------------------------------------------------------------------------

    def _meet_after_forward(self, *, is_complete: bool) -> None:
        """Others may still need this rank's shards; and the user's code may use collectives of its own now."""
        lockstep = self._runtime.lockstep
        if lockstep is None:
            return
        error = sys.exception()
        if error is not None and not is_complete:
            lockstep.collectives.note_error(error)  # the reason, should this rank end
        elif self._runtime.config.stage == 3:
            lockstep.end(Want.END_FORWARD)

    def _harvest(self, group: FlatGroup, *, is_final: bool) -> None:
        fresh = [slot for slot, parameter in enumerate(group.parameters) if fresh_grad(parameter) is not None]
        if fresh:
            self._updates.refuse_second(group)
        for slot in fresh:
            self._updates.gradients.refuse_arrival(group, slot)
        with self._runtime.trace.phase(group.key, "gradient"):
            self._runtime.sink.harvest(group, is_final=is_final)
            self._runtime.sink.settle(group)
        if is_final:
            self._updates.complete([group])

    def _gather(self, unit: Unit, phase: Phase) -> bool:
        """Whether it was not there already."""
        self._repeats.make_way(unit)
        fetched = False
        for group in unit.groups:
            if group.index not in self._resident:
                fetched |= self._gather_group(group, unit.index, phase)
        if fetched:
            self._record(Access(phase, unit.index))
        return fetched

    def _gather_group(self, group: FlatGroup, user: Hashable, phase: Phase) -> bool:
        try:
            with self._runtime.trace.phase(group.key, "gather"):
                return self._runtime.gatherer.gather(group, user, phase)
        except DeviceOutOfMemoryError as error:
            explained = self._explained(error)
            raise explained from cause_for(explained, error)

    def _expect_gradients(self, groups: Iterable[FlatGroup]) -> None:
        try:
            for group in groups:
                if group.trainable:
                    self._runtime.sink.expect(group)
        except DeviceOutOfMemoryError as error:
            explained = self._explained(error)
            raise explained from cause_for(explained, error)

    def _explained(self, error: DeviceOutOfMemoryError) -> DeviceOutOfMemoryError:
        """Say which budget works, when it is the way in which the model uses its units that needs more memory."""
        runtime, repeated = self._runtime, self._calls.called_several_times()
        elsewhere = [runtime.groups[index] for index in self._used_elsewhere - self._resident]
        explained = explain_shortage(error, runtime.placement, runtime.units, repeated, elsewhere)
        hand_on_report(error, explained)
        return explained

    def _record(self, access: Access) -> None:
        if self._repeats.is_repetition(access):
            return
        runtime = self._runtime
        name = runtime.units[access.unit].name
        runtime.trace.add(name, f"use {access.phase.value}", time.perf_counter(), 0.0)
        runtime.order.record(access)
        trace, position = runtime.order.upcoming()
        runtime.io.post(runtime.read_ahead.moved, runtime.order.mode, trace, position)

    def _upload_ahead(self) -> None:
        """Start the upload of the next unit, where the device copies while it computes."""
        runtime = self._runtime
        if runtime.device.kind is not DeviceKind.CUDA:
            return
        trace, position = runtime.order.upcoming()
        if position < len(trace):
            upcoming = trace[position]
            for group in runtime.units[upcoming.unit].groups:
                if group.index not in self._resident:
                    runtime.gatherer.upload_ahead(group, upcoming.phase)

    def _refuse_edited(self, unit: Unit) -> None:
        gatherer = self._runtime.gatherer
        for group in unit.groups:
            if gatherer.edited(group) and not gatherer.is_held(group):
                self._release(unit)
                raise UnsupportedModelError(
                    f"the forward of {unit.name!r} changes its parameters in place, and the change would be lost. "
                    "Change them between forwards, inside `with infinity.gathered(module):`"
                )

    def _refuse_edited_with_gradient(self, groups: Sequence[FlatGroup]) -> None:
        """What the updates of groups would refuse, which are about to be released."""
        pending = self._runtime.sink.pending()
        fresh = [g for g in groups if g in pending or any(fresh_grad(p) is not None for p in g.parameters)]
        self._updates.refuse_edited(fresh)

    def _release(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.index not in self._resident:
                self._runtime.gatherer.release(group, unit.index)

    def _has_one_user(self, group: FlatGroup) -> bool:
        return len(group.units) == 1 and group.index not in self._used_elsewhere
