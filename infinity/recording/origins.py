"""Which tape gives a tensor without memory its values.

The only state of this package that outlives a `with` block, because nothing else connects a model with its recording:
a parameter may be replaced by one of another dtype, deep-copied or tied. Keys are weak: an entry, and the tape when it
was the last one, goes with the storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import current_thread
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import UnsupportedModelError
from infinity.recording.tape import Block, Origin, Tape, Track
from infinity.torch_compat import generator_id

_ORIGINS: WeakKeyDictionary[torch.UntypedStorage, Origin] = WeakKeyDictionary()
_MADE: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of modules, the ids and dtypes of parameters by name
_IS_RECORDING: ContextVar[bool] = ContextVar("is_recording", default=False)


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """The record of a tensor's storage."""
    return _ORIGINS.get(tensor.untyped_storage())


def is_anything_recorded() -> bool:
    """Whether there is a tensor without memory, of whatever model, that has a record."""
    return any(storage.device.type == "meta" for storage in _ORIGINS)


def set_origin(tensor: torch.Tensor, origin: Origin) -> None:
    """Say where a tensor's storage gets its values."""
    _ORIGINS[tensor.untyped_storage()] = origin


@contextmanager
def noting_versions() -> Iterator[None]:
    """Remember the state in which the parameters that modules get in the block are left at its end.

    Raises:
        UnsupportedModelError: modules were made by another thread meanwhile, of which nothing is recorded.
    """
    seen: dict[int, nn.Parameter] = {}
    places: dict[tuple[int, str], nn.Module] = {}
    elsewhere: list[str] = []

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not is_recording():
            elsewhere.append(f"parameter {name!r} of a {type(module).__name__} in thread {current_thread().name!r}")
        if parameter is not None and parameter.is_meta:
            seen[id(parameter)] = parameter
            places[id(module), name] = module

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
        if elsewhere:
            raise UnsupportedModelError(
                f"while infinity.empty_init() recorded here, another thread made {elsewhere[0]}, with random numbers "
                "out of order. Build models in the thread that is inside infinity.empty_init(), one at a time"
            )
    finally:
        handle.remove()
        for parameter in seen.values():
            origin = None if is_lazy(parameter) else origin_of(parameter)
            if origin is not None:
                origin.block.versions.add(parameter._version)
        for (_, name), module in places.items():
            held = module._parameters.get(name)
            if held is not None and held.is_meta and not is_lazy(held) and origin_of(held) is not None:
                _MADE[module] = {**_MADE.get(module, {}), name: (id(held), held.dtype)}  # type: ignore[no-untyped-call]


def is_changed(parameter: torch.Tensor, block: Block) -> bool:
    """Whether a parameter has been changed since its recording ended, which is in no record."""
    return bool(block.versions) and parameter._version not in block.versions


def converted_from(module: nn.Module, name: str) -> torch.dtype | None:
    """Of a module's parameter whose record was lost when it got another storage after the recording: its dtype before.

    Told by the module and the parameter's id: a parameter that is referred to weakly could not become its stand-in.
    """
    parameter = module._parameters[name]
    if parameter is None or not parameter.is_meta or is_lazy(parameter) or origin_of(parameter) is not None:
        return None
    number, before = _MADE.get(module, {}).get(name, (None, None))  # type: ignore[no-untyped-call]
    return before if number == id(parameter) else None


def is_recording() -> bool:
    """Whether this thread is inside `recording_here`."""
    return _IS_RECORDING.get()


@contextmanager
def recording_here() -> Iterator[None]:
    """This thread records in the block."""
    token = _IS_RECORDING.set(True)
    try:
        yield
    finally:
        _IS_RECORDING.reset(token)


def advance(done: Track, before: torch.Tensor, end: torch.Tensor, replaying: Mapping[int, Tape]) -> None:
    """A recording was replayed: those that began where it ended begin, in the order of random numbers, after it.

    Args:
        before: the state in which the generator was left by the recording that was replayed.
        end: its state after the replay.
        replaying: tapes of which storages may be gone already, by id.
    """
    tapes = {id(origin.tape): origin.tape for origin in _ORIGINS.values()} | dict(replaying)
    for track in (track for tape in tapes.values() for track in tape.tracks if track is not done):
        is_same = generator_id(track.generator) == generator_id(done.generator)
        if is_same and torch.equal(track.start, before):
            if torch.equal(track.left, before):
                track.left = end
            track.start = end
