"""What the code blocks of the documentation take for granted: a model, batches, an engine, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

Names = dict[str, Any]
Situation = Callable[[Path, ExitStack], Names]
_WIDTH = 32


class MyModel(nn.Module):
    """Blocks and a loss, as the documentation's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, _WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = torch.relu(block(x))
        return nn.functional.cross_entropy(x, targets)


def _batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor([1, 2, number]), torch.tensor([2, 3, number])) for number in range(count)]


def before_offload(folder: Path, stack: ExitStack) -> Names:
    """A model class and data; nothing is offloaded yet."""
    (folder / "swap").mkdir(exist_ok=True)
    return {"torch": torch, "nn": nn, "infinity": infinity, "MyModel": MyModel, "batches": _batches(), "Path": Path}


def config(folder: Path) -> infinity.Config:
    """Small budgets on the CPU."""
    return infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "64MiB"},
        host={"budget": "64MiB"},
        nvme={"paths": [folder / "swap"]},
    )


def training(folder: Path, stack: ExitStack) -> Names:
    """An engine, its optimizer and scheduler, in the middle of a run."""
    names = before_offload(folder, stack)
    model = MyModel()
    engine = stack.enter_context(infinity.offload(model, config(folder)))
    optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for inputs, targets in names["batches"]:
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return names | {"model": model, "engine": engine, "optimizer": optimizer, "scheduler": scheduler, "number": 0}


def not_offloaded(folder: Path, stack: ExitStack) -> Names:
    """A model that is there, and plain torch around it."""
    return before_offload(folder, stack) | {"model": MyModel()}


def changing(folder: Path, stack: ExitStack) -> Names:
    """A model with a head and layers, and an engine that holds it."""

    class Classifier(nn.Sequential):
        @property
        def layers(self) -> Any:
            return self[0]

    model = Classifier(nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)))
    model.head = nn.Linear(_WIDTH, 10)
    engine = stack.enter_context(infinity.offload(model, config(folder)))
    optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
    names = {"model": model, "engine": engine, "optimizer": optimizer, "width": _WIDTH, "n_classes": 4}
    return before_offload(folder, stack) | names


def nested(folder: Path, stack: ExitStack) -> Names:
    """A model and another one that is to become a part of it; settings for each."""
    settings = config(folder)
    names = {"model": MyModel(), "teacher": MyModel(), "config": settings, "teacher_config": settings}
    return before_offload(folder, stack) | names


def saved(folder: Path, stack: ExitStack) -> Names:
    """A checkpoint in run/step100."""
    names = training(folder, stack)
    names["engine"].save("run/step100", optimizer=names["optimizer"])
    return names


def training_saved(folder: Path, stack: ExitStack) -> Names:
    """A checkpoint in run/step3, as the tutorial makes it."""
    names = training(folder, stack)
    names["engine"].save("run/step3", optimizer=names["optimizer"], extra={"step": 3})
    return names


def deepspeed(folder: Path, stack: ExitStack) -> Names:
    """A DeepSpeed file."""
    (folder / "ds_config.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))
    return before_offload(folder, stack)


def huggingface(folder: Path, stack: ExitStack) -> Names:
    """A tiny model of transformers, saved in `folder`, with data and arguments for its Trainer."""
    import accelerate
    import peft
    import transformers

    from tests.parity.hf_models import llama, token_batch

    model: Any = llama()
    model.save_pretrained(folder / "model")
    rows = [token_batch(number, (1, 9))[0] for number in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
    )
    lora = peft.LoraConfig(target_modules=["q_proj"])
    return before_offload(folder, stack) | {
        "model": model,
        "folder": str(folder / "model"),
        "args": arguments,
        "data": [{"input_ids": row, "labels": row} for row in rows],
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),  # type: ignore[arg-type]
        "config": config(folder),
        "lora": lora,
        "get_peft_model": peft.get_peft_model,
        "Accelerator": accelerate.Accelerator,
        **{name: getattr(transformers, name) for name in ("AutoConfig", "AutoModelForCausalLM", "Trainer")},
        "TrainerCallback": transformers.TrainerCallback,
    }


def huggingface_training(folder: Path, stack: ExitStack) -> Names:
    """The same, offloaded, with its optimizer."""
    names = huggingface(folder, stack)
    engine = stack.enter_context(infinity.offload(names["model"], names["config"]))
    return names | {"engine": engine, "optimizer": infinity.AdamW(names["model"].parameters(), lr=1e-3)}


def huggingface_offloaded(folder: Path, stack: ExitStack) -> Names:
    """The same, offloaded, without an optimizer; a tokenizer of another size."""
    names = huggingface(folder, stack)
    engine = stack.enter_context(infinity.offload(names["model"], names["config"]))
    return names | {"engine": engine, "tokenizer": range(80)}


def lightning(folder: Path, stack: ExitStack) -> Names:
    """A model class, and what the Trainer needs for a run without output."""
    import pytorch_lightning

    names = before_offload(folder, stack)
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return names | {
        "pl": pytorch_lightning,
        "loader": torch.utils.data.DataLoader(names["batches"], batch_size=None),
        "settings": settings | {"default_root_dir": folder, "enable_checkpointing": False},
    }


SITUATIONS: dict[str, Situation] = {
    "before offload": before_offload,
    "training": training,
    "not offloaded": not_offloaded,
    "changing": changing,
    "nested": nested,
    "saved": saved,
    "training saved": training_saved,
    "deepspeed": deepspeed,
    "huggingface": huggingface,
    "huggingface offloaded": huggingface_offloaded,
    "huggingface training": huggingface_training,
    "lightning": lightning,
}
