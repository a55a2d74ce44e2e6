"""Steps of `test_weights_under_limit`, each a process: `python -m tests.memory.large_weights STEP FOLDER LAYERS`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import infinity

_MIB = 1 << 20
_SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}


def _config(layers: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**_SIZES, num_hidden_layers=layers, vocab_size=4096, max_position_embeddings=64)


def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(8).view(1, 8) * 37
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def make(folder: Path, layers: int) -> dict[str, Any]:
    """A model that transformers has saved, and its logits."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(_config(layers)).eval()
    model.save_pretrained(folder / "source", max_shard_size="1GB")
    torch.save(_logits(model), folder / "logits.pt")
    return {"parameters": sum(p.numel() for p in model.parameters())}


def load(folder: Path, layers: int) -> dict[str, Any]:
    """Stream it in, run it, save a checkpoint."""
    with infinity.empty_init():
        model = transformers.LlamaForCausalLM(_config(layers)).eval().requires_grad_(False)
    config = infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": 160 * _MIB},
        host={"budget": 160 * _MIB},
        nvme={"paths": [folder]},
    )
    with infinity.offload(model, config, weights=folder / "source") as engine:
        metrics = engine.metrics()
        is_equal = torch.equal(_logits(model), torch.load(folder / "logits.pt"))
        engine.save(folder / "saved")
        assert engine.loaded_weights is not None
        return {
            "read_bytes": engine.loaded_weights.read_nbytes,
            "host_peak_bytes": metrics["host/peak_bytes"],
            "logits_equal": is_equal,
        }


def compare(folder: Path, layers: int) -> dict[str, Any]:
    """What transformers makes of the export."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "out").eval()
    assert model.config.num_hidden_layers == layers
    return {"logits_equal": torch.equal(_logits(model), torch.load(folder / "logits.pt"))}


def main() -> None:
    step, folder, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(2)
    result = {"make": make, "load": load, "compare": compare}[step](folder, layers)
    peak_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**result, "peak_rss_bytes": peak_nbytes}))


if __name__ == "__main__":
    main()
