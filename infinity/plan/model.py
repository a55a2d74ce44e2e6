"""The model of a plan: its units with their parameters, floating-point operations and activations, from a forward on
the meta device, where nothing is computed and no memory is taken.

Operations are counted by torch's own formulas (`torch.utils.flop_counter`), a multiply-add as two; a backward is twice
its forward, and a recomputed forward once more. Activations are the tensors that autograd saves, parameters aside. The
meta device has no fused attention and saves the matrix of [sequence, sequence] that fused kernels never store, so what
`scaled_dot_product_attention` saves is counted as those kernels have it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from infinity.errors import ConfigError, UnsupportedModelError
from infinity.init import empty_init
from infinity.models.gpt import Gpt, GptShape
from infinity.plan.reading import read_json
from infinity.units import RESIDENT_NAME, UnitSpec, partition

BACKWARD_FLOPS = 2.0  # of a forward
_LOGSUMEXP_NBYTES = 4  # what fused attention keeps of each row of its matrix, in fp32


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What one micro-batch computes in a unit.

    Attributes:
        forward_flops: floating-point operations of one forward.
        saved_nbytes: activations that are kept until the backward, when nothing is recomputed.
        boundary_nbytes: what the unit returns, which is kept in any case.
    """

    forward_flops: float
    saved_nbytes: int
    boundary_nbytes: int


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model as the planner sees it.

    Attributes:
        specs: its units, as the engine would cut it.
        work: by unit name, the resident unit and what lies outside of all units under `RESIDENT_NAME`.
        order: unit names in the order of their forwards, when it was seen.
        untraced: why no forward ran, empty where one did; without one operations are 2 per parameter and token, and
            activations are not known.
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
        """Whether a forward ran."""
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

    Raises:
        ConfigError: the source is not there or does not give a model.
    """
    with _importable(source):
        with empty_init():
            name, module = _build(source)
        specs = partition(module, resident_threshold_nbytes=resident_threshold_nbytes, unit_classes=unit_classes)
        if not specs:
            raise UnsupportedModelError(f"{name} has no parameters; there is nothing to plan")
        try:
            work, order = _trace_once(source, module, specs, seq, batch, activation_itemsize)
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
        return f"{source.layers} x {source.hidden} GPT", Gpt(source)
    path = Path(source)
    if _is_there(path) and path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or _is_there(path):
        return _from_hugging_face(path)
    if ":" in source:
        return source, _from_factory(source)
    raise ConfigError(f"--model {source}: allowed: a config.json, the folder of one, or MODULE:FACTORY")


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


# Tracing ------------------------------------------------------------------------------------------------------------


class _Meter(TorchFunctionMode):
    """Charges operations and saved tensors to the unit that runs."""

    def __init__(self, specs: Sequence[UnitSpec], itemsize: int) -> None:
        super().__init__()
        self._itemsize = itemsize
        self._running = [RESIDENT_NAME]
        self._is_in_attention = False
        self._seen: set[int] = set()
        self._kept: list[torch.Tensor] = []  # ids of storages stay unique while these live
        self._parameters = {id(entry.parameter) for spec in specs for entry in spec.own}
        self.flops: dict[str, float] = {RESIDENT_NAME: 0.0}
        self.saved: dict[str, int] = {RESIDENT_NAME: 0}
        self.boundary: dict[str, int] = {}
        self.order: list[str] = []
        self.counter = FlopCounterMode(display=False)
        self._counted = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self._is_in_attention = True
        try:
            output = func(*args, **kwargs)
        finally:
            self._is_in_attention = False
        if output.requires_grad:
            for tensor in (*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs), output):
                self.pack(tensor)
            rows = output.numel() // max(output.shape[-1], 1)
            self._save(rows * _LOGSUMEXP_NBYTES)
        return output

    def _charge(self) -> None:
        total = float(self.counter.get_total_flops())
        name = self._running[-1]
        self.flops[name] = self.flops.get(name, 0.0) + total - self._counted
        self._counted = total

    def enter(self, name: str) -> None:
        """A unit begins."""
        self._charge()
        self._running.append(name)
        self.order.append(name)

    def leave(self, output: Any) -> None:
        """The unit that runs ends."""
        self._charge()
        name = self._running.pop()
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.boundary[name] = self.boundary.get(name, 0) + sum(map(self._nbytes, tensors))

    def finish(self) -> None:
        """The forward has ended."""
        self._charge()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd saves a tensor."""
        storage = tensor.untyped_storage()._cdata
        base = tensor._base if tensor._base is not None else tensor
        is_activation = id(tensor) not in self._parameters and id(base) not in self._parameters
        if is_activation and storage not in self._seen and not self._is_in_attention:
            self._seen.add(storage)
            self._kept.append(tensor)
            self._save(self._nbytes(base))
        return tensor

    def _save(self, nbytes: int) -> None:
        name = self._running[-1]
        self.saved[name] = self.saved.get(name, 0) + nbytes

    def _nbytes(self, tensor: torch.Tensor) -> int:
        """On the meta device everything computes in fp32; what a run computes in is known to the planner."""
        return tensor.numel() * (self._itemsize if tensor.dtype.is_floating_point else tensor.itemsize)


