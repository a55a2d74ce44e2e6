"""A section: the parameters of one dtype, and where their state lies in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from infinity.bridge.parameters import LocalParameter
from infinity.bridge.stream import Buffer, Passage
from infinity.config import OptimizerKind, Precision
from infinity.errors import ConfigError
from infinity.layout import Chunk, FlatLayout
from infinity.optim.hyper import Hyper, Kernel, Piece
from infinity.optim.kernel_threads import KernelThreads
from infinity.optim.kernels import kernel_for
from infinity.optim.records import Record
from infinity.torch_compat import increment_version


@dataclass(slots=True, eq=False)
class Section:
    """State of the parameters of one dtype. Laid out like a flat buffer of their local parts, which does not exist.

    Attributes:
        index: position among the sections.
        copies_param: parameters are copied to be updated, because one of them is on another device.
        steps: by slot, how often the parameter has been updated.
        trainable: as `FlatGroup.trainable`; there is no state of anything else.
    """

    index: int
    parameters: Sequence[LocalParameter]
    layout: FlatLayout
    kernel: Kernel
    copies_param: bool
    records: tuple[Record, ...] = ()
    steps: list[int] = field(default_factory=list)
    trainable: bool = True

    @classmethod
    def build(
        cls, index: int, parameters: Sequence[LocalParameter], kind: OptimizerKind, threads: KernelThreads
    ) -> Section:
        """The section of parameters that share a precision."""
        kernel = kernel_for(parameters[0].precision, threads, kind)
        shapes = [(p.name, p.values().shape if p.trains else (0,)) for p in parameters]
        values = [p.values() for p in parameters if p.trains]
        copies = any(value.device.type != "cpu" for value in values)
        return cls(index, parameters, FlatLayout.pack(shapes), kernel, copies, steps=[0] * len(parameters))

    def cut(self, chunk_numel: int) -> None:
        """Make the records, of chunks of so many elements."""
        name = f"{str(self.kernel.param_dtype).removeprefix('torch.')}/state"
        chunks = self.layout.cut(chunk_numel)
        self.records = tuple(Record(f"{name}{chunk.index}", chunk, self.kernel.fields) for chunk in chunks)

    def passage(self, record: Record) -> Passage:
        return Passage(record, self.kernel.param_dtype, self.copies_param)

    def wanted(self, updated: Sequence[int]) -> list[Passage]:
        """The passages of an update of these slots, in order."""
        slots = frozenset(updated)
        return [self.passage(r) for r in self.records if any(piece.slot in slots for piece in r.chunk.pieces)]


class SectionUpdate:
    """One step of a section: gradients and settings as they are now.

    Raises:
        ConfigError: a parameter or its gradient has another size than when the optimizer was built.
    """

    def __init__(self, section: Section, hypers: Sequence[Hyper]) -> None:
        self.section = section
        self._hypers = hypers
        self._grads: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        for number, parameter in enumerate(section.parameters):
            grad = parameter.gradient()
            if grad is not None:
                self._grads[number] = grad.contiguous()
                self._values[number] = parameter.values()
                self._check(number)

    @property
    def slots(self) -> list[int]:
        """What is updated."""
        return list(self._grads)

    def begin(self) -> None:
        """Count the update."""
        for number in self._grads:
            self.section.steps[number] += 1

    def finish(self) -> None:
        """Graphs that have saved a parameter are told that it has changed."""
        for number in self._grads:
            increment_version(self.section.parameters[number].parameter)

    @torch.no_grad()
    def compute(self, buffer: Buffer) -> None:
        """Update one chunk: its state in the buffer, its parameters where they are."""
        section, record = self.section, buffer.passage.record
        state = buffer.state
        if not record.is_initialised:
            for tensor in state:
                tensor.zero_()
        for part in record.chunk.pieces:
            if part.slot not in self._grads:
                continue
            span = slice(part.start, part.stop)
            param, grad = self._param(record.chunk, part.slot, span, buffer), buffer.grad[span]
            grad.copy_(self._part(self._grads[part.slot], record.chunk, part.slot, span))
            pieces = [tensor[span] for tensor in state]
            step = section.steps[part.slot]
            if step == 1:
                section.kernel.begin(param, pieces)
            elif section.kernel.param_dtype is torch.float16:
                # Whoever loads other values into the parameter does not know of its fp32 master.
                master = pieces[[field.name for field in section.kernel.fields].index("master")]
                section.kernel.edited(param, pieces, master.half() != param)
            hyper = self._hypers[part.slot]
            section.kernel.update(param, grad, pieces, [Piece(0, part.stop - part.start, step, hyper)], None)
            if section.copies_param:
                self._part(self._values[part.slot], record.chunk, part.slot, span).copy_(param)

    def _param(self, chunk: Chunk, slot: int, span: slice, buffer: Buffer) -> torch.Tensor:
        there = self._part(self._values[slot], chunk, slot, span)
        return buffer.param[span].copy_(there) if self.section.copies_param else there

    def _part(self, tensor: torch.Tensor, chunk: Chunk, slot: int, span: slice) -> torch.Tensor:
        """The elements of a parameter-like tensor that lie in a span of a chunk."""
        first = chunk.start - self.section.layout.slots[slot].offset
        return tensor.view(-1)[first + span.start : first + span.stop]

    def _check(self, number: int) -> None:
        slot, grad, values = self.section.layout.slots[number], self._grads[number], self._values[number]
        dtype = self.section.kernel.param_dtype
        if not values.numel() == grad.numel() == slot.numel or values.dtype != dtype:
            raise ConfigError(
                f"parameter {slot.name} was {slot.shape} and {dtype} on this rank when the optimizer was built; now it "
                f"is {tuple(values.shape)} and {values.dtype}, its gradient {tuple(grad.shape)}. Build the optimizer "
                "after the model has its final shape and dtype"
            )
        if not values.is_contiguous():
            raise ConfigError(
                f"parameter {slot.name} is not contiguous in memory any more, as after model.to(memory_format=...). "
                "Build the optimizer after the model has its final memory format, or make it contiguous again"
            )


def make_sections(
    parameters: Sequence[LocalParameter], kind: OptimizerKind, threads: KernelThreads
) -> tuple[list[Section], list[tuple[int, int]]]:
    """Sections of all parameters, and the place of each of them: index of its section, number of its slot."""
    by_precision: dict[Precision, list[LocalParameter]] = {}
    order: list[tuple[Precision, int]] = []
    for parameter in parameters:
        mine = by_precision.setdefault(parameter.precision, [])
        order.append((parameter.precision, len(mine)))
        mine.append(parameter)
    sections = [Section.build(i, mine, kind, threads) for i, mine in enumerate(by_precision.values())]
    index = {precision: number for number, precision in enumerate(by_precision)}
    return sections, [(index[precision], slot) for precision, slot in order]
