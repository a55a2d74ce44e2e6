"""Which tensor of the files belongs to which parameter or buffer of the model, and what is missing or left over.

Names are compared as `load_state_dict` does, with these additions. Tied parameters are found under any of their names.
Prefixes that wrappers add (`module.`, `_orig_mod.`) are ignored. Models of transformers find their weights as with
`from_pretrained`: with or without the prefix of the base model, under former names, and experts that files hold one by
one and the model in one tensor. The base of a PEFT model finds the weights of the model that it adapts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import CheckpointError
from infinity.territory import Territory
from infinity.units import Parameters, refuse_lazy
from infinity.weights.source import Weights
from infinity.weights.transformers_names import Renamed, Renamer, file_name_of, ignored, is_of_adapter, pretrained_of

_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_MERGE = "MergeModulelist(dim=0)"
# Of these the result, in row order, is the sources one after another: whole, or one of each pattern in turns.
_JOINED = (("Concatenate(dim=0)",),)
_STACKED = ((_MERGE,), (_MERGE, "Concatenate(dim=1)"))


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter or persistent buffer of the model, under its first name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]  # all of its names, in the order of the modules


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What was loaded: names that only the model has, names that only the files have, and bytes read of tensors."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    read_nbytes: int


@dataclass(frozen=True, slots=True)
class Match:
    """Where the values of a model come from.

    Attributes:
        parts: by the first name of a parameter or buffer, the tensors that hold it, one after another in row order.
        missing, unexpected: names that only the model has, and that only the files have.
    """

    weights: Weights
    parts: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def loaded(self) -> LoadedWeights:
        """What has been read so far."""
        return LoadedWeights(self.missing, self.unexpected, self.weights.read_nbytes)

    def read(self, name: str, start: int, into: torch.Tensor, scratch: torch.Tensor, dtype: torch.dtype) -> None:
        """Fill `into` (1-D, CPU, contiguous) with elements of a parameter or buffer from `start` on.

        Rounds as `load_state_dict` into a parameter of `dtype` does, and then converting that to the dtype of `into`.

        Args:
            scratch: at least as many bytes as the piece has in the file.
        """
        position = 0  # of the part, in the parameter
        for part in self.parts[name]:
            stored = self.weights.tensors[part]
            first, last = max(start, position), min(start + into.numel(), position + stored.numel)
            if first < last:
                self._read_part(part, first - position, into[first - start : last - start], scratch, dtype)
            position += stored.numel

    def _read_part(self, part: str, start: int, into: torch.Tensor, scratch: torch.Tensor, dtype: torch.dtype) -> None:
        stored = self.weights.tensors[part].dtype
        if into.dtype is stored and (dtype is stored or not stored.is_floating_point):
            self.weights.read(part, start, into)
            return
        piece = scratch.view(torch.uint8)[: into.numel() * stored.itemsize].view(stored)
        self.weights.read(part, start, piece)
        with torch.no_grad():
            into.copy_(piece if dtype in (stored, into.dtype) else piece.to(dtype))


def places_of(model: nn.Module) -> dict[str, Place]:
    """Every parameter and persistent buffer, by its first name.

    Raises:
        UnsupportedModelError: one has no shape yet.
    """
    first = {id(entry.parameter): entry.name for entry in Parameters(model)}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    tensors: dict[str, torch.Tensor] = {entry.name: entry.parameter for entry in Parameters(model)}
    for prefix, module in Territory(model).named_modules(remove_duplicate=False):
        held = {**module._parameters, **_persistent(module)}
        for attribute, tensor in held.items():
            if tensor is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            canonical = first.setdefault(id(tensor), name)
            names.setdefault(canonical, []).append(name)
            tensors.setdefault(canonical, tensor)
    for name, tensor in tensors.items():
        refuse_lazy(name, tensor)
    return {name: Place(tuple(t.shape), t.dtype, tuple(names[name])) for name, t in tensors.items()}


def _persistent(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}


def match_weights(model: nn.Module, weights: Weights, *, strict: bool) -> Match:
    """Find the values of a model in files.

    Args:
        strict: refuse missing and unexpected names, as `load_state_dict` does; else they are told in the result.

    Raises:
        CheckpointError: it names every parameter that is missing (if strict), has no place in the model (if strict), or
            has another shape, or complex numbers for real ones.
    """
    places = places_of(model)
    found, unexpected = _find(model, weights, places)
    parts: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    prefers_first = pretrained_of(model) is not None  # transformers ties the others to the first one after loading
    for name, sources in found.items():
        place = places[name]
        ordered, shape = _put_together(name, place, sources, weights, prefers_first=prefers_first)
        parts[name] = ordered
        problems += _mismatches(name, place, shape, [weights.tensors[part].dtype for part in ordered])
    is_ignored = ignored(model, "missing")
    missing = [n for n in places if n not in found and not is_ignored(n) and not is_of_adapter(model, n)]
    if strict:
        problems = [*_listed("Missing", missing), *_listed("Unexpected", unexpected), *problems]
    if problems:
        raise CheckpointError(
            "\n\t".join([f"error(s) in loading {weights.path} for {type(model).__name__}:", *problems])
            + "\nGive the weights of this model; strict=False accepts missing and unexpected keys, but no other shape"
        )
    return Match(weights, parts, tuple(missing), tuple(unexpected))


def _mismatches(name: str, place: Place, shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> Iterator[str]:
    if shape != place.shape:
        yield f"size mismatch for {name}: it has shape {shape} in the file, the shape in the model is {place.shape}."
    for dtype in dict.fromkeys(dtypes):
        if dtype.is_complex and dtype != place.dtype:
            yield f"dtype mismatch for {name}: it is {dtype} in the file, and {place.dtype} in the model."


def _listed(kind: str, names: Sequence[str]) -> list[str]:
    return [f"{kind} key(s): {', '.join(map(repr, names))}."] if names else []


def _find(
    model: nn.Module, weights: Weights, places: Mapping[str, Place]
) -> tuple[dict[str, list[tuple[str, Renamed]]], list[str]]:
    """By first name, the tensors that may hold it with how they were recognised; and the names of the others."""
    lookup: dict[str, list[str]] = {}
    for canonical, place in places.items():
        for name in place.names:
            for known in dict.fromkeys((name, _unwrapped(name), file_name_of(model, name))):
                lookup.setdefault(known, []).append(canonical)
    pretrained = pretrained_of(model)
    renamer = Renamer(pretrained, lookup) if pretrained is not None else None
    is_ignored = ignored(model, "unexpected")
    found: dict[str, list[tuple[str, Renamed]]] = {}
    unexpected = []
    for name in weights.tensors:
        renamed = next((r for r in _candidates(name, renamer) if r.name in lookup), None)
        if renamed is not None:
            for canonical in dict.fromkeys(lookup[renamed.name]):
                found.setdefault(canonical, []).append((name, renamed))
        elif not is_ignored(name):
            unexpected.append(name)
    return found, unexpected


def _candidates(name: str, renamer: Renamer | None) -> Iterable[Renamed]:
    for base in dict.fromkeys((name, _unwrapped(name))):
        yield Renamed(base)
        if renamer is not None:
            yield from renamer.candidates(base)


def _unwrapped(name: str) -> str:
    """The name without what wrappers add anywhere in it."""
    for prefix in _WRAPPER_PREFIXES:
        if name.startswith(prefix):
            return _unwrapped(name.removeprefix(prefix))
    return name.replace("._orig_mod.", ".")


def _put_together(
    name: str, place: Place, sources: Sequence[tuple[str, Renamed]], weights: Weights, *, prefers_first: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The tensors that make up a parameter, in row order, and the shape that they make up."""
    whole = [(source, renamed) for source, renamed in sources if renamed.pattern is None]
    if whole:  # perhaps under several of its names: the last one is what load_state_dict would leave in it
        order = {known: number for number, known in enumerate(place.names)}
        choose = min if prefers_first else max
        chosen, _ = choose(whole, key=lambda pair: order.get(pair[1].name, -1))
        return (chosen,), weights.tensors[chosen].shape
    first = sources[0][1]
    by_pattern = [
        sorted((s for s, renamed in sources if renamed.pattern == pattern), key=_natural) for pattern in first.patterns
    ]
    shapes = [[weights.tensors[source].shape for source in group] for group in by_pattern]
    is_even = all(group and len(set(group)) == 1 for group in shapes) and len({len(group) for group in shapes}) == 1
    if not is_even or first.operations not in (*_JOINED, *_STACKED):
        raise CheckpointError(
            f"{weights.path}: {name!r} is made from {', '.join(repr(s) for s, _ in sources[:3])} in a way that is not "
            f"supported ({', '.join(first.operations)}). Load the model with transformers, save it with "
            "model.save_pretrained(folder, save_original_format=False), and give that folder"
        )
    in_turns = [source for group in zip(*by_pattern, strict=True) for source in group]
    rows = sum(group[0][0] for group in shapes)
    if first.operations in _JOINED:
        return tuple(s for group in by_pattern for s in group), (rows * len(by_pattern[0]), *shapes[0][0][1:])
    return tuple(in_turns), (len(by_pattern[0]), rows, *shapes[0][0][1:])


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key in which experts.10 comes after experts.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
