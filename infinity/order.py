"""The order in which units are used: predicted, recorded, re-learned. Pure; the training thread is the one writer.

[Note: prediction, never assumption]
Before anything was seen, a forward is expected in module order and a backward in reverse. Every iteration is recorded,
and one that went differently is the prediction for the next. Within an iteration that diverges the position is found
again from, in this order:

1. another iteration seen before that began exactly like this one (alternating branches);
2. the place that a jump left, when the jump turns out to have been a single inserted access;
3. the nearest later place where the access is expected (something was skipped);
4. else it stays where it is (something was inserted).

A wrong prediction costs its user one demand read. Nothing here raises.

[Note: random branches]
Where the last two iterations differ, the next forward is expected to use anything that the last few used, each in its
place: what turns out not to be used costs a read in vain, what is used has been read ahead. And as long as backwards
have mirrored their forwards, the coming backward is the mirror of the forward that has just run, whatever it skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import Enum
from heapq import merge

_MAX_RECENT = 4  # iterations whose forwards are expected together: of two equal branches, 15 in 16 are among them
_MAX_KNOWN = 4  # iterations remembered per mode: enough for loops that alternate, few enough to search at a divergence


class Phase(Enum):
    """Which half of an iteration uses the unit."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Mode(Enum):
    """What an outermost forward is for; each mode has its own prediction."""

    TRAIN = "train"
    EVAL = "eval"  # no backward follows


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a unit."""

    phase: Phase
    unit: int


Trace = tuple[Access, ...]


class AccessOrder:
    """Predicts which unit is used next, from what the iterations before did.

    Args:
        n_units_in_module_order: the numbers of the units, in module order.
        n_units_in_backward: in the order in which their backward is expected to begin; None is the reverse.
    """

    def __init__(
        self, n_units_in_module_order: Sequence[int], n_units_in_backward: Sequence[int] | None = None
    ) -> None:
        forward = tuple(Access(Phase.FORWARD, unit) for unit in n_units_in_module_order)
        reverse = n_units_in_module_order[::-1] if n_units_in_backward is None else n_units_in_backward
        backward = tuple(Access(Phase.BACKWARD, unit) for unit in reverse)
        rank = {unit: number for number, unit in enumerate(n_units_in_module_order)}
        self._predictions = {
            Mode.TRAIN: _Prediction(forward + backward, rank, has_backward=True),
            Mode.EVAL: _Prediction(forward, rank, has_backward=False),
        }
        self._mode = Mode.TRAIN
        self.hits = 0
        self.misses = 0

    @property
    def mode(self) -> Mode:
        """The mode of the iteration under way."""
        return self._mode

    def begin(self, mode: Mode) -> None:
        """An outermost forward starts; the iteration of the same mode before it is complete and learned from."""
        self._mode = mode
        self._predictions[mode].begin()

    def record(self, access: Access) -> bool:
        """Note a use; True when it was the predicted one.

        A backward during an evaluation belongs to the training iteration that the evaluation interrupted, which goes
        on where it was.
        """
        if access.phase is Phase.BACKWARD:
            self._mode = Mode.TRAIN
        is_hit = self._predictions[self._mode].record(access)
        self.hits += is_hit
        self.misses += not is_hit
        return is_hit

    def upcoming(self) -> tuple[Trace, int]:
        """The predicted trace and the position in it: next comes `trace[position % len(trace)]`, then on cyclically.

        The position lies between 0 and `len(trace)`. The trace is empty only for a model without units that was never
        run.
        """
        prediction = self._predictions[self._mode]
        return prediction.trace, prediction.position


class _Prediction:
    """What is expected in one mode, and where in it the iteration under way is."""

    def __init__(self, guess: Trace, rank: Mapping[int, int], *, has_backward: bool) -> None:
        self._rank = rank
        self.trace = guess
        self.position = 0
        self._has_backward = has_backward
        self._known: list[Trace] = []  # iterations that happened, latest first
        self._recorded: list[Access] = []
        self._left: int | None = None  # the position before a jump forward, until the next access confirms the jump
        self._recent: list[Trace] = []  # the last iterations, latest first, equal ones too
        self._is_joined = False  # whether the prediction is made of several iterations
        forward = _forward_of(guess)
        # Whether the last backward used what its forward had, the other way round.
        self._mirrors = has_backward and guess[len(forward) :] == _mirror(forward)
        self._shortened: Trace = ()  # the last iteration, when it was a strict prefix of the prediction

    def begin(self) -> None:
        self._learn(tuple(self._recorded))
        self.position = 0
        self._left = None
        self._recorded.clear()

    def record(self, access: Access) -> bool:
        is_hit = self._is_next(access)
        if access.phase is Phase.BACKWARD and self._recorded and self._recorded[-1].phase is Phase.FORWARD:
            self._expect_mirror()
        if self._is_next(access):
            self.position = self.position % len(self.trace) + 1
            self._left = None
        else:
            self._resync(access)
        self._recorded.append(access)
        return is_hit

    def _is_next(self, access: Access) -> bool:
        return bool(self.trace) and self.trace[self.position % len(self.trace)] == access

    def _expect_mirror(self) -> None:
        """A backward begins: it goes back over the forward that has run, if backwards do."""
        if self._mirrors:
            forward = _forward_of(self.trace)
            self.trace = (*forward, *_mirror(tuple(self._recorded)))
            self.position = len(forward)

    def _resync(self, access: Access) -> None:
        left, self._left = self._left, None
        is_open = self._is_joined and self._find(access) is not None  # then the branch is among what is expected
        if not is_open and (trace := self._known_beginning((*self._recorded, access))) is not None:
            self.trace, self.position = trace, len(self._recorded) + 1
        elif left is not None and self.trace[left] == access:
            self.position = left + 1
        elif (found := self._find(access)) is not None:
            if self.position < len(self.trace):
                self._left = self.position
            self.position = found + 1

    def _known_beginning(self, beginning: Trace) -> Trace | None:
        matches = (trace for trace in self._known if trace[: len(beginning)] == beginning)
        return next(matches, None)

    def _find(self, access: Access) -> int | None:
        """The nearest later place of the access; from the start once the whole trace has been used."""
        start = self.position if self.position < len(self.trace) else 0
        try:
            return self.trace.index(access, start)
        except ValueError:
            return None

    def _learn(self, iteration: Trace) -> None:
        """Make a finished iteration the prediction, unless it merely stopped early."""
        if not iteration:
            return
        if self._is_cut_short(iteration):
            self._shortened = iteration
            return
        self._shortened = ()
        forward = _forward_of(iteration)
        self._mirrors = self._has_backward and iteration[len(forward) :] == _mirror(forward)
        self._recent = [iteration, *self._recent][:_MAX_RECENT]
        self._known = [iteration, *(trace for trace in self._known if trace != iteration)][:_MAX_KNOWN]
        self._is_joined = len(self._recent) > 1 and self._recent[1] != iteration
        self.trace = self._together() if self._is_joined else iteration

    def _together(self) -> Trace:
        """The last iteration, and in its forward what those before it used."""
        latest = self._recent[0]
        forward = _forward_of(latest)
        for other in self._recent[1:]:
            forward = _merged(forward, _forward_of(other), self._rank)
        return (*forward, *latest[len(_forward_of(latest)) :])

    def _is_cut_short(self, iteration: Trace) -> bool:
        """Whether the iteration is the prediction less its end and need not be how it will go from now on.

        A forward without a backward is one of several forwards before a common backward, however often it happens. An
        iteration whose backward (or evaluation) ends early may have failed: only the second in a row is believed.
        """
        if len(iteration) >= len(self.trace) or self.trace[: len(iteration)] != iteration:
            return False
        if self._has_backward and iteration[-1].phase is Phase.FORWARD:
            return True
        return iteration != self._shortened


def _forward_of(trace: Trace) -> Trace:
    """What comes before the first backward use."""
    phases = [access.phase for access in trace]
    return trace[: phases.index(Phase.BACKWARD)] if Phase.BACKWARD in phases else trace


def _mirror(forward: Trace) -> Trace:
    return tuple(Access(Phase.BACKWARD, access.unit) for access in reversed(forward))


def _merged(one: Trace, other: Trace, rank: Mapping[int, int]) -> Trace:
    """Everything that either uses, in an order that both keep; `one` where they contradict each other.

    Where nothing tells which comes first, module order does.
    """
    found: list[Access] = []
    for kind, first, last, other_first, other_last in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        theirs = other[other_first:other_last] if kind != "equal" else ()
        found += merge(one[first:last], theirs, key=lambda access: rank.get(access.unit, 0))
    most = Counter(one) | Counter(other)
    return tuple(found) if Counter(found) == most else one
