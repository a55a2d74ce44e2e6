"""Allocation: from a placement to the parts of an engine, in the one order in which they can be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from infinity.activations import Activations
from infinity.blueprint import Blueprint
from infinity.checkpoint.saver import Saver
from infinity.chunked_sink import ChunkedGradientSink
from infinity.claims import Claims
from infinity.config import Precision
from infinity.device_memory import DeviceMemory
from infinity.devices.base import LinkCopy
from infinity.durable.committer import Committer
from infinity.ending import end_executor
from infinity.engine_store import create_gradient, open_store
from infinity.flat_memory import FlatMemory
from infinity.gather import Gatherer
from infinity.gradient_blocks import GradientBlocks
from infinity.gradient_sink import GradientSink
from infinity.gradient_spill import GradientSpill
from infinity.gradient_ways import GradientWays
from infinity.groups import Unit, backward_order
from infinity.io_loop import IoLoop
from infinity.link import LinkPatience
from infinity.lockstep import Lockstep
from infinity.observe.inspection import Inspection
from infinity.observe.stalls import StallClock
from infinity.observe.trace import Trace
from infinity.optim.digesting import digests_of, no_digests
from infinity.optim.group_update import GroupUpdate
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.records import GroupState
from infinity.order import AccessOrder
from infinity.passage import TRANSIT_NUMEL, Passage
from infinity.placement import budget_for_all_gradients
from infinity.rank_chunked_sink import ChunkedRankGradientSink
from infinity.rank_gradients import RankGradientSink
from infinity.readahead import ReadAhead
from infinity.residency import HostCopy
from infinity.runtime import Failure, Runtime
from storage.budget import TierBudget
from storage.checksums import Digests
from storage.pool import HostPool
from storage.store import ShardStore
from storage.versioned import VersionedStore


@dataclass(frozen=True, slots=True)
class _Resources:
    """What has to be closed, and what only holds memory."""

    pool: HostPool
    store: ShardStore | None
    io: IoLoop
    worker: ThreadPoolExecutor
    states: dict[int, GroupState]
    budgets: dict[str, TierBudget]
    copies: list[HostCopy]
    trace: Trace
    failure: Failure
    commit_thread: ThreadPoolExecutor
    save_thread: ThreadPoolExecutor


def allocate(plan: Blueprint, stack: ExitStack) -> Runtime:
    """Make the parts; each leaves on `stack` how it is closed.

    Raises:
        SwapFullError and other storage errors: `stack` undoes what was made.
    """
    placement, fields = plan.placement, plan.kernel.fields
    states = {g.index: GroupState.build(g, placement.chunk_numel, fields) for g in plan.groups if g.trainable}
    for state in states.values():
        for record in state.records:
            record.is_durable = placement.is_durable
    register = plan.device.host_register() if plan.config.host.pin is not False else None
    pool = HostPool(placement.host_budget_nbytes, register=register)
    stack.callback(pool.close)
    made: list[Runtime] = []
    stack.callback(_free_memory, made)
    stack.callback(plan.device.close)  # copies under way use the memory that is freed and unpinned next
    trace = Trace()
    store = open_store(plan, states, trace, stack)
    failure = Failure()
    commit_thread = ThreadPoolExecutor(1, thread_name_prefix="infinity-commit")  # starts with its first task
    stack.callback(end_executor, commit_thread, "a commit")
    save_thread = ThreadPoolExecutor(1, thread_name_prefix="infinity-save")  # starts with its first task
    stack.callback(end_executor, save_thread, "a save")
    worker = ThreadPoolExecutor(1, thread_name_prefix="infinity-optimizer")
    stack.callback(end_executor, worker, "an optimizer update")
    io = IoLoop(on_failure=failure.note)
    stack.callback(io.close)  # first of all: its tasks give the worker what to compute
    budgets, copies = _budgets(plan), _copies(plan)
    threads = (commit_thread, save_thread)
    resources = _Resources(pool, store, io, worker, states, budgets, copies, trace, failure, *threads)
    runtime = _connect(plan, resources)
    made.append(runtime)
    _pin_states(runtime)
    return runtime


def _attach(plan: Blueprint, trace: Trace) -> None:
    """Make parameters and stand-ins, and note what moves between host and device."""
    for group in plan.groups:
        group.attach(plan.device.torch_device, plan.access)
    plan.device.traffic.watch(partial(_note_copy, trace))


def _connect(plan: Blueprint, made: _Resources) -> Runtime:
    """The parts that decide, over the resources they decide about."""

    def report() -> str:
        return inspection.report()

    link = LinkPatience(plan.config.nvme.io_timeout_s, report)
    read_ahead = _read_ahead(plan, made, link)

    def preserve(key: str) -> None:
        saver.preserve(key)

    pipeline = _pipeline(plan, made, read_ahead, link, preserve)
    inspection = Inspection(
        made.copies,
        made.budgets,
        made.pool,
        made.store,
        pipeline,
        saved=lambda: saver.progress,
        stalls=lambda: stalls.recent,
    )
    stalls = _stall_clock(plan, made, inspection)
    saver = Saver(made.save_thread, stalls)
    _attach(plan, made.trace)
    in_flight: list[GroupUpdate] = []
    lockstep = Lockstep(plan.collectives, stalls) if plan.collectives is not None else None
    memory = DeviceMemory(plan.device, report)
    blocks = GradientBlocks(memory, stalls)
    passage = _passage(plan, made, stalls, made.budgets["passage"], plan.placement.passage_numel)
    claims = Claims(made.copies, read_ahead, made.io, stalls)
    flat_memory = FlatMemory(plan.device, made.pool, claims)
    gatherer = Gatherer(plan.device, memory, flat_memory, plan.groups, made.copies, claims, passage, stalls, lockstep)
    memory.ask(blocks.free_first, gatherer.free_ahead)
    sink = _sink(plan, made, blocks, passage, stalls, in_flight, lockstep, pipeline)
    if lockstep is not None and isinstance(sink, RankGradientSink):
        lockstep.serve(plan.groups, gatherer.lend, sink.join)
    return Runtime(
        model=plan.model,
        config=plan.config,
        placement=plan.placement,
        units=plan.units,
        groups=plan.groups,
        copies=made.copies,
        states=made.states,
        kernel=plan.kernel,
        optimizer=plan.config.optimizer,
        threads=plan.threads,
        device=plan.device,
        pool=made.pool,
        budgets=made.budgets,
        store=made.store,
        io=made.io,
        stalls=stalls,
        order=_expected_order(plan.units),
        read_ahead=read_ahead,
        pipeline=pipeline,
        passage=passage,
        gatherer=gatherer,
        sink=sink,
        trace=made.trace,
        inspection=inspection,
        failure=made.failure,
        in_flight=in_flight,
        committer=_committer(plan, made, stalls),
        saver=saver,
        activations=_activations(plan, made, stalls),
        lockstep=lockstep,
        wrap_backend=plan.wrap_backend,
    )


def _activations(plan: Blueprint, made: _Resources, stalls: StallClock) -> Activations:
    return Activations(
        plan.config.activations.policy,
        groups=plan.groups,
        device=plan.device,
        pool=made.pool,
        budget=made.budgets["activations"],
        store=made.store,
        stalls=stalls,
    )


def _passage(plan: Blueprint, made: _Resources, stalls: StallClock, budget: TierBudget, chunk_numel: int) -> Passage:
    return Passage(
        store=made.store,
        pool=made.pool,
        budget=budget,
        chunk_numel=chunk_numel,
        device=plan.device,
        stalls=stalls,
    )


def _read_ahead(plan: Blueprint, made: _Resources, link: LinkPatience) -> ReadAhead:
    return ReadAhead(
        store=made.store,
        pool=made.pool,
        window=made.budgets["window"],
        copies=made.copies,
        groups_of_unit=[[g.index for g in unit.groups] for unit in plan.units],
        uses=plan.placement.uses,
        updated_after_backward=plan.placement.updated_after_backward(plan.groups),
        link=link,
        on_failure=made.failure.note,
    )


def _pipeline(
    plan: Blueprint,
    made: _Resources,
    read_ahead: ReadAhead,
    link: LinkPatience,
    preserve: Callable[[str], None],
) -> UpdatePipeline:
    return UpdatePipeline(
        store=made.store,
        pool=made.pool,
        budget=made.budgets["pipeline"],
        kernel=plan.kernel,
        worker=made.worker,
        read_ahead=read_ahead,
        on_failure=made.failure.note,
        on_chunk=lambda name, start_s, duration_s: made.trace.add(name, "optimizer", start_s, duration_s),
        link=link,
        preserve=preserve,
        digests=_digests(plan, made),
    )


def _digests(plan: Blueprint, made: _Resources) -> Callable[[memoryview, int], Digests | None]:
    if made.store is None or not made.store.notes_digests:
        return no_digests
    return partial(digests_of, threads=plan.threads)


def _note_copy(trace: Trace, copy: LinkCopy) -> None:
    way, duration_s = copy.direction.name.lower(), copy.end_s - copy.start_s
    trace.add(copy.label, way, copy.start_s, duration_s, "link", nbytes=copy.nbytes)


def _stall_clock(plan: Blueprint, made: _Resources, inspection: Inspection) -> StallClock:
    return StallClock(
        plan.config.nvme.io_timeout_s,
        progress=inspection.progress,
        report=inspection.report,
        on_stall=made.trace.add_stall,
    )


def _committer(plan: Blueprint, made: _Resources, stalls: StallClock) -> Committer | None:
    if not isinstance(made.store, VersionedStore):
        return None
    return Committer(
        made.store,
        made.commit_thread,
        stalls,
        io_timeout_s=plan.config.nvme.io_timeout_s,
        on_failure=made.failure.note,
    )


def _expected_order(units: Sequence[Unit]) -> AccessOrder:
    streamed = [unit for unit in units if not unit.resident]
    return AccessOrder([unit.index for unit in streamed], [unit.index for unit in backward_order(streamed)])


def _sink(
    plan: Blueprint,
    made: _Resources,
    blocks: GradientBlocks,
    passage: Passage,
    stalls: StallClock,
    in_flight: list[GroupUpdate],
    lockstep: Lockstep | None,
    pipeline: UpdatePipeline,
) -> GradientSink:
    make: Callable[..., GradientSink] = GradientSink
    if plan.placement.spilled_gradients:
        make = ChunkedGradientSink if lockstep is None else ChunkedRankGradientSink
        whole_passage = _passage(plan, made, stalls, made.budgets["transit"], TRANSIT_NUMEL)
        make = partial(make, passage=passage, whole_passage=whole_passage)
    elif lockstep is not None:
        make = RankGradientSink
    if lockstep is not None:
        make = partial(make, lockstep=lockstep)
    make_room = partial(create_gradient, made.store, plan.nvme_budget_nbytes)
    spill = GradientSpill(made.store, stalls, GradientWays.under(plan.placement), make_room)
    sink = make(
        device=plan.device,
        pool=made.pool,
        spill=spill,
        held=made.budgets["gradients"],
        transit=made.budgets["transit"],
        updates_in_flight=lambda: any(not update.written.done and not update.waits for update in in_flight),
        updates_awaited=partial(_awaited, made.io, pipeline),
        start_waiting=partial(_start_waiting, made.io, pipeline, in_flight),
        blocks=blocks,
        advice=lambda: (
            "there are no swap files in which they could. A host.budget of "
            f"{budget_for_all_gradients(plan.request)} bytes holds all gradients; or use schedule='synchronous'"
        ),
        stalls=stalls,
    )
    sink.wants_peaks = plan.config.precision is Precision.FP16
    return sink


@contextmanager
def _awaited(io: IoLoop, pipeline: UpdatePipeline) -> Iterator[None]:
    """While the training thread waits for updates."""
    io.post(pipeline.hasten)
    try:
        yield
    finally:
        io.post(pipeline.relax)


def _start_waiting(io: IoLoop, pipeline: UpdatePipeline, in_flight: list[GroupUpdate]) -> bool:
    is_any = any(update.waits and not update.written.done for update in in_flight)
    if is_any:
        io.post(pipeline.start_waiting)
    return is_any


def _budgets(plan: Blueprint) -> dict[str, TierBudget]:
    placement = plan.placement
    return {
        "window": TierBudget("read-ahead window", placement.window_nbytes),
        "gradients": TierBudget("gradients", placement.gradients_nbytes),
        "transit": TierBudget("gradient transit", placement.transit_nbytes),
        "pipeline": TierBudget("update pipeline", placement.pipeline_nbytes),
        "passage": TierBudget("chunks in transit", placement.passage_nbytes),
        "activations": TierBudget("activations", plan.request.activations_nbytes),
        "device": plan.device.budget,
    }


def _copies(plan: Blueprint) -> list[HostCopy]:
    placement = plan.placement
    copies = [
        HostCopy(group, pinned=group.index in placement.pinned_params, is_stored=placement.stores_param(group.index))
        for group in plan.groups
    ]
    for copy in copies:
        copy.is_chunked = copy.group.index in placement.chunked
        copy.keep_at_turn = copy.group.index in placement.keep_at_turn
        copy.keep_at_boundary = copy.group.index in placement.keep_at_boundary
    return copies


def _free_memory(made: Sequence[Runtime]) -> None:
    for runtime in made:
        runtime.free_memory()


def _pin_states(runtime: Runtime) -> None:
    """Host memory for the state that is placed there for good; it is born zero."""
    for index, state in runtime.states.items():
        for record in state.records:
            if record.nbytes and runtime.placement.pins_state(index, record.chunk.index):
                record.lease = runtime.pool.lease(record.nbytes, record.key)
