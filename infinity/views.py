"""Who still looks at the memory of a flat buffer after a `gathered()` block, a forward or a backward.

Reading freed memory ends the process, and torch does not say who holds a view. But it counts: every tensor over a
storage is one use of it. A block that ends with more uses than the engine's own has left tensors behind, and their
memory has to stay until they die. Tensors that only a graph built inside the block holds do not count, because the
graph asks before it uses them.

[Note: views in training]
The graph of a training forward saves views of its own, which no count tells from those that code keeps. So where
there are more uses than the engine's own, the tensors that Python knows are looked through (`infinity.holders`). That
takes 0.5 ms to 0.1 s; so it is done once for every *composition*: the uses of the memory and of each parameter, and the
nodes that autograd has made meanwhile. They are the same in every step of an ordinary model, and others as soon as code
keeps a view. The nodes tell a view that code keeps from one that the graph of a unit that is alike saves in its place:
the first unit of a model saves one less when its input needs no gradient, but makes as many nodes.

A tensor that Python code made and the graph of a forward has saved may be kept by code too, which changes no count. So
a forward that saves such tensors is looked through every time. In a backward that needs no care: what a checkpoint runs
again there was run before in the forward, and what code kept of that keeps the group.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from infinity.errors import NotGatheredError
from infinity.groups import FlatGroup
from infinity.holders import Holder, holder_of, young_collections
from infinity.torch_compat import (
    graph_task,
    has_storage,
    in_backward,
    next_sequence_nr,
    storage_id,
    storage_use_count,
    tensor_use_counts,
)

_MOST_COMPOSITIONS = 1000


@dataclass(frozen=True, slots=True)
class _Moment:
    """When a group was gathered.

    Attributes:
        uses: of its memory.
        collections: how often objects had become old.
        place: thread and backward (-1: none), in which autograd numbers its nodes.
        sequence_nr: of the next node there.
    """

    uses: int
    collections: int
    place: tuple[int, int | None]
    sequence_nr: int

    def nodes_since(self) -> int | None:
        """How many nodes autograd has made; None if that was in part elsewhere."""
        return next_sequence_nr() - self.sequence_nr if self.place == _place() else None


class _Saved:
    """A tensor that a graph needs for its backward, and the version of it that it needs."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version


