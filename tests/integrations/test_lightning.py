"""`InfinityStrategy` in a Trainer of PyTorch Lightning: the numbers of the plain Trainer, checkpoints, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

pytest.importorskip("pytorch_lightning", reason="needs the extra 'lightning'")
import pytorch_lightning as lightning
from pytorch_lightning.callbacks import ModelCheckpoint

from infinity.integrations.lightning import InfinityStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists.*"),
]
Values = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + nn.functional.dropout(inner, 0.1, self.training)


class Bytes(lightning.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
    """Predicts the next byte; its blocks are called by its own forward."""

    def __init__(self, optimizer: Any = infinity.AdamW, *, is_late: bool = False, **settings: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.optimizer, self.settings = optimizer, {"lr": 1e-2} | settings
        self.blocks: Any = None
        self.seen: list[float] = []
        if not is_late:
            self.configure_model()

    def configure_model(self) -> None:
        if self.blocks is None:
            self.embed, self.head = nn.Embedding(64, 48), nn.Linear(48, 64)
            self.blocks = nn.ModuleList(Block(48) for _ in range(6))
            self.was_built_on_meta = self.embed.weight.is_meta

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        ids = batch[0]
        return nn.functional.cross_entropy(self.forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), **self.settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def module(**settings: Any) -> Bytes:
    torch.manual_seed(0)
    return Bytes(**settings)


def config(folder: Path, **settings: Any) -> infinity.Config:
    (folder / "swap").mkdir(exist_ok=True)
    chosen: dict[str, Any] = {"precision": "fp32", "device": {"budget": "1MiB"}, "host": {"budget": "600KiB"}}
    return infinity.Config(
        **(chosen | settings), nvme={"paths": [folder / "swap"]}, resident_threshold=0, optimizer_threads=1
    )


def batches() -> torch.utils.data.DataLoader[Any]:
    ids = torch.randint(64, (12, 9), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=2)


def trainer(folder: Path, strategy: Any = "auto", **settings: Any) -> Any:
    chosen: dict[str, Any] = {"max_epochs": 1, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    quiet = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, default_root_dir=folder, **(chosen | quiet | settings)
    )


def values(held: nn.Module) -> Values:
    with infinity.gathered(held):
        return {name: parameter.detach().clone() for name, parameter in held.named_parameters()}


def plain_run(folder: Path, **settings: Any) -> Bytes:
    plain = module(optimizer=torch.optim.AdamW, fused=True)
    torch.manual_seed(1)
    trainer(folder, **settings).fit(plain, batches(), batches())
    return plain


def assert_equal(plain: Bytes, ours: Bytes) -> None:
    assert ours.seen == plain.seen
    found = values(ours)
    assert [name for name, value in plain.named_parameters() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("synchronous", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("deferred", {"gradient_clip_val": 0.1, "max_epochs": 2}),
        ("overlapped", {}),
    ],
)
def test_one_more_argument_gives_the_same_numbers(tmp_path: Path, schedule: str, settings: dict[str, Any]) -> None:
    plain = plain_run(tmp_path, **settings)
    ours = module()
    with InfinityStrategy(config(tmp_path, schedule=schedule)) as strategy:
        run = trainer(tmp_path, strategy, **settings)
        torch.manual_seed(1)
        run.fit(ours, batches(), batches())
        assert_equal(plain, ours)
        assert strategy.engine.metrics()["nvme/read_bytes"] > 0
        assert "forward" not in vars(ours)
    assert list((tmp_path / "swap").iterdir()) == []


def test_what_configure_model_builds_has_no_memory_before(tmp_path: Path) -> None:
    plain = plain_run(tmp_path)
    ours = Bytes(is_late=True)

    class Seeds(lightning.Callback):  # type: ignore[misc, name-defined, unused-ignore]
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            torch.manual_seed(0)  # what configure_model builds is initialised from this

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            torch.manual_seed(1)

    with InfinityStrategy(config(tmp_path)) as strategy:
        trainer(tmp_path, strategy, callbacks=[Seeds()]).fit(ours, batches())
        assert ours.was_built_on_meta and not plain.was_built_on_meta
        assert_equal(plain, ours)


def test_validate_and_test_see_the_trained_module(tmp_path: Path) -> None:
    plain = plain_run(tmp_path)
    expected = trainer(tmp_path).validate(plain, batches(), verbose=False)
    ours = module()
    with InfinityStrategy(config(tmp_path)) as strategy:
        run = trainer(tmp_path, strategy)
        torch.manual_seed(1)
        run.fit(ours, batches())
        assert run.validate(ours, batches(), verbose=False) == expected
        written = strategy.engine.metrics()["nvme/write_bytes"]
        assert run.test(ours, batches(), verbose=False) == expected
        assert strategy.engine.metrics()["nvme/write_bytes"] == written


# Checkpoints -------------------------------------------------------------------------------------------------------


def test_resuming_gives_the_bits_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = module()
    with InfinityStrategy(config(tmp_path)) as strategy:
        torch.manual_seed(1)
        trainer(tmp_path, strategy, max_epochs=3).fit(whole, batches())
        expected = values(whole)
    saving = ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True)
    first = module()
    with InfinityStrategy(config(tmp_path)) as strategy:
        torch.manual_seed(1)
        run = trainer(tmp_path, strategy, max_epochs=2, callbacks=[saving], enable_checkpointing=True)
        run.fit(first, batches())
    other = Bytes()
    saving = ModelCheckpoint(dirpath=tmp_path / "kept", save_last=True)
    with InfinityStrategy(config(tmp_path, host={"budget": "900KiB"})) as strategy:
        run = trainer(tmp_path, strategy, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
        run.fit(other, batches(), ckpt_path=str(tmp_path / "kept" / "last.ckpt"))
        assert first.seen + other.seen == whole.seen
        found = values(other)
        assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []
    assert len(list((tmp_path / "kept").glob("epoch*.ckpt"))) == 1  # the callback has removed the older one


@contextmanager
def saved(folder: Path) -> Iterator[tuple[Any, Bytes]]:
    """A Trainer and the module that it has trained, saved as `saved.ckpt`."""
    ours = module()
    with InfinityStrategy(config(folder)) as strategy:
        run = trainer(folder, strategy)
        run.fit(ours, batches())
        run.save_checkpoint(folder / "saved.ckpt")
        yield run, ours


def test_checkpoints_are_those_of_the_engine(tmp_path: Path) -> None:
    with saved(tmp_path) as (_, ours):
        trained = values(ours)
    again = module()
    with infinity.offload(again, config(tmp_path), weights=tmp_path / "saved.ckpt"):
        found = values(again)
    assert all(torch.equal(value, found[name]) for name, value in trained.items())


def test_evaluation_in_another_process_loads_a_checkpoint(tmp_path: Path) -> None:
    with saved(tmp_path) as (run, ours):
        expected = run.validate(ours, batches(), verbose=False)
    with InfinityStrategy(config(tmp_path)) as strategy:
        run = trainer(tmp_path, strategy)
        assert run.validate(Bytes(), batches(), ckpt_path=tmp_path / "saved.ckpt", verbose=False) == expected


def test_checkpoints_of_others_are_refused(tmp_path: Path) -> None:
    plain = module(optimizer=torch.optim.AdamW)
    run = trainer(tmp_path)
    run.fit(plain, batches())
    run.save_checkpoint(tmp_path / "plain.ckpt")
    ours = module()
    with InfinityStrategy(config(tmp_path)) as strategy, pytest.raises(infinity.CheckpointError, match="weights="):
        trainer(tmp_path, strategy).fit(ours, batches(), ckpt_path=tmp_path / "plain.ckpt")
    with InfinityStrategy(config(tmp_path)) as strategy:
        run = trainer(tmp_path, strategy)
        run.fit(module(), batches())
        strategy.engine.save(tmp_path / "own")
    with InfinityStrategy(config(tmp_path)) as strategy, pytest.raises(infinity.CheckpointError, match="another loop"):
        trainer(tmp_path, strategy).fit(module(), batches(), ckpt_path=tmp_path / "own")


def test_shards_are_those_of_the_checkpoint_that_was_opened(tmp_path: Path) -> None:
    with InfinityStrategy(config(tmp_path)) as strategy:
        trainer(tmp_path, strategy).fit(module(), batches())
        with pytest.raises(infinity.CheckpointError, match=r"load_checkpoint\(folder\) comes first"):
            strategy.load_model_state_dict({})


# Refusals ----------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_torch_is_refused(tmp_path: Path) -> None:
    with InfinityStrategy(config(tmp_path)) as strategy, pytest.raises(infinity.ConfigError, match=r"infinity\.AdamW"):
        trainer(tmp_path, strategy).fit(module(optimizer=torch.optim.AdamW), batches())
    assert list((tmp_path / "swap").iterdir()) == []


def test_precision_of_the_trainer_is_refused(tmp_path: Path) -> None:
    ours = module()
    with InfinityStrategy(config(tmp_path)) as strategy, pytest.raises(infinity.ConfigError, match="'bf16-mixed'"):
        trainer(tmp_path, strategy, precision="bf16-mixed").fit(ours, batches())
    assert ours.head.weight.sum().isfinite()  # the module was not touched


def test_another_device_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path, device={"kind": "cuda", "budget": "1MiB"})
    with InfinityStrategy(settings) as strategy, pytest.raises(infinity.ConfigError, match="accelerator='cuda'"):
        trainer(tmp_path, strategy).fit(module(), batches())


def test_one_module_and_one_fit_for_a_strategy(tmp_path: Path) -> None:
    ours = module()
    with InfinityStrategy(config(tmp_path)) as strategy:
        with pytest.raises(infinity.ConfigError, match=r"no engine before trainer\.fit"):
            _ = strategy.engine
        run = trainer(tmp_path, strategy)
        run.fit(ours, batches())
        with pytest.raises(infinity.ConfigError, match="trained by fit"):
            run.fit(ours, batches())
        with pytest.raises(infinity.ConfigError, match="holds another module"):
            run.validate(module(), batches())


# Ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_devices_share_the_state(tmp_path: Path) -> None:
    """The example with `--devices 2`, which starts the second process itself, and under torchrun."""
    from tests.examples.test_examples import EXAMPLES, losses, run

    (tmp_path / "swap").mkdir()
    script = (EXAMPLES / "lightning_trainer.py", "--nvme", tmp_path / "swap", "--devices", "2", "--steps", "4")
    alone = run(*script, "--output", "alone", folder=tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = run(*launcher, *script, "--output", "launched", folder=tmp_path)
    assert losses(alone) == losses(launched)
    assert len(losses(alone)) == 4
    assert list((tmp_path / "swap").glob("rank*/*")) == []


def test_an_operation_that_torch_does_not_have_is_refused() -> None:
    strategy = InfinityStrategy()
    assert strategy.reduce("text", reduce_op="median") == "text"  # as Lightning: only tensors are reduced
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert strategy.reduce(torch.tensor(3.0), reduce_op="max").item() == 3.0
        with pytest.raises(infinity.ConfigError, match=r"reduce_op='median': .* has no such operation"):
            strategy.reduce(torch.ones(1), reduce_op="median")
    finally:
        torch.distributed.destroy_process_group()
