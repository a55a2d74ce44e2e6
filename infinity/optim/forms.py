"""How parameters and their fp32 master are stored, by precision: kernels that run any rule on the master.

| precision | parameter shard | the rest of the master, first in the state record |
|---|---|---|
| fp32 | the master itself | nothing |
| bf16 | its high half | `low`: the signed 16-bit rest, see [Note: split master] in splitmaster.py |
| fp16 | it rounded to fp16 | `master`: all of it in fp32, for fp16 has not the range to be a half of it |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from infinity.config import StateFormat
from infinity.optim.hyper import CUT_NUMEL, Hyper, Piece, StateField, check_update
from infinity.optim.moments import MOMENT_FORMATS
from infinity.optim.rules import Operands, Rule
from infinity.optim.splitmaster import join_master, split_master

_BLOCK_NUMEL = 1024 * CUT_NUMEL  # a block's master, gradient and moments stay in the second-level cache


class RuleKernel(ABC):
    """What the forms share. Calls the rule once per hyperparameters, with one view per piece."""

    param_dtype: torch.dtype
    _rest: tuple[StateField, ...] = ()

    def __init__(self, rule: Rule, moments: StateFormat = StateFormat.FP32) -> None:
        self._rule = rule
        self.moments = rule.moments
        self._format = MOMENT_FORMATS[moments]
        self.fields = (*self._rest, *self._format.fields(rule.moments))
        self.completes_master = bool(self._rest)

    def warm_up(self) -> None:  # noqa: B027
        """Nothing to compile; a form that has something overrides this."""

    def decode(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """See `Kernel.decode`."""
        return self._format.decode(name, state)

    def encode(self, name: str, values: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `Kernel.encode`."""
        self._format.encode(name, values, state)

    @torch.no_grad()
    def update(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], grad_scale: Tensor | None
    ) -> None:
        """Update `param` and `state` in place; `grad` may hold anything afterwards. See `Kernel.update`."""
        check_update(param, grad, state, pieces, param_dtype=self.param_dtype, fields=self.fields)
        for hyper, group in by_hyper(pieces).items():
            if grad_scale is not None:
                for piece in group:
                    grad[piece.start : piece.stop].mul_(grad_scale)
            self._apply(param, grad, state, group, hyper)

    @abstractmethod
    def begin(self, param: Tensor, state: Sequence[Tensor]) -> None:
        """Make the state that belongs to a parameter before its first update."""

    @abstractmethod
    def edited(self, param: Tensor, state: Sequence[Tensor], changed: Tensor) -> None:
        """Where `changed`, the user has set the parameter: the master follows."""

    @abstractmethod
    def _apply(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], hyper: Hyper
    ) -> None:
        """Run the rule on the master, wherever this form has it."""

    def _run(
        self, master: Tensor, grad: Tensor, moments: Sequence[Tensor], pieces: Sequence[Piece], hyper: Hyper
    ) -> None:
        def views(tensor: Tensor) -> list[Tensor]:
            return [tensor[piece.start : piece.stop] for piece in pieces]

        steps = [piece.step for piece in pieces]
        self._rule.update(Operands(views(master), views(grad), [views(m) for m in moments], steps), hyper)


class WholeMaster(RuleKernel):
    """fp32: the parameter is the master."""

    param_dtype = torch.float32

    def begin(self, param: Tensor, state: Sequence[Tensor]) -> None:
        """All state is zero before the first update."""
        _zero(state)

    def edited(self, param: Tensor, state: Sequence[Tensor], changed: Tensor) -> None:
        """The parameter is all there is."""

    def _apply(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], hyper: Hyper
    ) -> None:
        self._run(param, grad, state, pieces, hyper)


class SplitMaster(RuleKernel):
    """bf16: the master is joined and split again, block by block."""

    param_dtype = torch.bfloat16
    _rest = (StateField("low", torch.int16),)

    def begin(self, param: Tensor, state: Sequence[Tensor]) -> None:
        """The master is the bf16 value, the rest of it zero."""
        _zero(state)

    def edited(self, param: Tensor, state: Sequence[Tensor], changed: Tensor) -> None:
        """The master of what was changed is its bf16 value."""
        state[0].masked_fill_(changed, 0)

    def _apply(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], hyper: Hyper
    ) -> None:
        low, *moments = state
        for span, whole in _blocks(pieces):
            master = join_master(param[span], low[span])
            piece = Piece(0, master.numel(), whole.step, hyper)
            self._run(master, grad[span], [moment[span] for moment in moments], [piece], hyper)
            high, rest = split_master(master)
            param[span].copy_(high)
            low[span].copy_(rest)


class SeparateMaster(RuleKernel):
    """fp16: the master lies in the state, and the parameter is it rounded."""

    param_dtype = torch.float16
    _rest = (StateField("master", torch.float32),)

    def begin(self, param: Tensor, state: Sequence[Tensor]) -> None:
        """The master is the fp16 value; all else is zero."""
        _zero(state)
        state[0].copy_(param)

    def edited(self, param: Tensor, state: Sequence[Tensor], changed: Tensor) -> None:
        """The master of what was changed is its fp16 value."""
        state[0][changed] = param[changed].float()

    def _apply(
        self, param: Tensor, grad: Tensor, state: Sequence[Tensor], pieces: Sequence[Piece], hyper: Hyper
    ) -> None:
        master, *moments = state
        self._run(master, grad, moments, pieces, hyper)
        for piece in pieces:
            param[piece.start : piece.stop].copy_(master[piece.start : piece.stop])


def by_hyper(pieces: Sequence[Piece]) -> dict[Hyper, list[Piece]]:
    """The pieces that are not empty, by their hyperparameters."""
    groups: dict[Hyper, list[Piece]] = {}
    for piece in pieces:
        if piece.stop > piece.start:
            groups.setdefault(piece.hyper, []).append(piece)
    return groups


def _blocks(pieces: Sequence[Piece]) -> Iterator[tuple[slice, Piece]]:
    for piece in pieces:
        for start in range(piece.start, piece.stop, _BLOCK_NUMEL):
            yield slice(start, min(start + _BLOCK_NUMEL, piece.stop)), piece


def _zero(state: Sequence[Tensor]) -> None:
    for tensor in state:
        tensor.zero_()