def _trace_once(
    source: str | GptShape, module: nn.Module, specs: Sequence[UnitSpec], seq: int, batch: int, itemsize: int
) -> tuple[dict[str, UnitWork], tuple[str, ...]]:
    """What `_trace` gives; of our own transformer by its first two blocks and its last, for all of them are alike."""
    if not isinstance(source, GptShape) or not isinstance(module, Gpt) or source.layers < 4:
        return _trace(module, specs, seq, batch, itemsize)
    middle = [f"blocks.{number}" for number in range(1, source.layers - 1)]
    if not {spec.name for spec in specs}.issuperset(middle):
        return _trace(module, specs, seq, batch, itemsize)
    with empty_init():
        few = Gpt(replace(source, layers=1))
    few.tokens, few.positions, few.norm, few.head = module.tokens, module.positions, module.norm, module.head
    few.blocks = nn.ModuleList([module.blocks[0], module.blocks[1], module.blocks[-1]])
    work, order = _trace(few, specs, seq, batch, itemsize)
    work |= dict.fromkeys(middle, work[middle[0]])
    place = order.index(middle[0])
    return work, (*order[:place], *middle, *order[place + 1 :])


def _trace(
    module: nn.Module, specs: Sequence[UnitSpec], seq: int, batch: int, itemsize: int
) -> tuple[dict[str, UnitWork], tuple[str, ...]]:
    meter = _Meter(specs, itemsize)
    handles = []
    for spec in specs:
        if not spec.resident:
            handles += [
                spec.module.register_forward_pre_hook(lambda _, __, name=spec.name: meter.enter(name)),
                spec.module.register_forward_hook(lambda _, __, output: meter.leave(output)),
            ]
    inputs = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    try:
        with meter, meter.counter, torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            _forward(module, inputs)
        meter.finish()
    finally:
        for handle in handles:
            handle.remove()
    names = dict.fromkeys((*(spec.name for spec in specs), RESIDENT_NAME))
    work = {
        name: UnitWork(meter.flops.get(name, 0.0), meter.saved.get(name, 0), meter.boundary.get(name, 0))
        for name in names
    }
    return work, tuple(dict.fromkeys(meter.order))


def _forward(module: nn.Module, inputs: torch.Tensor) -> None:
    """One forward with a loss. Models of Hugging Face take labels by name, those of this package by place."""
    if hasattr(module, "config") and hasattr(module, "main_input_name"):
        batch, seq = inputs.shape
        # A mask of four dimensions is taken as it is; making one looks at values, of which there are none here.
        mask = torch.ones(batch, 1, seq, seq, dtype=torch.bool, device="meta")
        module(input_ids=inputs, labels=inputs, attention_mask=mask, use_cache=False)
    elif isinstance(module, Gpt):
        module(inputs, inputs)
    else:
        module(inputs)


def _estimate(specs: Sequence[UnitSpec], tokens: int) -> dict[str, UnitWork]:
    """Two operations per parameter and token: right for models of matrices, without attention."""
    return {spec.name: UnitWork(2.0 * tokens * sum(e.parameter.numel() for e in spec.own), 0, 0) for spec in specs}
