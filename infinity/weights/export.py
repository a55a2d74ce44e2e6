"""From a checkpoint or an engine to files that transformers and PEFT load, streamed: memory is a chunk of elements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.checkpoint.description import CONFIG_FILE, DESCRIPTIONS, adapter_file, is_description
from infinity.checkpoint.format import INDEX_FILE, PARAMETER
from infinity.checkpoint.parts import saved_buffers
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import Fill
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.splitmaster import split_master
from infinity.weights.adapters import (
    Adapter,
    Factors,
    adapter_names,
    base_names,
    factors_by_weight,
    has_adapter,
    product,
)
from infinity.weights.outgoing import Outgoing, Written, write_safetensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTER_CONFIG = "adapter_config.json"
# What belongs to a model of transformers beside its weights.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
_NOT_COPIED = (".index.json", _ADAPTER_CONFIG, INDEX_FILE)  # with the last one it would be taken for a checkpoint


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What is to be written.

    Attributes:
        dtype: of the floating-point tensors; None for that in which the run computed (fp32 masters of a bf16 run become
            the bf16 parameters).
        shard_nbytes: most bytes of tensors in a file; None for one file.
        config: a folder whose configuration and tokenizer are copied, in place of what the checkpoint knows.
        adapter: which adapter of a PEFT model.
        merge: write the model with the adapter added, not the adapter.
    """

    dtype: torch.dtype | None = None
    shard_nbytes: int | None = None
    config: Path | None = None
    adapter: str = "default"
    merge: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what it is: "model", "adapter" or "merged model"."""

    kind: str
    written: Written
    beside: tuple[str, ...]


class Weights(Protocol):
    """What is exported: the parameters and buffers of a checkpoint, or of a living engine.

    Attributes:
        where: what it is, in words.
        precision: in which it was trained.
        shapes: of the parameters, by name, in the order in which they are written.
        aliases: other names of tied parameters, and the name under which each is there.
    """

    @property
    def where(self) -> str: ...

    @property
    def precision(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def aliases(self) -> Mapping[str, str]: ...

    def trains(self, name: str) -> bool:
        """Whether a parameter was trained, or is frozen."""

    def dtype(self, name: str) -> torch.dtype:
        """Of a parameter as it reads without conversion."""

    def read(self, name: str, kind: str, start: int, into: torch.Tensor) -> None:
        """Fill `into` (1-D) with elements of a flattened tensor from `start` on; converts where the dtypes differ."""

    def tensor(self, name: str) -> torch.Tensor:
        """A whole parameter."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers, by name."""

    def descriptions(self) -> Mapping[str, bytes]:
        """Files that say what the model is (see `checkpoint.description`), by name."""


class _CheckpointWeights:
    """`Weights` of a checkpoint."""

    def __init__(self, checkpoint: CheckpointReader) -> None:
        self._checkpoint = checkpoint
        self.where = str(checkpoint.folder)
        self.precision = checkpoint.index.precision
        self.shapes = {name: entry.shape for name, entry in checkpoint.index.parameters.items()}
        self.aliases = checkpoint.index.aliases
        self.dtype, self.read, self.tensor = checkpoint.dtype, checkpoint.read, checkpoint.tensor

    def trains(self, name: str) -> bool:
        return self._checkpoint.entry(name).trains

    def buffers(self) -> dict[str, torch.Tensor]:
        return saved_buffers(self._checkpoint.folder)

    def descriptions(self) -> Mapping[str, bytes]:
        folder = self._checkpoint.folder
        return {name: (folder / name).read_bytes() for name in self._checkpoint.index.files if is_description(name)}


