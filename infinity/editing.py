"""`gathered()`: reading and editing parameters outside a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.groups import FlatGroup
from infinity.released import ref_of


@contextmanager
def gathered(target: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> Iterator[None]:
    """Make parameters of an offloaded model present, to read or edit them in place.

    What was changed is written back at the end; what was only read is not. In bf16 a changed element becomes exactly
    its bf16 value, as after `model.to(torch.bfloat16)`. If the block ends with an exception nothing is written back.

    A parameter kept after the block refuses to be read, as any other. A view of one (`p.detach()`, `p[0]`) shows the
    present values as long as it lives and keeps the device memory of its unit: keep a clone instead. Edit under
    `torch.no_grad()`, or through `.data`.

    Args:
        target: a module (all its parameters), a parameter, or several parameters.

    Raises:
        ConfigError: nothing of `target` is offloaded.
        DeviceOutOfMemoryError: the device budget cannot hold all of it at once; gather parts one after another.

    Example:
        ```python
        with infinity.gathered(model.lm_head):
            print(model.lm_head.weight.norm())
        ```
    """
    parameters = _parameters_of(target)
    refs = [ref for ref in map(ref_of, parameters) if ref is not None]
    if not refs:
        raise ConfigError("gathered() was given no parameter of an offloaded model")
    wanted: dict[Engine, dict[int, FlatGroup]] = {}  # a model may have one of another engine in it
    for ref in refs:
        if not isinstance(ref.access, Engine):
            raise ConfigError(f"parameter {ref.name!r} was removed from its model before engine.adopt() was called")
        if ref.access.is_closed:
            raise ConfigError(f"parameter {ref.name!r} belongs to an engine that is closed")
        wanted.setdefault(ref.access, {})[ref.group.index] = ref.group
    with ExitStack() as stack:
        for engine, groups in wanted.items():
            stack.enter_context(engine.hold(list(groups.values())))
        yield


def _parameters_of(target: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(target, nn.Module):
        return list(target.parameters())
    return [target] if isinstance(target, torch.Tensor) else list(target)
