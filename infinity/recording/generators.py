"""The order in which constructors use random number generators.

Operations without memory draw nothing. To see where a constructor seeds a generator or puts back an earlier state, a
number is written into the generator's state when the recording begins and after each recorded drawing: so the states
are all different, and one that is not the last names the point to which the constructor went back, or is new. When the
recording ends the default generator is given back as it was. One that was passed gets a mark too, so that a later
recording can tell whether it goes on or has been seeded in the same way once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import torch

from infinity.errors import UnsupportedModelError
from infinity.recording.tape import Operation, Reseeded, Tape, Track
from infinity.torch_compat import generator_id

_MARKED_WORD = 100  # one of the 624 words of the Mersenne Twister: 64 bits each in a state, of which 32 count
_LEFT = 0


@dataclass(slots=True)
class _Point:
    after: Operation | None
    base: torch.Tensor  # what the generator is set to when the recording ends after this point


@dataclass(slots=True)
class _Watched:
    track: Track
    present: bytes
    base: torch.Tensor
    points: dict[bytes, _Point] = field(default_factory=dict)


class Generators:
    """Those that a recording uses, each from its first use on; the default one from the beginning."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._watched: dict[int, _Watched] = {}
        self._marks = count(_LEFT + 1)
        self.before_drawing(torch.default_generator)
        known = self._watched[generator_id(torch.default_generator)]
        known.points = {self._mark(known): _Point(None, known.base)}

    def before_drawing(self, generator: torch.Generator) -> Track:
        """Note whether the generator's state has been set since it last drew.

        Raises:
            UnsupportedModelError: it was set to that of another generator, which is not known yet.
        """
        state = generator.get_state()
        key = _key(state)
        known = self._watched.get(generator_id(generator))
        if known is None:
            state = self._of_another(state, key)
            key = _key(state)
            track = Track(generator, start=state, left=state)
            self._tape.tracks.append(track)
            self._watched[generator_id(generator)] = _Watched(track, key, state, {key: _Point(None, state)})
            return track
        if key != known.present:
            point = known.points.get(key)
            known.present = key
            if point is None:
                state = self._of_another(state, key)
                known.base = state
                self._tape.entries.append(Reseeded(known.track, state=state))
            else:
                known.base = point.base
                self._tape.entries.append(Reseeded(known.track, after=point.after))
        return known.track

    def _of_another(self, state: torch.Tensor, key: bytes) -> torch.Tensor:
        """The state that a recorded one stands for: another generator may have been in it.

        Raises:
            UnsupportedModelError: it is not known yet.
        """
        points = [known.points[key] for known in self._watched.values() if key in known.points]
        if any(point.after is not None for point in points):
            raise UnsupportedModelError(
                "a constructor gives a random number generator the state of another one, whose numbers are drawn later "
                "under infinity.empty_init(). Seed it instead, as in torch.Generator().manual_seed(SEED), or build the "
                "model outside infinity.empty_init()"
            )
        return points[0].base if points else state

    def _mark(self, known: _Watched) -> bytes:
        """Give a generator a state that it has had never before."""
        state = _marked(known.track.generator.get_state(), next(self._marks))
        known.track.generator.set_state(state)
        known.present = _key(state)
        return known.present

    def drawn(self, operation: Operation) -> None:
        """An operation that draws has been recorded, and done if it had memory."""
        if operation.track is None:
            return
        generator = operation.track.generator
        known = self._watched[generator_id(generator)]
        known.points[self._mark(known)] = _Point(operation, known.base)

    def end(self) -> None:
        """The recording ends.

        Raises:
            UnsupportedModelError: a generator was left in a state of another one, which is not known yet.
        """
        try:
            for known in list(self._watched.values()):
                self.before_drawing(known.track.generator)
        finally:
            for known in self._watched.values():
                is_default = generator_id(known.track.generator) == generator_id(torch.default_generator)
                left = known.base if is_default else _marked(known.base, _LEFT)
                known.track.generator.set_state(left)
                known.track.left = left


def _marked(state: torch.Tensor, mark: int) -> torch.Tensor:
    marked = state.clone()
    marked.view(torch.int64)[_MARKED_WORD] = mark
    return marked


def _key(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
