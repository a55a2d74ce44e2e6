"""`InfinityTrainer` in the place of `transformers.Trainer`: one changed name and one more argument.

python examples/huggingface_trainer.py --output out --steps 20
python examples/huggingface_trainer.py --output out --steps 40 --resume
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import transformers

import infinity
from infinity.data.text import shipped_text
from infinity.integrations.huggingface import InfinityTrainer


def examples_of(text: torch.Tensor, length: int, count: int) -> list[dict[str, torch.Tensor]]:
    rows = [text[number * length : (number + 1) * length] for number in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path(tempfile.gettempdir()), help="folder for swap files")
    parser.add_argument("--output", type=Path, default=Path("out"), help="the Trainer's folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    options = parser.parse_args()

    transformers.set_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    with infinity.empty_init():
        model = transformers.LlamaForCausalLM(shape)
    config = infinity.Config(
        precision="fp32", device={"budget": "8MiB"}, host={"budget": "12MiB"}, nvme={"paths": [options.nvme]}
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=10,
        save_total_limit=2,
        logging_steps=5,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    text = torch.from_numpy(shipped_text().tokens.copy()).long()
    data = examples_of(text, length=64, count=256)
    with InfinityTrainer(model, arguments, infinity_config=config, train_dataset=data) as trainer:
        trainer.train(resume_from_checkpoint=options.resume)
        trainer.save_model(str(options.output / "model"))  # what from_pretrained reads
    print(f"trained for {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
