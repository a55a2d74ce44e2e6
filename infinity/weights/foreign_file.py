"""Files of `torch.save` with objects of another library in them, read without that library and without its code.

Classes of the named packages become inert: they keep what they were made with, and nothing of theirs runs. All other
code in the file is refused, as `weights_only` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from infinity.errors import CheckpointError
from infinity.weights.torch_file import load_torch_file, reading


class Inert:
    """Stands for an object of a class that is not here: the arguments and the state it was saved with."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """What it was made with is kept already."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return hash(repr(self.args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inert) and self.args == other.args


def load_foreign_file(path: Path, packages: tuple[str, ...]) -> Any:
    """What `torch.save` wrote, tensors memory-mapped on the CPU, objects of `packages` as `Inert` ones.

    Raises:
        CheckpointError: the file is missing or damaged, or holds objects of others.
    """
    with reading(path):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    others = [name for name in names if name.partition(".")[0] not in packages]
    if others:
        raise CheckpointError(
            f"{path} holds objects of {', '.join(others[:3])}, which only running code of theirs could restore; save "
            "the checkpoint without them"
        )
    with torch.serialization.safe_globals([_stand_in(name) for name in names]):
        return load_torch_file(path)


def _stand_in(name: str) -> type[Inert]:
    """An inert class that says it is the one of this name, which is how it is found while loading."""
    module, _, qualified = name.rpartition(".")
    return type(qualified, (Inert,), {"__module__": module, "__qualname__": qualified})