class KeptGroups:
    """Groups that stay gathered although nothing of the engine uses them, because tensors outside show their memory.

    Owned by the gatherer, whose users the keepers are.

    Attributes:
        views: who looks at which memory.
        searches: how often the tensors that Python knows were looked through.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self.views = Views(groups)
        self.searches = 0
        self._kept: dict[Hashable, FlatGroup] = {}
        self._gathered_at: dict[int, _Moment] = {}  # by index of the group
        self._in_graphs: defaultdict[Hashable, set[Hashable]] = defaultdict(set)  # compositions that no code is part of

    def __bool__(self) -> bool:
        return bool(self._kept)

    def __str__(self) -> str:
        return ", ".join(sorted({group.key for group in self._kept.values()}))

    def watch(self, groups: Sequence[FlatGroup]) -> None:
        """Groups have their last buffers: an adoption gives them those of before. None is gathered for good yet."""
        self.views = Views(groups)
        self._in_graphs.clear()

    def keep(self, group: FlatGroup, keeper: Hashable) -> None:
        """A group stays gathered for `keeper`."""
        self._kept[keeper] = group

    def note_gathered(self, group: FlatGroup) -> None:
        """A group has just been gathered: nobody could look at its memory before."""
        self._gathered_at[group.index] = _Moment(_uses(group), young_collections(), _place(), next_sequence_nr())

    def is_shown(self, group: FlatGroup) -> bool:
        """Whether code outside holds a tensor over the memory of a gathered group that nobody uses any more.

        Where no graph is made, whatever looks at the memory and did not when it was gathered is held by somebody.
        For training see [Note: views in training].
        """
        uses, before = _uses(group), self._gathered_at[group.index]
        is_in_backward = in_backward()
        if not torch.is_grad_enabled() and not is_in_backward:
            return uses > before.uses
        if uses <= self.views.own(group):
            return False
        composition = (is_in_backward, before.uses, uses, before.nodes_since(), *tensor_use_counts(group.parameters))
        known = self._in_graphs[_kind(group)]
        if composition not in known:
            self.searches += 1
            others = {id(own) for own in (group.flat, *group.parameters)}
            storage = group.flat.untyped_storage()._cdata
            holder = holder_of(storage, before.collections, others, in_backward=is_in_backward)
            if holder is Holder.CODE:
                return True
            if holder is Holder.NOBODY or is_in_backward:  # else see [Note: views in training]
                if len(known) == _MOST_COMPOSITIONS:
                    known.clear()
                known.add(composition)
        return False

    def take_gone(self) -> list[tuple[Hashable, FlatGroup]]:
        """Keepers, with their groups, that keep nothing any more; they are forgotten."""
        gone = [(keeper, group) for keeper, group in self._kept.items() if not self.views.are_alive(group)]
        for keeper, _ in gone:
            del self._kept[keeper]
        return gone


class Views:
    """Counts the tensors over the flat buffers of groups that others hold. Owned by the training thread.

    Args:
        groups: released, and used by no graph yet: what holds their buffers now is the engine's own.
    """

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        self._groups = {group.flat.untyped_storage()._cdata: group for group in groups}
        self._own = {group.index: _uses(group) for group in groups}
        self._saved: dict[int, weakref.WeakSet[_Saved]] = {group.index: weakref.WeakSet() for group in groups}

    def own(self, group: FlatGroup) -> int:
        """How many uses of a group's memory are the engine's own."""
        return self._own[group.index]

    def are_alive(self, group: FlatGroup) -> bool:
        """Whether somebody may hold a tensor over this group's memory.

        A graph of an ordinary forward that still waits for its backward counts too: it cannot be told from a view.
        """
        held_by_others = _uses(group) - self.own(group)
        return held_by_others > 0 and held_by_others > self._only_in_graphs(group)

    def _only_in_graphs(self, group: FlatGroup) -> int:
        own = {id(parameter) for parameter in group.parameters}
        here = [one for one in self._saved[group.index] if id(one.tensor) not in own]
        holders = Counter(id(one.tensor) for one in here)
        distinct = {id(one.tensor): one for one in here}
        # Beside those that hold it for a graph there is only the argument of the call, unless the user holds it too.
        return sum(sys.getrefcount(one.tensor) <= holders[number] + 1 for number, one in distinct.items())

    def _group_of(self, tensor: torch.Tensor) -> FlatGroup | None:
        with torch._C.DisableTorchFunctionSubclass():  # the parameters themselves may be freed by now
            storage = storage_id(tensor)
            return None if storage is None else self._groups.get(storage)

    @contextmanager
    def guarded_graphs(self) -> Iterator[None]:
        """What is computed inside the block may be differentiated only while the parameters are there.

        With hooks torch leaves out its own check for in-place changes, which is made here instead.
        """

        def pack(tensor: torch.Tensor) -> _Saved:
            saved, group = _Saved(tensor), self._group_of(tensor)
            if group is not None:
                self._saved[group.index].add(saved)
            return saved

        def unpack(saved: _Saved) -> torch.Tensor:
            tensor = saved.tensor
            if _is_freed(tensor):  # of another engine too: of several blocks torch asks the innermost one only
                group = self._group_of(tensor)
                whose = f" of {group.key}" if group is not None else ""
                raise NotGatheredError(
                    f"a backward needs parameters{whose} that were used inside `infinity.gathered(...)`, which is "
                    "over. Run the backward inside the block too"
                )
            if tensor._version != saved.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that is needed for backward was changed in place: it is "
                    f"at version {tensor._version}, version {saved.version} was saved"
                )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor has been given back: reading it would end the process."""
    with torch._C.DisableTorchFunctionSubclass():
        has_memory = has_storage(tensor) and tensor.numel() > 0
        return has_memory and tensor.untyped_storage().nbytes() == 0


def _uses(group: FlatGroup) -> int:
    return storage_use_count(group.flat.untyped_storage())


def _place() -> tuple[int, int | None]:
    return threading.get_ident(), graph_task()


def _kind(group: FlatGroup) -> Hashable:
    """What groups have in common whose modules are alike, and so are the graphs of these."""
    return group.compute_dtype, group.trainable, *(slot.shape for slot in group.layout.slots)
