"""`transformers.Trainer` with the state in three tiers: one changed name and one more argument.

    from infinity.integrations.huggingface import InfinityTrainer

    trainer = InfinityTrainer(model, args, infinity_config=config, train_dataset=data)
    trainer.train()

Needs the extra `hf`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError
from infinity.observe.exporters import Rates
from infinity.offloading import offload
from infinity.optim.adamw import AdamW
from infinity.optim.base import OffloadedOptimizer
from storage.closing import Closing
from storage.paths import StrPath

if TYPE_CHECKING:
    from torch import nn

_STATE = "infinity"  # folder of the engine's checkpoint inside one of the Trainer's
_WEIGHTS = ".exported"
_SCHEDULER = "scheduler.pt"  # the Trainer's own name
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


class InfinityTrainer(transformers.Trainer, Closing):  # type: ignore[misc, unused-ignore]
    """Offloads the model, updates it with `infinity.AdamW`, and saves and resumes by streaming.

    Checkpoints hold the engine's folder `infinity` beside the Trainer's own files; `resume_from_checkpoint`,
    `save_total_limit` and `load_best_model_at_end` work as always. `save_model` writes what `from_pretrained` reads.
    Logs get `infinity/step/...`: bytes per second from and to the drives, and seconds that training waited.

    Args:
        model: a model; with `infinity.empty_init()` or on meta it never exists whole in memory.
        args: `transformers.TrainingArguments`. Precision is the engine's: leave `bf16` and `fp16` off.
        infinity_config: defaults to `Config()`.
        engine: an engine that holds `model` already, instead of `infinity_config`; it stays the caller's to close.
        rest: as for `transformers.Trainer`.

    Raises:
        ConfigError: arguments that contradict the engine.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *,
        infinity_config: Config | None = None,
        engine: Engine | None = None,
        **rest: Any,
    ) -> None:
        if model is None:
            raise ConfigError("InfinityTrainer needs a model; model_init would build one after the tiers are laid out")
        if engine is not None and infinity_config is not None:
            raise ConfigError("InfinityTrainer got an engine and infinity_config: an engine has settings of its own")
        _refuse_arguments(args)
        _refuse_optimizer(rest)
        self._owned: Engine | None = None  # by this Trainer, which closes it
        if engine is None:
            engine = self._owned = offload(model, infinity_config)
        self.engine: Engine = engine
        self._held_model: Any = model
        try:
            super().__init__(model=model, args=args, **rest)
        except BaseException:
            self.close()
            raise
        self._rates = Rates(self.engine)

    # Optimizer -------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """`infinity.AdamW` with the arguments' settings; biases and norms are not decayed, as always."""
        if self.optimizer is None:
            model = self._held_model if model is None else model
            decayed = set(self.get_decay_parameter_names(model))
            named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in named if name in decayed], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
            ]
            self.optimizer = AdamW(
                [group for group in groups if group["params"]],
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
            )
        return self.optimizer

    def _own_optimizer(self) -> torch.optim.Optimizer | None:
        """Accelerate wraps it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # Checkpoints -----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` reads; inside the Trainer's checkpoints, the engine's folder instead."""
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        if not _internal_call:
            self._save_weights(folder)
            return
        self.engine.save(folder / _STATE, optimizer=self._own_optimizer())
        if not self.args.should_save:
            return
        if hasattr(self._held_model, "config"):
            self._held_model.config.save_pretrained(str(folder))
        if self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))

    def _save_weights(self, folder: Path) -> None:
        made = folder / _WEIGHTS  # they are streamed into a folder of their own; several ranks do it together
        is_first = self.engine.ranks.member == 0
        if is_first:
            shutil.rmtree(made, ignore_errors=True)  # of a process that was killed
        self.engine.export(made)
        if not is_first:
            return
        names = [file.name for file in made.iterdir()]
        for name in names:
            os.replace(made / name, folder / name)
        made.rmdir()
        for stale in _stale_weights(folder, names):
            stale.unlink()
        if self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))
        torch.save(self.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # The optimizer is in the engine's folder.
        if self.lr_scheduler is not None and self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Only a look: state is loaded once, with the optimizer's settings, when there is an optimizer."""
        _state_of(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.engine.load(_state_of(checkpoint), optimizer=self._own_optimizer())
        scheduler = Path(checkpoint) / _SCHEDULER
        if scheduler.exists() and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        self.engine.load(_state_of(str(self.state.best_model_checkpoint)))

    # Logs and life ---------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *rest: Any) -> None:
        """As always, with what the tiers did since the last log of a loss."""
        if "loss" in logs:
            logs |= {f"infinity/{name}": value for name, value in self._rates.take().items() if name != "step/seconds"}
        super().log(logs, *rest)

    def close(self) -> None:
        """Give back swap files, threads and memory. Idempotent. The parameters are gone afterwards."""
        if self._owned is not None:
            self._owned.close()


def _refuse_arguments(args: Any) -> None:
    if args is None:
        return
    for name in ("bf16", "fp16"):
        if getattr(args, name, False):
            raise ConfigError(f"args.{name}: precision is the engine's; use infinity.Config(precision={name!r})")
    chosen = getattr(args.optim, "value", args.optim)
    if chosen not in _OPTIMIZERS:
        raise ConfigError(
            f"args.optim = {chosen!r}: its state would lie outside the tiers; allowed: {', '.join(_OPTIMIZERS)}, or "
            "give an optimizer of infinity in optimizers=(...)"
        )


def _refuse_optimizer(rest: Mapping[str, Any]) -> None:
    if rest.get("optimizer_cls_and_kwargs") is not None:
        raise ConfigError("optimizer_cls_and_kwargs: the optimizer is infinity.AdamW; or give one in optimizers=(...)")
    given = (rest.get("optimizers") or (None,))[0]
    if given is not None and not isinstance(given, OffloadedOptimizer):
        raise ConfigError(
            f"optimizers=({type(given).__name__}, ...): its state would lie outside the tiers; give an optimizer of "
            "infinity, made of the parameters that engine= holds"
        )


def _stale_weights(folder: Path, written: Iterable[str]) -> list[Path]:
    """Files of earlier weights of the same kind, which a loader would take for a part of the new ones, or for them."""
    written = set(written)
    stem = "adapter_model" if any(name.startswith("adapter_model") for name in written) else "model"
    name_of_weights = re.compile(rf"{stem}(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
    found = [path for path in folder.iterdir() if path.name not in written and name_of_weights.fullmatch(path.name)]
    return sorted(path for path in found if path.is_file())


def _state_of(checkpoint: StrPath) -> Path:
    folder = Path(checkpoint) / _STATE
    if not folder.is_dir():
        raise CheckpointError(
            f"{checkpoint}: has no folder {_STATE!r}, so InfinityTrainer has not saved it. To start from its weights, "
            "load the model with from_pretrained"
        )
    return folder
