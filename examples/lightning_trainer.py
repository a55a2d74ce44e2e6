"""PyTorch Lightning's Trainer with a strategy that keeps the state in three tiers, and resuming.

python examples/lightning_trainer.py --output out --steps 20
python examples/lightning_trainer.py --output out --steps 40 --resume
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

import infinity
from infinity.data.text import shipped_text
from infinity.integrations.lightning import InfinityStrategy


class Decoder(pl.LightningModule):
    """A byte-level decoder, as for any Trainer but for the optimizer."""

    def __init__(self, width: int = 128, n_blocks: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks: nn.ModuleList | None = None

    def configure_model(self) -> None:
        """Called by the Trainer: what is built here never exists whole in memory."""
        if self.blocks is None:
            width = self.hparams["width"]
            self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(self.hparams["n_blocks"])
            )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        ids, targets = batch[0][:, :-1], batch[0][:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        for block in self.blocks or ():
            x = block(x, src_mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        if self.trainer.is_global_zero:
            print(f"step {self.global_step}: loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return infinity.AdamW(self.parameters(), lr=1e-3)  # in the place of torch.optim.AdamW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for checkpoints and the trained model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=1, help="processes that share the state")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    options = parser.parse_args()

    pl.seed_everything(0)
    text = torch.from_numpy(shipped_text().tokens.copy()).long()
    rows = torch.utils.data.TensorDataset(text[: 65 * 256].view(-1, 65))
    config = infinity.Config(
        precision="fp32", device={"budget": "8MiB"}, host={"budget": "12MiB"}, nvme={"paths": [options.nvme]}
    )
    with InfinityStrategy(config) as strategy:
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=options.devices,
            max_steps=options.steps,
            gradient_clip_val=1.0,
            callbacks=[ModelCheckpoint(options.output, every_n_train_steps=10, save_last=True)],
            default_root_dir=options.output,
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(
            Decoder(),
            torch.utils.data.DataLoader(rows, batch_size=4),
            ckpt_path=options.output / "last.ckpt" if options.resume else None,
        )
        counters = strategy.engine.metrics()
        print(f"trained for {trainer.global_step} steps, read {counters['nvme/read_bytes'] / 1e6:.0f} MB")
        if trainer.world_size == 1:
            strategy.engine.export(options.output / f"model-{trainer.global_step}")  # safetensors


if __name__ == "__main__":
    main()