def export_checkpoint(
    source: Path, target: Path, options: ExportOptions, on_file: Callable[[str, int], None] | None = None
) -> Exported:
    """Write a checkpoint's parameters and buffers as safetensors files; an adapter in PEFT's format.

    Args:
        source: a checkpoint folder.
        target: a folder to make; an earlier export there is replaced.
        on_file: told every file that is written, and its bytes of tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, `target` holds something else, or there is no such adapter.
        ConfigError: options that contradict the checkpoint.
    """
    with CheckpointReader(source) as checkpoint:
        checkpoint.check_structure()
        return export_weights(_CheckpointWeights(checkpoint), target, options, on_file)


def export_weights(
    weights: Weights, target: Path, options: ExportOptions, on_file: Callable[[str, int], None] | None = None
) -> Exported:
    """The same of any `Weights`."""
    export = _Export(weights, options)
    tensors, kind = export.tensors(), export.kind
    beside = export.beside({tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point})
    stem = "adapter_model" if kind == "adapter" else "model"
    with torch.no_grad():
        written = write_safetensors(
            target, tensors, stem=stem, shard_nbytes=options.shard_nbytes, beside=beside, on_file=on_file
        )
    return Exported(kind, written, tuple(beside))


class _Export:
    def __init__(self, weights: Weights, options: ExportOptions) -> None:
        self._weights = weights
        self._options = options
        self._shapes = weights.shapes
        self._descriptions = weights.descriptions()
        is_peft = has_adapter(self._shapes) or any(name not in DESCRIPTIONS for name in self._descriptions)
        if options.merge and not is_peft:
            raise ConfigError(f"merge (--merge): {weights.where} has no adapter to merge; leave the option out")
        self._adapter = self._read_adapter() if is_peft else None
        self._is_untied = False  # whether tied parameters are written with different values
        self.kind = "model" if self._adapter is None else "merged model" if options.merge else "adapter"

    def _read_adapter(self) -> Adapter:
        name = self._options.adapter
        adapter = Adapter(name, self._adapter_settings(name))
        if not adapter.is_lora or not adapter_names(adapter, self._shapes):
            raise CheckpointError(f"{self._weights.where} has no LoRA adapter {name!r}; others are not known here")
        return adapter

    def _adapter_settings(self, name: str) -> Mapping[str, Any]:
        file, content = adapter_file(name), self._descriptions.get(adapter_file(name))
        given = self._options.config / _ADAPTER_CONFIG if self._options.config is not None else None
        if given is not None and given.exists():
            file, content = str(given), given.read_bytes()
        if content is None:
            raise CheckpointError(
                f"{self._weights.where} does not say how adapter {name!r} was made ({file} is missing). Name another "
                f"adapter, or give the folder with PEFT's {_ADAPTER_CONFIG} (--config)"
            )
        return _json_object(content, f"{file} of {self._weights.where}")

    # Tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Outgoing]:
        """Everything that is written, in the order of the checkpoint."""
        buffers = self._weights.buffers()
        if self._adapter is None:
            parameters = [self._parameter(name, name) for name in self._shapes]
            return [*parameters, *(_buffer(name, buffer) for name, buffer in buffers.items())]
        if self.kind == "adapter":
            parameters = [self._parameter(*both) for both in adapter_names(self._adapter, self._shapes).items()]
            renamed = adapter_names(self._adapter, buffers)
        else:
            parameters = self._merged_parameters(self._adapter)
            renamed = base_names(self._adapter, buffers)
        return [*parameters, *(_buffer(new, buffers[name]) for name, new in renamed.items())]

    def _parameter(self, name: str, new: str) -> Outgoing:
        dtype = self._dtype_of(name)
        return Outgoing(new, dtype, self._shapes[name], self._reading(name, dtype))

    def _dtype_of(self, name: str) -> torch.dtype:
        own = self._weights.dtype(name)
        if not own.is_floating_point:
            return own
        if self._options.dtype is not None:
            return self._options.dtype
        return DTYPES[self._weights.precision] if self._weights.trains(name) else own

    def _reading(self, name: str, dtype: torch.dtype) -> Fill:
        weights = self._weights
        is_split = weights.trains(name) and dtype is torch.bfloat16 and weights.precision == "bf16"

        def fill(start: int, into: torch.Tensor) -> None:
            if not is_split:
                weights.read(name, PARAMETER, start, into)
                return
            master = torch.empty(into.numel())  # the parameter is its upper half, which rounds ties up
            weights.read(name, PARAMETER, start, master)
            into.copy_(split_master(master)[0])

        return fill

    def _merged_parameters(self, adapter: Adapter) -> list[Outgoing]:
        """Tied parameters of which the adapter changes only one are written each with its own values."""
        aliases = self._weights.aliases
        shapes = {**self._shapes, **{name: self._shapes[owner] for name, owner in aliases.items()}}
        factors, names = factors_by_weight(adapter, shapes), base_names(adapter, shapes)
        written = []
        for name, new in names.items():
            owner = aliases.get(name, name)
            is_own = name == owner or owner not in names or factors.get(name) != factors.get(owner)
            if is_own:
                written.append(self._merged(owner, new, factors.get(name)))
                self._is_untied |= name != owner
        return written

    def _merged(self, name: str, new: str, factors: Factors | None) -> Outgoing:
        plain = self._parameter(name, new)
        if factors is None:
            return plain

        def fill(start: int, into: torch.Tensor) -> None:
            total = torch.empty(into.numel())
            self._weights.read(name, PARAMETER, start, total)
            # The factors are read for every chunk: they are small, and memory stays that of one weight's.
            first, second = (self._weights.tensor(f).float() for f in (factors.first, factors.second))
            into.copy_(total.add_(product(factors, first, second, start, into.numel())))

        return Outgoing(new, plain.dtype, plain.shape, fill)

    # Files beside ----------------------------------------------------------------------------------------------

    def beside(self, dtypes: set[torch.dtype]) -> dict[str, bytes]:
        """Configuration and tokenizer: what `--config` has, else what the checkpoint knows.

        Args:
            dtypes: those of floating-point numbers that are written.
        """
        files: dict[str, bytes] = {}
        if self.kind == "adapter" and self._adapter is not None:
            return {_ADAPTER_CONFIG: json.dumps(dict(self._adapter.settings), indent=2, sort_keys=True).encode()}
        folder = self._options.config
        if folder is not None:
            files = {
                path.name: path.read_bytes()
                for pattern in _COPIED
                for path in sorted(folder.glob(pattern))
                if not path.name.endswith(_NOT_COPIED)
            }
            if not files:
                raise ConfigError(f"--config {folder}: it has no configuration; give a folder with {CONFIG_FILE}")
        else:
            files = {name: self._descriptions[name] for name in DESCRIPTIONS if name in self._descriptions}
        if CONFIG_FILE in files:
            files[CONFIG_FILE] = self._as_written(files[CONFIG_FILE], dtypes)
        return files

    def _as_written(self, config: bytes, dtypes: set[torch.dtype]) -> bytes:
        """The configuration with what was written: the dtype, under the names that it had before, and tied or not."""
        content = dict(_json_object(config, f"{CONFIG_FILE} of {self._options.config or self._weights.where}"))
        if len(dtypes) == 1:
            name = str(next(iter(dtypes))).removeprefix("torch.")
            for key in [key for key in ("dtype", "torch_dtype") if key in content] or ["dtype"]:
                content[key] = name
        if self._is_untied:
            for settings in (content, *(part for part in content.values() if isinstance(part, dict))):
                settings.update({key: False for key in ("tie_word_embeddings",) if key in settings})
            content["tie_word_embeddings"] = False
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _json_object(content: bytes, what: str) -> Mapping[str, Any]:
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} holds {type(found).__name__}; settings by name are needed")
    return found


def _buffer(name: str, values: torch.Tensor) -> Outgoing:
    return Outgoing(name, values.dtype, tuple(values.shape), partial(_copy, values.view(-1)))


def _copy(values: torch.Tensor, start: int, into: torch.Tensor) -> None:
    into.copy_(values[start : start + into.numel()])
