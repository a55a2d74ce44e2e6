"""Making room for another optimizer's state than the one that was planned for.

An engine is planned, and its swap files are made, before its optimizer is built. One that keeps less state than planned
is taken as it is: its records take the place of the planned ones, and host memory that becomes free keeps more state.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from infinity.config import OptimizerKind
from infinity.errors import ConfigError
from infinity.optim.hyper import most_nbytes_per_element
from infinity.optim.kernels import kernel_for
from infinity.optim.records import GroupState, record_nbytes
from infinity.runtime import Runtime


def take_optimizer(runtime: Runtime, kind: OptimizerKind) -> None:
    """Keep the state of `kind` from now on.

    Raises:
        ConfigError: it keeps more than was planned for, or there is state of another optimizer already.
    """
    if kind is runtime.optimizer:
        return
    kernel = kernel_for(runtime.config.precision, runtime.threads, kind, runtime.config.state_format)
    needed = most_nbytes_per_element(kernel.fields)
    planned = most_nbytes_per_element(runtime.kernel.fields)
    if needed > planned:
        raise ConfigError(
            f"this optimizer keeps {needed} bytes of state per parameter, but the engine was planned for "
            f"{planned} (Config.optimizer is {runtime.config.optimizer.value!r}); offload with optimizer={kind.value!r}"
        )
    if runtime.placement.is_durable:
        raise ConfigError(
            f"with durability='step' the swap files are laid out for {runtime.optimizer.value!r}; offload with "
            f"infinity.Config(optimizer={kind.value!r})"
        )
    if any(record.is_initialised for state in runtime.states.values() for record in state.records):
        raise ConfigError(
            f"there is optimizer state of {runtime.optimizer.value!r} already, which {kind.value!r} cannot use; build "
            "the optimizer before loading a checkpoint"
        )
    kernel.warm_up()
    _drop_records(runtime)
    old = runtime.states
    runtime.kernel, runtime.optimizer = kernel, kind
    runtime.pipeline.use(kernel)
    for index, state in old.items():
        old[index] = GroupState.build(state.group, runtime.placement.chunk_numel, kernel.fields)
    _place_records(runtime)


def _drop_records(runtime: Runtime) -> None:
    for state in runtime.states.values():
        for record in state.records:
            if record.lease is not None:
                record.lease.release()
            elif runtime.store is not None and record.nbytes:
                runtime.store.delete(record.key)


def _place_records(runtime: Runtime) -> None:
    """In host memory where the plan says so and, in order, where what the other optimizer needed has become free."""
    placement = runtime.placement
    sizes = {
        index: [record_nbytes(record.chunk, record.fields) for record in state.records]
        for index, state in runtime.states.items()
    }
    pinned = set(placement.pinned_states)
    free = _planned_nbytes(runtime) - sum(sum(sizes.get(index, [])) for index in pinned)
    chunks: dict[int, int] = {}
    for index, nbytes in sizes.items():
        if index in pinned or not sum(nbytes):
            continue
        ends = list(accumulate(nbytes))
        if ends[-1] <= free:
            pinned.add(index)
            free -= ends[-1]
            continue
        if count := sum(end <= free for end in ends):
            chunks[index] = count
        break  # the groups after it would hold what this one needs
    runtime.placement = placed = replace(placement, pinned_states=frozenset(pinned), pinned_chunks=chunks)
    for index, state in runtime.states.items():
        for record in state.records:
            if not record.nbytes:
                continue
            if placed.pins_state(index, record.chunk.index):
                record.lease = runtime.pool.lease(record.nbytes, record.key)
            elif runtime.store is not None:
                runtime.store.create(record.key, record.nbytes)


def _planned_nbytes(runtime: Runtime) -> int:
    """Host memory that the plan has for state that stays there."""
    params = sum(g.shard_nbytes for g in runtime.groups if g.index in runtime.placement.pinned_params)
    return runtime.placement.state_pinned_nbytes - params
