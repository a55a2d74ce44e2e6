"""The present values of parameters and moments by name, wherever they lie: what exports and state dicts read.

What trains reads as its fp32 master, what is frozen in its own dtype, moments in fp32, as from a checkpoint. Over ranks
a tensor is put together chunk by chunk from what the ranks of a row hold (`requests`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from infinity.checkpoint.agreement import AllRanks, OneRank
from infinity.checkpoint.description import describe_model
from infinity.checkpoint.format import PARAMETER
from infinity.checkpoint.parts import aliases_of, copy_buffers
from infinity.checkpoint.requests import Holdings, Request, requests
from infinity.checkpoint.tiers import Span, Tiers
from infinity.groups import FlatGroup
from infinity.layout import Slot
from infinity.optim.moments import SCALE
from infinity.optim.splitmaster import join_master
from infinity.runtime import Runtime
from infinity.updates import Updates

CHUNK_NUMEL = 1 << 20


class _OwnValues:
    """Elements of the spans that this rank updates, and of what it holds of frozen groups.

    What was read last is kept, because tensors are smaller than spans and read in order.
    """

    def __init__(self, runtime: Runtime, tiers: Tiers) -> None:
        self._kernel = runtime.kernel
        self._tiers = tiers
        self._place: tuple[int, int, str] | None = None
        self._last = torch.empty(0)

    def read(self, group: FlatGroup, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` with elements of a flat buffer from `start` on; converts where the dtypes differ."""
        stop = start + into.numel()
        for span in self._tiers.spans(group):
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                values = self._values(span, kind)[first - span.start : last - span.start]
                into[first - start : last - start].copy_(values)

    def _values(self, span: Span, kind: str) -> torch.Tensor:
        place = span.group.index, span.start, kind
        if self._place != place:
            self._place = None  # reading takes the buffer
            self._last = self._read(span, kind)
            self._place = place
        return self._last

    def _read(self, span: Span, kind: str) -> torch.Tensor:
        if kind == PARAMETER:
            return _master(self._tiers, span)
        values = self._tiers.read(span, param=False, fields=(kind, kind + SCALE))
        return self._kernel.decode(kind, values.state)


def _master(tiers: Tiers, span: Span) -> torch.Tensor:
    is_whole = span.record is not None and any(f.name == "master" for f in span.record.fields)
    values = tiers.read(span, param=not is_whole, fields=("low", "master"))
    low, whole = values.state.get("low"), values.state.get("master")
    if whole is not None:
        return whole
    return values.param if low is None else join_master(values.param, low)


_Read = Callable[[str, str, int, torch.Tensor], None]


class LiveTensors:
    """The tensors of an engine; a `Weights` to export. Made by `live_tensors`.

    Args:
        read: fills a 1-D tensor with elements of a named one, of a kind ("parameter", "exp_avg", ...), from one on.

    Attributes:
        where: the engine, in words.
        precision: of the engine.
        shapes: of the parameters, by name, in the order of their groups.
        aliases: other names of tied parameters, and the name that each has here.
    """

    where = "the engine"

    def __init__(self, runtime: Runtime, read: _Read) -> None:
        self._runtime = runtime
        self._read = read
        self._slots = {slot.name: (group, slot) for group in runtime.groups for slot in group.layout.slots}
        self.precision = runtime.config.precision.value
        self.shapes: Mapping[str, tuple[int, ...]] = {name: slot.shape for name, (_, slot) in self._slots.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        return aliases_of(self._runtime.model)

    def trains(self, name: str) -> bool:
        return self._slots[name][0].trainable

    def dtype(self, name: str) -> torch.dtype:
        """Of a parameter as it reads."""
        return read_dtype(self._slots[name][0])

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D) with elements of a flattened tensor from `start` on; converts where the dtypes differ."""
        for at in range(0, into.numel(), CHUNK_NUMEL):
            self._read(name, kind, start + at, into[at : at + CHUNK_NUMEL])

    def tensor(self, name: str, kind: str = PARAMETER) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        group, slot = self._slots[name]
        whole = torch.empty(slot.shape, dtype=read_dtype(group, kind))
        self.read(name, kind, 0, whole.view(-1))
        return whole

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's persistent buffers, by name."""
        return copy_buffers(self._runtime.model)

    def descriptions(self) -> Mapping[str, bytes]:
        """What a model of transformers or PEFT says about itself: files by name."""
        return describe_model(self._runtime.model)


def read_dtype(group: FlatGroup, kind: str = PARAMETER) -> torch.dtype:
    """In which a tensor of a group's parameters is read and replaced without another conversion."""
    return torch.float32 if group.trainable or kind != PARAMETER else group.shard_dtype


@contextmanager
def live_tensors(runtime: Runtime, updates: Updates, ranks: AllRanks | None, what: str) -> Iterator[LiveTensors]:
    """The tensors as they are now, for the length of a block in which nothing trains.

    Args:
        ranks: of several ranks, which have met. Each may read or not; at the end of the block it gives the others what
            they read, until all are there.
        what: it is for, for messages.

    Raises:
        IterationError: an update was lost, or the running step has been applied in part.
        CheckpointError: the block failed on another rank.
    """
    with ExitStack() as stack, torch.no_grad():
        with (ranks or OneRank()).together(what):
            updates.consistency.check()
            updates.settle(what)
            own = _OwnValues(runtime, stack.enter_context(Tiers(runtime)))
        slots = {slot.name: (group, slot) for group in runtime.groups for slot in group.layout.slots}
        if ranks is None:

            def read(name: str, kind: str, start: int, into: torch.Tensor) -> None:
                group, slot = slots[name]
                own.read(group, kind, slot.offset + start, into)

            yield LiveTensors(runtime, read)
            return
        names, kinds = list(slots), (PARAMETER, *runtime.kernel.moments)
        numbers = {name: number for number, name in enumerate(names)}
        holdings = _holdings(list(slots.values()), kinds, own, ranks)
        with requests(ranks, what, holdings) as rounds:

            def ask(name: str, kind: str, start: int, into: torch.Tensor) -> None:
                rounds.ask(Request(numbers[name], kinds.index(kind), start, into.numel()), into)

            yield LiveTensors(runtime, ask)


def _holdings(
    slots: Sequence[tuple[FlatGroup, Slot]], kinds: Sequence[str], own: _OwnValues, ranks: AllRanks
) -> Holdings:
    """Every rank has the span of the flat buffers that it updates; a row has all of them."""
    shards = ranks.collectives.ranks.shards

    def parts(asker: int, request: Request) -> Iterable[tuple[int, int, int]]:
        group, slot = slots[request.tensor]
        for shard in range(shards):
            span = group.span_of(shard)
            first = max(span.start - slot.offset, request.start)
            last = min(span.stop - slot.offset, request.stop)
            if first < last:
                yield asker - asker % shards + shard, first, last

    def blank(request: Request, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=read_dtype(slots[request.tensor][0], kinds[request.kind]))

    def fill(request: Request, first: int, into: torch.Tensor) -> None:
        group, slot = slots[request.tensor]
        own.read(group, kinds[request.kind], slot.offset + first, into)

    return Holdings(parts, blank, fill)
