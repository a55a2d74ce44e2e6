"""The swap files of an engine: opened, with a key for everything that the placement puts there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from infinity.blueprint import Blueprint
from infinity.gradients import gradient_key, gradient_nbytes
from infinity.groups import FlatGroup
from infinity.observe.trace import Trace
from infinity.optim.records import GroupState
from infinity.swap_directories import check_directories, swap_directories
from infinity.swap_files import create_volatile, open_log, speeds_to_start_with, storage_options, traced
from infinity.swap_keys import swap_keys
from storage.errors import SwapFullError
from storage.store import ShardStore
from storage.versioned import VersionedStore


def open_store(plan: Blueprint, states: Mapping[int, GroupState], trace: Trace, stack: ExitStack) -> ShardStore | None:
    """Open the swap files with a key for all that the placement puts there; None where it puts nothing there.

    Args:
        states: the state of the groups that train, by group index.
        stack: is left how they are closed.

    Raises:
        ConfigError: `nvme.io_log` cannot be written.
        StorageError: a directory cannot be used, or has too little space.
    """
    nvme, placement = plan.config.nvme, plan.placement
    check_directories(nvme.paths)
    if not placement.nvme_nbytes:
        return None
    rank = plan.collectives.ranks.global_rank if plan.collectives is not None else None
    paths = stack.enter_context(swap_directories(nvme.paths, rank=rank))
    wrap = traced(trace, open_log(nvme, rank, stack), plan.wrap_backend)
    write_memory_nbytes = placement.pipeline_nbytes // len(paths)
    options = storage_options(nvme, write_memory_nbytes=write_memory_nbytes, files_nbytes=plan.nvme_budget_nbytes)
    speeds = speeds_to_start_with(nvme, paths)
    if placement.is_durable:
        versioned = VersionedStore.open(paths, placement.nvme_nbytes, options=options, speeds=speeds, wrap_backend=wrap)
        stack.callback(versioned.close)
        _create_durable(plan, states, versioned)
        return versioned
    store = ShardStore.open(paths, placement.nvme_nbytes, options=options, speeds=speeds, wrap_backend=wrap)
    stack.callback(store.close)
    for entry in swap_keys(plan.groups, states, placement):
        store.create(entry.key, entry.nbytes)
    return store


def _create_durable(plan: Blueprint, states: Mapping[int, GroupState], store: VersionedStore) -> None:
    """The keys of a durable run, those that are there already excepted: it goes on."""
    found = set(store.keys())
    for entry in swap_keys(plan.groups, states, plan.placement):
        if entry.is_volatile:
            create_volatile(store, entry.key, entry.nbytes)
        elif entry.key not in found:
            store.create(entry.key, entry.nbytes, entry.dtype)


def create_gradient(store: ShardStore | None, limit_nbytes: int | None, group: FlatGroup) -> None:
    """Space in the swap files, if there are any, for a gradient that was not planned to need any.

    Args:
        limit_nbytes: what they may hold in all; None where there is no limit.

    Raises:
        SwapFullError: the disk is full, or it would be more than `nvme.budget`.
    """
    if store is None:
        return
    nbytes, held_nbytes = gradient_nbytes(group), store.held_nbytes
    if limit_nbytes is not None and held_nbytes + nbytes > limit_nbytes:
        raise SwapFullError(
            f"the gradient of {group.key} has to wait in the swap files for the end of backward, because its "
            f"parameters were used outside their module, or the module several times. It takes {nbytes} bytes, and the "
            f"swap files hold {held_nbytes} of the {limit_nbytes} that nvme.budget allows. Raise it, or use "
            "schedule='synchronous'"
        )
    create_volatile(store, gradient_key(group), nbytes)
