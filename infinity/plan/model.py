"""The model of a plan: its units with their parameters, floating-point operations and activations.

A multiply-add is two operations; a backward is twice its forward, and a recomputed forward once more.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from infinity.empty import empty_init
from infinity.errors import ConfigError, UnsupportedModelError
from infinity.models.gpt import Block, Gpt, GptShape
from infinity.plan.reading import read_json
from infinity.plan.unit_work import UnitWork, gpt_work
from infinity.units import RESIDENT_NAME, UnitSpec, partition

BACKWARD_FLOPS = 2.0  # of a forward
_FILLS = (torch.Tensor.fill_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model as the planner sees it.

    Attributes:
        specs: its units, as the engine would cut it.
        work: by unit name, the resident unit and what lies outside of all units under `RESIDENT_NAME`.
        order: unit names in the order of their forwards, when it was seen.
        untraced: why its forward is not known, empty where it is; without it operations are 2 per parameter and token,
            and activations are not known.
    """

    name: str
    module: nn.Module
    specs: Sequence[UnitSpec]
    work: Mapping[str, UnitWork]
    order: tuple[str, ...]
    seq: int
    batch: int
    untraced: str

    @property
    def is_traced(self) -> bool:
        """Whether its forward is known."""
        return not self.untraced

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(entry.parameter.numel() for spec in self.specs for entry in spec.own)

    @property
    def trainable_parameters(self) -> int:
        """Elements of the parameters that get gradients."""
        owned = (entry for spec in self.specs for entry in spec.own)
        return sum(entry.parameter.numel() for entry in owned if entry.parameter.requires_grad)

    @property
    def forward_flops(self) -> float:
        """Operations of one forward of a micro-batch."""
        return sum(work.forward_flops for work in self.work.values())

    def step_flops(self, *, recompute: bool) -> float:
        """Operations of one micro-batch, forward and backward."""
        return self.forward_flops * (1 + BACKWARD_FLOPS + recompute)

    def activation_nbytes(self, *, recompute: bool, batches: int = 1, slices: int = 1) -> int:
        """Most bytes of activations alive at once in one forward and backward.

        Args:
            batches: how many times the batch that was traced.
            slices: into how many parts units cut that. They recompute one part after the other; what lies outside of
                all units sees the whole.
        """
        outside = self.work[RESIDENT_NAME].saved_nbytes if RESIDENT_NAME in self.work else 0
        units = [work for name, work in self.work.items() if name != RESIDENT_NAME]
        if not recompute:
            return batches * (outside + sum(work.saved_nbytes for work in units))
        largest = max((work.saved_nbytes for work in units), default=0)
        boundaries = sum(work.boundary_nbytes for work in units)
        return batches * (outside + boundaries) + -(-batches // slices) * largest


def model_plan(
    source: str | GptShape,
    *,
    seq: int,
    batch: int,
    activation_itemsize: int,
    resident_threshold_nbytes: int,
    unit_classes: Sequence[str | type[nn.Module]] = (),
) -> ModelPlan:
    """The model of a plan.

    Args:
        source: the shape of a GPT, a Hugging Face `config.json` (or the folder it lies in), or `module:factory`.
        seq, batch: of one micro-batch.
        activation_itemsize: bytes of one number in an activation.
        unit_classes: see `partition`; of a GPT its blocks if empty, as `infinity train` has it.

    Raises:
        ConfigError: the source is not there or does not give a model.
    """
    if isinstance(source, GptShape):
        unit_classes = unit_classes or (Block,)
    with _importable(source):
        name, module = _build(source)
        specs = partition(module, resident_threshold_nbytes=resident_threshold_nbytes, unit_classes=unit_classes)
        if not specs:
            raise UnsupportedModelError(f"{name} has no parameters; there is nothing to plan")
        try:
            work, order = _work(source, module, specs, seq, batch, activation_itemsize)
            untraced = ""
        except Exception as error:  # of any kind: the forward is the user's; the notes of the plan tell of it
            work, order = _estimate(specs, seq * batch), ()
            untraced = f"{type(error).__name__}: {_first_line(error)}"
        return ModelPlan(name, module, specs, work, order, seq, batch, untraced)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _importable(source: str | GptShape) -> Iterator[None]:
    """A factory may lie in the current folder, as with `python -m`; what it imports while it is traced may too."""
    if isinstance(source, GptShape) or ":" not in source or _is_there(Path(source)):
        yield
        return
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with suppress(ValueError):  # the factory took it out
            sys.path.remove(here)


def _build(source: str | GptShape) -> tuple[str, nn.Module]:
    if isinstance(source, GptShape):
        with torch.device("meta"), _WithoutValues():
            return f"{source.layers} x {source.hidden} GPT", Gpt(source)
    path = Path(source)
    if _is_there(path) and path.is_dir():
        path = path / "config.json"
    with empty_init():
        if path.suffix == ".json" or _is_there(path):
            return _from_hugging_face(path)
        if ":" in source:
            return source, _from_factory(source)
    raise ConfigError(f"--model {source}: allowed: a config.json, the folder of one, or MODULE:FACTORY")


class _WithoutValues(TorchFunctionMode):
    """Constructors give no first values: on the meta device that is nothing, and takes longer than all the rest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in _FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _is_there(path: Path) -> bool:
    """Whether there is a file or a folder; what cannot be a path, such as a very long name, is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _from_hugging_face(path: Path) -> tuple[str, nn.Module]:
    settings = read_json("--model", path)
    if not isinstance(settings, dict):
        raise ConfigError(f"--model {path}: this is not a config.json of Hugging Face, but a {type(settings).__name__}")
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--model config.json needs transformers: pip install transformers") from error
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"--model {path}: model_type {kind!r} is unknown to transformers {transformers.__version__}")
    try:
        made = _made_from(settings)
    except Exception as error:  # of any kind: it is another package's, made of what the file says
        raise ConfigError(
            f"--model {path}: transformers {transformers.__version__} makes no model of this: "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error
    return f"{kind} of {path}", made


def _made_from(settings: Mapping[str, Any]) -> nn.Module:
    """The model that a config.json describes: of the first class it names that transformers has, else a causal one."""
    import transformers

    config = transformers.AutoConfig.for_model(**settings)
    named = [getattr(transformers, name, None) for name in settings.get("architectures") or ()]
    made = next((each(config) for each in named if each is not None), None)
    if made is None:
        made = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if not isinstance(made, nn.Module):
        raise TypeError(f"architectures {settings['architectures']} are no models")
    return made


def _from_factory(source: str) -> nn.Module:
    module_name, _, attribute = source.partition(":")
    try:
        factory: Callable[[], object] = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        looked = f"looked in the current folder {Path.cwd()}, in PYTHONPATH and among what is installed"
        raise ConfigError(f"--model {source}: cannot be imported: {error}; {looked}") from error
    except Exception as error:  # of any kind: the module is the user's
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"--model {source}: cannot be imported: {what}") from error
    if not callable(factory):
        raise ConfigError(f"--model {source}: is a {type(factory).__name__}; it must be a function that makes a model")
    try:
        model = factory()
    except Exception as error:  # of any kind, as above
        raise ConfigError(
            f"--model {source}: fails with {type(error).__name__}: {_first_line(error)}; it is called without arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {source}: returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


# Work ---------------------------------------------------------------------------------------------------------------


def _work(
    source: str | GptShape, module: nn.Module, specs: Sequence[UnitSpec], seq: int, batch: int, itemsize: int
) -> tuple[dict[str, UnitWork], tuple[str, ...]]:
    """What every unit computes, and their order. Our own transformer is known; any other has to run."""
    if isinstance(source, GptShape):
        known = gpt_work(source, [spec.name for spec in specs if not spec.resident], seq, batch, itemsize)
        if known is not None:
            return known
    from infinity.plan.tracing import trace  # a forward on the meta device loads torch's compiler, which takes a second

    return trace(module, specs, seq, batch, itemsize)


def _estimate(specs: Sequence[UnitSpec], tokens: int) -> dict[str, UnitWork]:
    """Two operations per parameter and token: right for models of matrices, without attention."""
    return {spec.name: UnitWork(2.0 * tokens * sum(e.parameter.numel() for e in spec.own), 0, 0) for spec in specs}
