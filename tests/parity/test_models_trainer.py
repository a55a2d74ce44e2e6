"""`transformers.Trainer`, Accelerate and PEFT drive an offloaded model, and the numbers are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.conftest import MakeEngine
from tests.parity.loops import (
    Loop,
    Outcome,
    assert_same,
    gathered_parameters,
    smallest_budget,
    train_offloaded,
    train_plain,
)
from tests.zoo import build

pytest.importorskip("transformers", reason="the Hugging Face tests need the extra 'hf'")
pytest.importorskip("accelerate", reason="the Hugging Face tests need the extra 'hf'")
import accelerate
import transformers

from tests.parity.hf_models import hf_loss, llama, t5, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:accelerate"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
_SPILLING = {"budget": "600KiB"}
_PLENTY = {"budget": "4MiB"}


def _dataset(n_examples: int = 12) -> list[dict[str, torch.Tensor]]:
    rows = [token_batch(number, (1, 9))[0] for number in range(n_examples)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(model: Any, optimizer: torch.optim.Optimizer, folder: Path, **arguments: Any) -> transformers.Trainer:
    chosen = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no"} | arguments
    args = transformers.TrainingArguments(
        output_dir=str(folder), logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **chosen
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    data = _dataset()
    return transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], optimizers=(optimizer, scheduler)
    )


def _outcome(trainer: transformers.Trainer, parameters: dict[str, torch.Tensor]) -> Outcome:
    history = trainer.state.log_history
    losses = [entry[key] for entry in history for key in ("loss", "grad_norm", "eval_loss") if key in entry]
    assert len(losses) >= 2 * trainer.args.max_steps
    return Outcome(losses, [], parameters)


@pytest.mark.somewhere
@pytest.mark.parametrize("host", [_PLENTY, _SPILLING], ids=["held", "spilled"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_grad_norm": 0.5},
        {"max_grad_norm": 0.0},
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=["clipped", "not clipped", "accumulated", "evaluated"],
)
def test_trainer(offload: MakeEngine, tmp_path: Path, arguments: dict[str, Any], host: dict[str, str]) -> None:
    plain = build(llama)
    trainer = _trainer(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), tmp_path / "a", **arguments)
    trainer.train()
    expected = _outcome(trainer, {name: p.detach().clone() for name, p in plain.named_parameters()})
    model = build(llama)
    engine = offload(model, schedule="auto", host=host)
    assert bool(engine.plan.placement.spilled_gradients) == (host is _SPILLING)
    trainer = _trainer(model, infinity.AdamW(model.parameters(), lr=1e-2), tmp_path / "b", **arguments)
    trainer.train()
    assert_same(expected, _outcome(trainer, gathered_parameters(model)))


def test_saving_what_the_trainer_trained(offload: MakeEngine, tmp_path: Path) -> None:
    model: Any = build(llama)
    engine = offload(model, host=_PLENTY)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)

    class SaveWithEngine(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engine.save(tmp_path / f"step-{state.global_step}", optimizer=optimizer)

    trainer = _trainer(model, optimizer, tmp_path / "out")
    trainer.add_callback(SaveWithEngine())
    trainer.train()
    trained = gathered_parameters(model)
    with infinity.gathered(model):
        trainer.save_model(str(tmp_path / "model"))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(trained[name], parameter) for name, parameter in loaded.named_parameters())
    other = build(llama, seed=1)
    resumed = offload(other, host=_PLENTY)
    resumed.load(tmp_path / "step-3")
    assert all(torch.equal(trained[name], value) for name, value in gathered_parameters(other).items())


def test_trainer_of_a_schedule_without_gradients_is_told(offload: MakeEngine, tmp_path: Path) -> None:
    model = build(llama)
    offload(model, schedule="overlapped")
    trainer = _trainer(model, infinity.AdamW(model.parameters(), lr=1e-2), tmp_path)
    with pytest.raises(infinity.IterationError, match="schedule='synchronous'"):
        trainer.train()


def _accelerated(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader: Any = torch.utils.data.DataLoader([row["input_ids"] for row in _dataset()], batch_size=2)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader)
    numbers = []
    for ids in loader:
        with accelerator.accumulate(prepared):
            loss = hf_loss(prepared, ids)
            accelerator.backward(loss)
            numbers.append(loss.item())
            if accelerator.sync_gradients:
                numbers.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 0.5)))
            wrapped.step()
            wrapped.zero_grad()
    return numbers


@pytest.mark.parametrize("host", [_PLENTY, _SPILLING], ids=["held", "spilled"])
@pytest.mark.parametrize("make", [llama, t5])
def test_accelerate(offload: MakeEngine, make: Callable[[], nn.Module], host: dict[str, str]) -> None:
    plain = build(make).train()
    torch.manual_seed(3)
    numbers = _accelerated(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    expected = Outcome(numbers, [], {name: p.detach().clone() for name, p in plain.named_parameters()})
    model = build(make).train()
    offload(model, schedule="synchronous", host=host)
    torch.manual_seed(3)
    numbers = _accelerated(model, infinity.AdamW(model.parameters(), lr=1e-2))
    assert_same(expected, Outcome(numbers, [], gathered_parameters(model)))


def _with_lora() -> nn.Module:
    peft = pytest.importorskip("peft", reason="the Hugging Face tests need the extra 'hf'")
    settings = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), settings).train()  # type: ignore[no-any-return]


def _with_checkpointed_lora() -> nn.Module:
    model: Any = _with_lora()
    model.enable_input_require_grads()
    model.base_model.model.model.gradient_checkpointing = True
    model.base_model.model.gradient_checkpointing_enable()
    return model.train()  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("make", [_with_lora, _with_checkpointed_lora])
def test_lora_never_writes_the_frozen_base(offload: MakeEngine, make: Callable[[], nn.Module], schedule: str) -> None:
    budget = smallest_budget(offload, "host", build(make), schedule=schedule)
    loop = Loop(make, loss=hf_loss, batch=token_batch, steps=3)
    plain = train_plain(loop)
    ours, engine = train_offloaded(loop, lambda model: offload(model, schedule=schedule, host={"budget": budget}))
    assert_same(plain, ours)
    trained = sum(group.shard_nbytes for group in engine._runtime.groups if group.trainable)
    frozen = sum(group.shard_nbytes for group in engine._runtime.groups if not group.trainable)
    assert frozen >= 3 * trained  # with padding to pages
    for step in engine.traffic.per_step:
        assert step["nvme_write_bytes/param"] <= trained
        assert step["nvme_read_bytes/param"] > trained  # the base does come from the swap file
