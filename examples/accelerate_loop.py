"""A plain Accelerate loop over an offloaded model, with accumulation and clipping.

python examples/accelerate_loop.py --steps 20
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

import infinity
from infinity.data.text import shipped_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, of two batches each")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = transformers.GPT2Config(vocab_size=256, n_embd=128, n_layer=6, n_head=4, n_positions=128)
    model = transformers.GPT2LMHeadModel(shape)
    config = infinity.Config(
        precision="fp32", device={"budget": "8MiB"}, host={"budget": "12MiB"}, nvme={"paths": [options.nvme]}
    )
    rows = torch.from_numpy(shipped_text().tokens.copy()).long()[: 64 * 8 * options.steps].view(-1, 64)
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-3)
        accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for number, ids in enumerate(loader):
            with accelerator.accumulate(prepared):
                loss = prepared(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if number % 2 == 1:
                print(f"step {number // 2}: loss {loss.item():.4f}")
        print(f"stalled {engine.metrics()['stall/total_s']:.2f} s")


if __name__ == "__main__":
    main()
