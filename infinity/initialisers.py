"""How a model initialises itself: which module does what, in the order in which ordinary construction does it.

Models built under `infinity.empty_init()` bring a record instead; see recorded_init.py. These rules are for models put
on `meta` otherwise, for parameters that replaced recorded ones, and for `init_fn`.

| model | each module is initialised by | order |
|---|---|---|
| with `init_fn` | `init_fn(module)`, if it owns parameters | that of `model.modules()` |
| of transformers | its model's `_init_weights(module)` | children first, inner models before outer ones |
| other | its `reset_parameters()` | that of `model.modules()`; attention after its projection |

[Note: numbers drawn for nothing] Constructing a model of transformers draws random numbers twice: every module
initialises itself when it is made, and `_init_weights` overwrites that when the (inner) model is complete. To give the
same values from the same seed, the first drawing is repeated in memory that is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infinity.errors import UnsupportedModelError
from infinity.territory import Territory

InitFn = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True)
class InitStep:
    """One module initialises itself.

    Attributes:
        touches: the modules whose own parameters and buffers it fills.
        run: does it.
        fallback: how the module was made, for what `run` leaves alone.
        is_drawn: only for the random numbers; see [Note: numbers drawn for nothing].
    """

    touches: tuple[nn.Module, ...]
    run: Callable[[], object]
    fallback: Callable[[], object] | None = None
    is_drawn: bool = False

    @property
    def module(self) -> nn.Module:
        return self.touches[0]


@dataclass(frozen=True, slots=True)
class InitPlan:
    """Steps in order.

    Attributes:
        reaches_down: a step may fill parameters of modules inside its own.
    """

    steps: tuple[InitStep, ...]
    reaches_down: bool = False

    def last_reaching(self, module: nn.Module) -> list[nn.Module]:
        """The modules whose steps may fill parameters of a unit, given its module, after the unit's own steps.

        A block is filled by what is inside it. Models fill single layers of theirs, such as an embedding, once more.
        """
        if not self.reaches_down:
            return []
        is_layer = not any(True for child in module.children() for _ in child.parameters())
        around = [s.module for s in self.steps if is_pretrained(s.module) and not s.is_drawn] if is_layer else []
        return [module, *(model for model in around if any(part is module for part in model.modules()))]


def plan_initialisation(model: nn.Module, init_fn: InitFn | None) -> InitPlan:
    """How the modules of a model are initialised."""
    if init_fn is not None:
        return InitPlan(tuple(_steps_with(model, init_fn)))
    territory = Territory(model)
    theirs = {id(module) for _, border in territory.borders for module in border.modules()}
    if any(is_pretrained(module) for module in territory.modules()):
        steps = _Pretrained(getattr(model, "peft_config", {}), theirs).steps(model)
        return InitPlan(tuple(steps), reaches_down=True)
    return InitPlan(tuple(_plain_steps(model, theirs)))


def _steps_with(model: nn.Module, init_fn: InitFn) -> Iterator[InitStep]:
    """Modules without parameters, which may have buffers, initialise themselves as without the function."""
    own = {id(step.module): step for step in plan_initialisation(model, None).steps if not step.is_drawn}
    for module in Territory(model).modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            yield InitStep((module,), _call(init_fn, module))
        elif id(module) in own:
            yield replace(own[id(module)], touches=(module,))


def constructor_of(module: nn.Module) -> Callable[[], object] | None:
    """How a module initialises what it owns. Attention does so under a name of its own, after its projection has."""
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return lambda: _construct_conv1d(module)
    is_attention = isinstance(module, nn.MultiheadAttention)
    reset = getattr(module, "_reset_parameters" if is_attention else "reset_parameters", None)
    return reset if callable(reset) else None


def _construct_conv1d(module: nn.Module) -> None:
    nn.init.normal_(module.get_parameter("weight"), std=0.02)
    nn.init.zeros_(module.get_parameter("bias"))


def _call(function: InitFn, module: nn.Module) -> Callable[[], object]:
    return lambda: function(module)


def is_pretrained(module: nn.Module) -> bool:
    """Whether it is a model of transformers, which knows how its modules are initialised."""
    # Asked of the class, because wrappers pass on what they are asked for.
    return hasattr(type(module), "base_model_prefix") and hasattr(type(module), "_init_weights")


def _is_adapter_layer(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_lora_parameters", None)) and hasattr(module, "base_layer")


def _plain_steps(module: nn.Module, seen: set[int]) -> Iterator[InitStep]:
    """As constructors do it. A module that is in several places is made once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    constructor = constructor_of(module)
    is_attention = isinstance(module, nn.MultiheadAttention)
    if constructor is not None and not is_attention:
        yield InitStep((module,), constructor)
    for child in module.children():
        yield from _plain_steps(child, seen)
    if constructor is not None and is_attention:
        yield InitStep(tuple(module.modules()), constructor)


class _Pretrained:
    """Steps of a model that has models of transformers in it.

    Args:
        adapters: PEFT's settings by name of the adapter.
        theirs: ids of modules that another engine serves and has initialised.
    """

    def __init__(self, adapters: Mapping[str, Any], theirs: Set[int]) -> None:
        self._adapters = adapters
        self._made = set(theirs)
        self._done = set(theirs)

    def steps(self, module: nn.Module) -> Iterator[InitStep]:
        if is_pretrained(module):
            yield from self._drawn(module, module)
            initialise: Any = module._init_weights
            yield from self._initialised(module, initialise)
        elif id(module) not in self._made:
            self._made.add(id(module))
            constructor = constructor_of(module)
            if constructor is not None:
                yield InitStep((module,), constructor)
            for child in module.children():
                yield from self.steps(child)

    def _drawn(self, module: nn.Module, model: nn.Module) -> Iterator[InitStep]:
        """What making a model's modules draws; models inside it initialise themselves as soon as they are made."""
        if id(module) in self._made:
            return
        self._made.add(id(module))
        if module is not model and is_pretrained(module):
            self._made.discard(id(module))
            yield from self.steps(module)
            return
        constructor = constructor_of(module)
        if constructor is not None:
            yield InitStep((module,), constructor, is_drawn=True)
        for child in _known_children(module):
            yield from self._drawn(child, model)

    def _initialised(self, module: nn.Module, initialise: InitFn) -> Iterator[InitStep]:
        if id(module) in self._done:
            return
        self._done.add(id(module))
        for child in _known_children(module):
            yield from self._initialised(child, initialise)
        if _is_adapter_layer(module):
            inner = {id(part) for part in module.get_submodule("base_layer").modules()}
            own = tuple(part for part in module.modules() if id(part) not in inner)
            yield InitStep(own, lambda: self._reset_adapters(module))
        else:
            yield InitStep((module,), _call(initialise, module), constructor_of(module))

    def _reset_adapters(self, layer: Any) -> None:
        """The values that PEFT gives new adapters."""
        for name in dict.fromkeys((*layer.lora_A, *layer.lora_embedding_A)):
            chosen = getattr(self._adapters.get(name), "init_lora_weights", True)
            if chosen not in (True, "gaussian"):
                raise UnsupportedModelError(
                    f"adapter {name!r} has init_lora_weights={chosen!r}, which needs more than the adapter itself. "
                    "Build the model with its weights and then the adapter, or use init_lora_weights=True"
                )
            layer.reset_lora_parameters(name, chosen)


def _known_children(module: nn.Module) -> list[nn.Module]:
    """The children that transformers knows: of an adapter's layer only the layer that it adapts."""
    return [module.get_submodule("base_layer")] if _is_adapter_layer(module) else list(module.children())
