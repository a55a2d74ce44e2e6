"""Which tensors over a memory Python code holds, found by looking through the objects that Python knows.

torch does not say who holds a view. But a tensor that code can name is an object of the garbage collector, which lists
them by age: what was made since a moment lies among the young ones, unless these have been looked through since then.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection
from enum import Enum

import torch

from infinity.torch_compat import are_referred_to, is_held_by_code, storage_id

_YOUNG = (0, 1)  # generations
_OLD = 2
_HAS_YOUNG_ONES = sys.version_info < (3, 14)  # later ones move objects between generations in other ways


class Holder(Enum):
    """Who holds the tensors over a memory that Python has objects for."""

    NOBODY = "nobody: there are none"
    GRAPH = "graphs or checkpoints that have saved them"
    CODE = "code"


def young_collections() -> int:
    """How often objects have become old so far in this process."""
    return sum(generation["collections"] for generation in gc.get_stats()[1:])


def holder_of(storage: int, made_since: int, others: Collection[int], *, in_backward: bool) -> Holder:
    """Who holds tensors over a storage; code comes first.

    In a backward the variables of running code do not count, which cannot be told there from what checkpoints save.

    Args:
        storage: `_cdata` of an untyped storage.
        made_since: `young_collections()` before the first such tensor was made.
        others: ids of tensors that do not count.
    """
    is_recent = _HAS_YOUNG_ONES and young_collections() == made_since
    holder = Holder.NOBODY
    for generation in (*_YOUNG, *(() if is_recent else (_OLD,))):
        if found := _found_in(generation, storage, others):
            held = [one for one in found if _is_in_code(one)]
            if held and (not in_backward or are_referred_to([one() for one in held])):
                return Holder.CODE
            holder = Holder.GRAPH
    return holder


def _is_in_code(reference: weakref.ref[torch.Tensor]) -> bool:
    tensor = reference()
    return tensor is not None and is_held_by_code(tensor)


def _found_in(generation: int, storage: int, others: Collection[int]) -> list[weakref.ref[torch.Tensor]]:
    """By weak references: each tensor found is held by as many as held it before."""
    kinds = _tensor_types()
    with torch._C.DisableTorchFunctionSubclass():
        return [
            weakref.ref(one)
            for one in gc.get_objects(generation=generation)
            if type(one) in kinds and id(one) not in others and _storage_of(one) == storage
        ]


def _storage_of(tensor: torch.Tensor) -> int | None:
    """`_cdata` of the storage of a tensor; None for one without memory of its own."""
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # of a kind that shows no memory to anybody
        return None


def _tensor_types() -> set[type]:
    found: set[type] = set()
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in found:
            found.add(kind)
            waiting += type.__subclasses__(kind)
    return found
