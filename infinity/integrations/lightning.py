"""`Trainer` of PyTorch Lightning with the state in three tiers: a strategy, and an optimizer of infinity.

    from infinity.integrations.lightning import InfinityStrategy

    with InfinityStrategy(config) as strategy:
        trainer = Trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module)  # whose configure_optimizers returns infinity.AdamW(self.parameters(), ...)
        strategy.engine.export("trained")

Needs the extra `lightning`: the package `pytorch_lightning`. (`lightning` is the same library with classes of its own.)
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from pytorch_lightning.trainer.states import TrainerFn

from infinity.checkpoint.format import INDEX_FILE
from infinity.checkpoint.parts import read_extra
from infinity.config import Config, DeviceKind
from infinity.empty import empty_init as without_memory
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError
from infinity.initialisers import InitFn
from infinity.offloading import offload
from infinity.optim.base import OffloadedOptimizer, clip_grad_norm_
from storage.closing import Closing
from storage.paths import StrPath

_TRAINER = "lightning"  # key of the Trainer's part in a checkpoint's `extra`


class _EnginePrecision(Precision):  # type: ignore[misc, unused-ignore]
    """Clips where the gradients are: over all ranks, and also those that wait in the swap file."""

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: int | float) -> None:
        clip_grad_norm_(self.main_params(optimizer), float(clip_val))


class InfinityStrategy(ParallelStrategy, Closing):  # type: ignore[misc, unused-ignore]
    """Offloads the `LightningModule`, and saves and resumes by streaming.

    A checkpoint is a folder of `Engine.save` with the Trainer's part inside: `infinity checkpoint` reads it.
    `ModelCheckpoint` and `fit(ckpt_path=...)` work as always, with the bits of an uninterrupted run. What is built in
    `configure_model`, or under `trainer.init_module()`, never exists whole in memory. The module stays usable after
    `fit`, for `validate`, `test` and `predict`, until `close()`; it is trained by one `fit`.

    Several devices, or ranks of torchrun, share the state as `config.stage` says.

    Args:
        config: defaults to `Config()`. Its `device.kind` "auto" is what the Trainer's `accelerator` is.
        weights, init_fn: as for `infinity.offload`.
        cluster_environment, parallel_devices: as for every strategy of Lightning.

    Raises:
        ConfigError: when the Trainer starts: an optimizer, precision or device that contradicts the engine.
    """

    strategy_name = "infinity"
    precision_plugin: Any  # a property of Lightning's

    def __init__(
        self,
        config: Config | None = None,
        *,
        weights: StrPath | None = None,
        init_fn: InitFn | None = None,
        cluster_environment: Any = None,
        parallel_devices: list[torch.device] | None = None,
    ) -> None:
        super().__init__(cluster_environment=cluster_environment, parallel_devices=parallel_devices)
        self.num_nodes = 1  # set by the Trainer
        self._config = config or Config()
        self._weights = weights
        self._init_fn = init_fn
        self._engine: Engine | None = None
        self._held_module: Any = None
        self._loading: Path | None = None
        self._made_group = False

    @property
    def engine(self) -> Engine:
        """The engine that holds the module.

        Raises:
            ConfigError: no Trainer has used this strategy yet.
        """
        if self._engine is None:
            raise ConfigError("the module is offloaded when the Trainer starts: no engine before trainer.fit()")
        return self._engine

    # Processes -------------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """Where this process computes."""
        return self.parallel_devices[self.local_rank] if self.parallel_devices else torch.device("cpu")

    @property
    def num_processes(self) -> int:
        """Of this machine."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether the Trainer has to give every process its own part of the data."""
        return self.num_nodes * self.num_processes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Called by the Trainer when devices and machines are known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)

    def _configure_launcher(self) -> None:
        if self.is_distributed and not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Choose the device, and meet the other processes."""
        super().setup_environment()
        if self.is_distributed and not dist.is_initialized():
            environment = self.cluster_environment
            os.environ.setdefault("MASTER_ADDR", str(environment.main_address))
            os.environ.setdefault("MASTER_PORT", str(environment.main_port))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo",
                rank=environment.global_rank(),
                world_size=environment.world_size(),
            )
            self._made_group = True

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """A tensor's mean (or sum, or another `torch.distributed.ReduceOp`) over the processes."""
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        is_mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
        operation = dist.ReduceOp.SUM if is_mean else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, operation.upper(), None)
            if operation is None:
                raise ConfigError(f"reduce_op={reduce_op!r}: torch.distributed.ReduceOp has no such operation")
        total = tensor.clone()
        dist.all_reduce(total, op=operation, group=group)
        return total / dist.get_world_size(group) if is_mean else total

    def barrier(self, name: str | None = None) -> None:
        """Wait for the other processes."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of process `src`."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # The module ------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Of `trainer.init_module()` and `configure_model`: modules are built without memory."""
        if empty_init is False:
            yield
        else:
            with without_memory():
                yield

    def setup(self, trainer: Any) -> None:
        """Offload the module and build its optimizer."""
        self.accelerator.setup(trainer)
        if type(self.precision_plugin) not in (Precision, _EnginePrecision):
            raise ConfigError(
                f"Trainer(precision={self.precision_plugin.precision!r}): precision is the engine's; leave it out, and "
                'use infinity.Config(precision="bf16")'
            )
        self.precision_plugin = _EnginePrecision()
        self.model = self.lightning_module
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        self._hold(self.lightning_module, is_fitting=is_fitting)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _hold(self, module: Any, *, is_fitting: bool) -> None:
        if self._engine is None:
            config = _on(self._config, self.root_device)
            self._engine = offload(module, config, weights=self._weights, init_fn=self._init_fn)
            self._held_module = module
        elif module is not self._held_module:
            raise ConfigError("this strategy holds another module; give every module a strategy of its own")
        elif is_fitting and self.optimizers:
            raise ConfigError(
                "this module has been trained by fit() and keeps its optimizer; to train on, save it and start "
                "trainer.fit(module, ckpt_path=...) with a new module and a new InfinityStrategy"
            )

    def setup_optimizers(self, trainer: Any) -> None:
        """Build what `configure_optimizers` says, and check that it works on the tiers."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], OffloadedOptimizer):
            given = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers) or "none"
            self._reset_optimizers_and_schedulers()
            raise ConfigError(
                f"configure_optimizers gave {given}: the state would lie outside the tiers. Return one optimizer of "
                "infinity, such as infinity.AdamW(self.parameters(), lr=...), with groups if settings differ"
            )

    def model_to_device(self) -> None:
        """Units come to the device when they run."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As one forward of the module, except where the module itself calls backward and step."""
        if not self.lightning_module.automatic_optimization:
            return self.lightning_module.training_step(*args, **kwargs)
        return self._as_forward("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """As one forward of the module."""
        return self._as_forward("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As one forward of the module."""
        return self._as_forward("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As one forward of the module."""
        return self._as_forward("predict_step", args, kwargs)

    def _as_forward(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step by calling the module, so that the engine sees one forward and not those of its parts.

        Lightning's own way for modules that are wrapped: `forward` is another one for the moment of the call.
        """
        module = self.lightning_module
        own = module.__dict__.get("forward")
        try:
            return self._forward_redirection(module, module, name, *args, **kwargs)
        finally:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own

    # Checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards can be loaded when there are shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The engine loads it with the parameters."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: parameters are streamed, see `save_checkpoint`."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing: it is streamed."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: StrPath, storage_options: Any = None) -> None:
        """Save the shards as `Engine.save` does, with what the Trainer needs to go on beside them.

        Raises:
            CheckpointError: it could not be written; one that was there before is untouched.
            ConfigError: `storage_options` is given, which is for other kinds of checkpoints.
        """
        if storage_options is not None:
            raise ConfigError("storage_options belong to a CheckpointIO, which InfinityStrategy does not use")
        packed = io.BytesIO()
        torch.save(checkpoint, packed)
        extra = {_TRAINER: torch.frombuffer(bytearray(packed.getbuffer()), dtype=torch.uint8)}
        path = Path(self.broadcast(os.fspath(filepath)))
        self.engine.save(path, optimizer=self._optimizer(), extra=extra)

    def load_checkpoint(self, checkpoint_path: StrPath, weights_only: bool | None = None) -> dict[str, Any]:
        """The Trainer's part of a checkpoint; the shards follow in `load_model_state_dict`.

        Args:
            weights_only: False allows objects of any class in it, as from a source you trust.
        """
        folder = Path(self.broadcast(os.fspath(checkpoint_path)))
        if not (folder / INDEX_FILE).is_file():
            raise CheckpointError(
                f"{folder} is no checkpoint of InfinityStrategy. To start from the weights in a file or folder, give "
                "InfinityStrategy(weights=...)"
            )
        content = read_extra(folder).get("extra", {})
        if _TRAINER not in content:
            raise CheckpointError(
                f"{folder} was saved by another loop and lacks the Trainer's state; start from its weights with "
                "InfinityStrategy(weights=...)"
            )
        self._loading = folder
        packed = io.BytesIO(content[_TRAINER].numpy().tobytes())
        loaded: dict[str, Any] = torch.load(packed, weights_only=weights_only is not False)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the shards of the checkpoint that `load_checkpoint` was given, with the optimizer's if it trains.

        Raises:
            ConfigError: `strict` is False.
            CheckpointError: `load_checkpoint` has not been called, or the shards are damaged or of another model.
        """
        if not strict:
            raise ConfigError("strict_loading=False: a checkpoint is loaded whole; use InfinityStrategy(weights=...)")
        if self._loading is None:
            raise CheckpointError("no checkpoint to load the parameters from: load_checkpoint(folder) comes first")
        self.engine.load(self._loading, optimizer=self._optimizer())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done with the parameters."""

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return self.optimizers[0] if self.optimizers else None

    # Life ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """A run of the Trainer is over. The module stays in the tiers: `close()` gives them back."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def close(self) -> None:
        """Give back swap files, threads and memory. Idempotent. The module's parameters are gone afterwards."""
        with ExitStack() as closing:  # the process group too, whatever goes wrong with the engine
            closing.callback(self._leave_group)
            if self._engine is not None:
                self._engine.close()

    def _leave_group(self) -> None:
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
        self._made_group = False


def _on(config: Config, device: torch.device) -> Config:
    """The config for the device that the Trainer has chosen."""
    kind = config.device.kind
    if kind is DeviceKind.AUTO and device.type in ("cpu", "cuda"):
        return config.with_(device={"kind": device.type})
    if (device.type == "cuda") != (kind is DeviceKind.CUDA) or device.type not in ("cpu", "cuda"):
        wanted = "cuda" if kind is DeviceKind.CUDA else "cpu"
        raise ConfigError(
            f"Trainer computes on {device.type!r} and infinity.Config(device=...) on {kind.value!r}; "
            f"use Trainer(accelerator={wanted!r})"
        )
    return config
