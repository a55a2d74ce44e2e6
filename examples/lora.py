"""Supervised fine-tuning with LoRA, as a recipe of torchtune or TRL's SFTTrainer does it.

The frozen base streams from the folder that `save_pretrained` wrote into the tiers, and is only read. Adapters train on
prompts and answers, where only answers count; they are judged by answers that they have not seen, and saved as PEFT
saves them. Without --base the base is a tiny model of random weights.

python examples/lora.py --steps 20 --save adapter
python examples/lora.py --base my-model --nvme /mnt/nvme0 --save adapter --merged my-model-tuned
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from peft import LoraConfig, get_peft_model

import infinity

IGNORED = -100  # labels that the loss of transformers leaves out


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, as tokens."""

    tokens: list[int]
    n_prompt: int


def examples_of(encode: Callable[[str], list[int]], length: int) -> list[Example]:
    """Questions about Python, answered by its documentation."""
    made = []
    for topic, text in sorted(topics.items()):
        prompt = encode(f"Explain {topic!r} in Python.\n")
        made.append(Example((prompt + encode(text))[:length], len(prompt)))
    return made


def batch_of(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Padded to the longest; what is padding or prompt has no label."""
    width = max(len(example.tokens) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for row, example in enumerate(examples):
        stop = len(example.tokens)
        ids[row, :stop] = torch.tensor(example.tokens)
        labels[row, example.n_prompt : stop] = ids[row, example.n_prompt : stop]
        mask[row, :stop] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def judge(model: torch.nn.Module, examples: Sequence[Example]) -> float:
    """The mean loss of answers; nothing is written."""
    model.eval()
    loss: float = model(**batch_of(examples)).loss.item()
    model.train()
    return loss


def tiny_base(folder: Path) -> Path:
    """A model whose tokens are bytes."""
    shape = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="folder with a model and its tokenizer")
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps, of --accumulate batches each")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="most tokens of an example")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save", type=Path, help="folder for the trained adapter")
    parser.add_argument("--merged", type=Path, help="folder for the base with the adapter in it")
    options = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made:
        base = options.base or tiny_base(Path(made))
        encode = (lambda text: list(text.encode())) if options.base is None else tokenizer_of(base)
        examples = examples_of(encode, options.length)
        unseen, seen = examples[::10], [example for number, example in enumerate(examples) if number % 10]
        with infinity.empty_init():  # adapters first, then offload
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))
            model = get_peft_model(model, LoraConfig(r=options.rank, target_modules=["q_proj", "v_proj"]))
        config = infinity.Config(precision="fp32", nvme={"paths": [options.nvme]})
        if options.base is None:  # so small only to show that it works
            config = config.with_(device={"budget": "8MiB"}, host={"budget": "5MiB"})
        with infinity.offload(model, config, weights=base) as engine:
            train(engine, model, options, seen, unseen)


def tokenizer_of(base: Path) -> Callable[[str], list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def train(
    engine: infinity.Engine,
    model: torch.nn.Module,
    options: argparse.Namespace,
    seen: Sequence[Example],
    unseen: Sequence[Example],
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = infinity.AdamW(trained, lr=options.lr, weight_decay=0.0, max_grad_norm=1.0)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, options.steps // 10, options.steps)
    print(f"{sum(p.numel() for p in trained)} of {sum(p.numel() for p in model.parameters())} parameters train")
    print(f"unseen answers before: {judge(model, unseen):.4f}")
    before = engine.metrics()
    order = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        total = 0.0
        for _ in range(options.accumulate):
            chosen = torch.randperm(len(seen), generator=order)[: options.batch].tolist()
            loss = model(**batch_of([seen[number] for number in chosen])).loss / options.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f} at lr {scheduler.get_last_lr()[0]:.2e}")
    print(f"unseen answers after: {judge(model, unseen):.4f}")
    after = engine.metrics()  # without these counters where all of it fits in memory
    read, written = (after.get(name, 0) - before.get(name, 0) for name in ("nvme/read_bytes", "nvme/write_bytes"))
    print(f"read {read / 1e6:.1f} MB, wrote {written / 1e6:.1f} MB: the base is never written")
    if options.save is not None:
        engine.export(options.save)  # what PeftModel.from_pretrained(base, folder) reads
    if options.merged is not None:
        engine.export(options.merged, merge=True)  # what from_pretrained reads


if __name__ == "__main__":
    main()
