"""From a checkpoint to files that transformers and PEFT load, streamed: memory is a chunk of elements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.description import CONFIG_FILE, DESCRIPTIONS, adapter_file
from infinity.checkpoint.format import PARAMETER, ParameterEntry
from infinity.checkpoint.parts import saved_buffers
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import Fill
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.splitmaster import split_master
from infinity.weights.adapters import BASE_PREFIX, Adapter, adapter_names, base_names, factors_of, is_adapted, product
from infinity.weights.outgoing import Outgoing, Written, write_safetensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ADAPTER_CONFIG = "adapter_config.json"
# What belongs to a model of transformers beside its weights.
_COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
_NOT_COPIED = (".index.json", _ADAPTER_CONFIG)


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


def export_checkpoint(
    source: Path, target: Path, options: ExportOptions, on_file: Callable[[str, int], None] | None = None
) -> Exported:
    """Write a checkpoint's parameters and buffers as safetensors files; an adapter in PEFT's format.

    Args:
        source: a checkpoint folder.
        target: a folder to make.
        on_file: told every file that is written, and its bytes of tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, `target` is there, or an adapter is asked for that is not.
        ConfigError: options that contradict the checkpoint.
    """
    with CheckpointReader(source) as checkpoint:
        checkpoint.check_structure()
        export = _Export(checkpoint, options)
        tensors, beside, kind = export.tensors(), export.beside(), export.kind
        stem = "adapter_model" if kind == "adapter" else "model"
        with torch.no_grad():
            written = write_safetensors(
                target, tensors, stem=stem, shard_nbytes=options.shard_nbytes, beside=beside, on_file=on_file
            )
    return Exported(kind, written, tuple(beside))


class _Export:
    def __init__(self, checkpoint: CheckpointReader, options: ExportOptions) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._shapes = {name: entry.shape for name, entry in checkpoint.index.parameters.items()}
        is_peft = any(is_adapted(name) for name in self._shapes)
        if options.merge and not is_peft:
            raise ConfigError(f"--merge: {checkpoint.folder} has no adapter to merge; leave the option out")
        self._adapter = self._read_adapter() if is_peft else None
        self.kind = "model" if self._adapter is None else "merged model" if options.merge else "adapter"

    def _read_adapter(self) -> Adapter:
        name = self._options.adapter
        given = self._options.config / _ADAPTER_CONFIG if self._options.config is not None else None
        path = given if given is not None and given.exists() else self._checkpoint.folder / adapter_file(name)
        try:
            adapter = Adapter(name, json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise CheckpointError(
                f"{self._checkpoint.folder} does not say how adapter {name!r} was made ({path.name} is missing). Name "
                f"another adapter, or give the folder with PEFT's {_ADAPTER_CONFIG} (--config)"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON ({error})") from error
        if not adapter.is_lora or not adapter_names(adapter, self._shapes):
            raise CheckpointError(f"{self._checkpoint.folder} has no LoRA adapter {name!r}; others are not known here")
        return adapter

    # Tensors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> list[Outgoing]:
        """Everything that is written, in the order of the checkpoint."""
        if self._adapter is None:
            return [*(self._parameter(name, name) for name in self._shapes), *self._buffers({})]
        if self.kind == "adapter":
            return [self._parameter(name, new) for name, new in adapter_names(self._adapter, self._shapes).items()]
        names = base_names(self._adapter, self._shapes)
        return [*(self._merged(self._adapter, name, new) for name, new in names.items()), *self._buffers(names)]

    def _parameter(self, name: str, new: str) -> Outgoing:
        entry = self._checkpoint.entry(name)
        dtype = self._dtype_of(name, entry)
        return Outgoing(new, dtype, entry.shape, self._reading(name, entry, dtype))

    def _dtype_of(self, name: str, entry: ParameterEntry) -> torch.dtype:
        own = self._checkpoint.dtype(name)
        if not own.is_floating_point:
            return own
        if self._options.dtype is not None:
            return self._options.dtype
        return DTYPES[self._checkpoint.index.precision] if entry.trains else own

    def _reading(self, name: str, entry: ParameterEntry, dtype: torch.dtype) -> Fill:
        is_split = entry.trains and dtype is torch.bfloat16 and self._checkpoint.index.precision == "bf16"

        def fill(start: int, into: torch.Tensor) -> None:
            if not is_split:
                self._checkpoint.read(name, PARAMETER, start, into)
                return
            master = torch.empty(into.numel())  # the parameter is its upper half, which rounds ties up
            self._checkpoint.read(name, PARAMETER, start, master)
            into.copy_(split_master(master)[0])

        return fill

    def _merged(self, adapter: Adapter, name: str, new: str) -> Outgoing:
        plain = self._parameter(name, new)
        factors = factors_of(adapter, name, self._shapes)
        if factors is None:
            return plain

        def fill(start: int, into: torch.Tensor) -> None:
            total = torch.empty(into.numel())
            self._checkpoint.read(name, PARAMETER, start, total)
            # The factors are read for every chunk: they are small, and memory stays that of one weight's.
            first, second = (self._checkpoint.tensor(f).float() for f in (factors.first, factors.second))
            into.copy_(total.add_(product(factors, first, second, start, into.numel())))

        return Outgoing(new, plain.dtype, plain.shape, fill)

    def _buffers(self, renamed: Mapping[str, str]) -> list[Outgoing]:
        prefix = BASE_PREFIX if renamed else ""
        return [
            Outgoing(name.removeprefix(prefix), t.dtype, tuple(t.shape), partial(_copy, t.view(-1)))
            for name, t in saved_buffers(self._checkpoint.folder).items()
        ]

    # Files beside ----------------------------------------------------------------------------------------------

    def beside(self) -> dict[str, bytes]:
        """Configuration and tokenizer: what `--config` has, else what the checkpoint knows."""
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
            known = [name for name in DESCRIPTIONS if name in self._checkpoint.index.files]
            files = {name: (self._checkpoint.folder / name).read_bytes() for name in known}
        if CONFIG_FILE in files:
            files[CONFIG_FILE] = self._with_dtype(files[CONFIG_FILE])
        return files

    def _with_dtype(self, config: bytes) -> bytes:
        """The configuration with the dtype that was written, under the names that it had before."""
        content: dict[str, Any] = json.loads(config)
        written = {t.dtype for t in self.tensors() if t.dtype.is_floating_point}
        if len(written) == 1:
            name = str(next(iter(written))).removeprefix("torch.")
            for key in [key for key in ("dtype", "torch_dtype") if key in content] or ["dtype"]:
                content[key] = name
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _copy(values: torch.Tensor, start: int, into: torch.Tensor) -> None:
    into.copy_(values[start : start + into.numel()])
