"""The order in which constructors use random number generators.

Operations without memory draw nothing. To see where a constructor seeds a generator or puts back an earlier state, each
recorded drawing really draws one number: so the states are all different, and one that is not the last names the point
to which the constructor went back, or is new. When the recording ends the generator is given back as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from infinity.errors import UnsupportedModelError
from infinity.recording.tape import Operation, Reseeded, Tape, Track
from infinity.torch_compat import generator_id


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
        self.before_drawing(torch.default_generator)

    def before_drawing(self, generator: torch.Generator) -> Track:
        """Note whether the generator's state has been set since it last drew.

        Raises:
            UnsupportedModelError: it was set to that of another generator, which is not known yet.
        """
        state = generator.get_state()
        key = _key(state)
        known = self._watched.get(generator_id(generator))
        if known is None:
            self._refuse_anothers(key)
            track = Track(generator, start=state, left=state)
            self._tape.tracks.append(track)
            self._watched[generator_id(generator)] = _Watched(track, key, state, {key: _Point(None, state)})
            return track
        if key != known.present:
            point = known.points.get(key)
            known.present = key
            if point is None:
                self._refuse_anothers(key)
                known.base = state
                self._tape.entries.append(Reseeded(known.track, state=state))
            else:
                known.base = point.base
                self._tape.entries.append(Reseeded(known.track, after=point.after))
        return known.track

    def _refuse_anothers(self, key: bytes) -> None:
        points = [known.points[key] for known in self._watched.values() if key in known.points]
        if any(point.after is not None for point in points):
            raise UnsupportedModelError(
                "a constructor gives a random number generator the state of another one, whose numbers are drawn later "
                "under infinity.empty_init(). Seed it instead, as in torch.Generator().manual_seed(SEED), or build the "
                "model outside infinity.empty_init()"
            )

    def drawn(self, operation: Operation) -> None:
        """An operation that draws has been recorded, and done if it had memory."""
        if operation.track is None:
            return
        generator = operation.track.generator
        known = self._watched[generator_id(generator)]
        torch.rand(1, generator=generator, device="cpu")
        known.present = _key(generator.get_state())
        known.points[known.present] = _Point(operation, known.base)

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
                known.track.generator.set_state(known.base)
                known.track.left = known.base


def _key(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
