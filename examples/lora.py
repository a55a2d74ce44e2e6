"""LoRA: the frozen base lies in the tiers and is only read; adapters train, and are saved in PEFT's format.

python examples/lora.py --steps 20 --save adapter
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model

import infinity
from infinity.data.text import shipped_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", type=Path, help="folder for the trained adapter")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    base = transformers.LlamaForCausalLM(shape)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))  # adapters first, then offload
    config = infinity.Config(
        precision="fp32", device={"budget": "8MiB"}, host={"budget": "2MiB"}, nvme={"paths": [options.nvme]}
    )
    rows = torch.from_numpy(shipped_text().tokens.copy()).long()[: 64 * 4 * options.steps].view(-1, 4, 64)
    with infinity.offload(model, config) as engine:
        written_before = engine.metrics()["nvme/write_bytes"]
        optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for step, ids in enumerate(rows):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")
        counters = engine.metrics()
        written = counters["nvme/write_bytes"] - written_before
        print(
            f"read {counters['nvme/read_bytes'] / 1e6:.1f} MB, wrote {written / 1e6:.1f} MB: the base is never written"
        )
        if options.save is not None:
            with infinity.gathered(model):
                model.save_pretrained(str(options.save))


if __name__ == "__main__":
    main()
