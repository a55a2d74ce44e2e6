"""`InfinityTrainer` in the place of `transformers.Trainer`: the same numbers, its checkpoints, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.zoo import build

pytest.importorskip("transformers", reason="the Hugging Face tests need the extra 'hf'")
import transformers

from infinity.integrations.huggingface import InfinityTrainer
from tests.parity.hf_models import llama, token_batch

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:accelerate"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
Values = dict[str, torch.Tensor]


def config(tmp_path: Path) -> infinity.Config:
    (tmp_path / "swap").mkdir(exist_ok=True)
    return infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "2MiB"},
        host={"budget": "600KiB"},
        nvme={"paths": [tmp_path / "swap"]},
    )


def arguments(folder: Path, **chosen: Any) -> transformers.TrainingArguments:
    defaults: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    return transformers.TrainingArguments(output_dir=str(folder), use_cpu=True, **(defaults | settings | chosen))


def data() -> list[dict[str, torch.Tensor]]:
    rows = [token_batch(number, (1, 9))[0] for number in range(12)]
    return [{"input_ids": row, "labels": row} for row in rows]


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def values(model: torch.nn.Module) -> Values:
    with infinity.gathered(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(expected: Values, model: torch.nn.Module) -> None:
    assert [name for name, value in values(model).items() if not torch.equal(value, expected[name])] == []


@pytest.fixture
def plain(tmp_path: Path) -> tuple[list[float], Values]:
    model = build(llama)
    args = arguments(tmp_path / "plain", optim="adamw_torch_fused")
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data())
    trainer.train()
    return losses(trainer), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_one_changed_name_gives_the_same_numbers(tmp_path: Path, plain: tuple[list[float], Values]) -> None:
    model = build(llama)
    with InfinityTrainer(
        model, arguments(tmp_path / "ours"), infinity_config=config(tmp_path), train_dataset=data()
    ) as trainer:
        trainer.train()
        assert losses(trainer) == plain[0]
        assert_equal(plain[1], model)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert all(entry["infinity/step/nvme_read_bytes_per_s"] > 0 for entry in logged[1:])
        groups = trainer.optimizer.param_groups
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert list((tmp_path / "swap").iterdir()) == []


def test_resuming_gives_the_bits_of_an_uninterrupted_run(tmp_path: Path, plain: tuple[list[float], Values]) -> None:
    folder = tmp_path / "ours"
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    with InfinityTrainer(
        build(llama), arguments(folder, **saving), infinity_config=config(tmp_path), train_dataset=data()
    ) as trainer:
        trainer.train()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    other = build(llama, seed=1)
    with InfinityTrainer(
        other, arguments(tmp_path / "again"), infinity_config=config(tmp_path), train_dataset=data()
    ) as trainer:
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        assert losses(trainer) == plain[0]  # the first three are in the saved state
        assert_equal(plain[1], other)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    model = build(llama)
    args = arguments(
        tmp_path / "ours",
        learning_rate=0.5,  # far too large once it is warm: the first step is the best
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    with InfinityTrainer(
        model, args, infinity_config=config(tmp_path), train_dataset=data(), eval_dataset=data()[:4]
    ) as trainer:
        trainer.train()
        evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        best = min(evaluated.values())
        assert evaluated[4] > best
        assert trainer.evaluate()["eval_loss"] == best


def test_saved_models_are_read_by_transformers(tmp_path: Path) -> None:
    model = build(llama)
    with InfinityTrainer(
        model, arguments(tmp_path / "ours", max_steps=1), infinity_config=config(tmp_path), train_dataset=data()
    ) as trainer:
        trainer.train()
        gathers = trainer.engine.counters()["device/peak_bytes"]
        trainer.save_model(str(tmp_path / "model"))
        trainer.save_model(str(tmp_path / "model"))  # again, over what is there
        assert trainer.engine.counters()["device/peak_bytes"] == gathers  # streamed, not gathered
        trained = values(model)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(trained[name], parameter) for name, parameter in loaded.named_parameters())


def test_weights_of_an_earlier_save_are_not_taken_for_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file `model.safetensors` is preferred to several with an index."""
    folder = tmp_path / "model"
    build(llama, seed=1).save_pretrained(folder)
    (folder / "notes-model.safetensors").write_text("mine")
    model = build(llama)
    with InfinityTrainer(model, arguments(tmp_path / "ours"), infinity_config=config(tmp_path)) as trainer:
        export = trainer.engine.export
        monkeypatch.setattr(trainer.engine, "export", lambda path: export(path, shard_size="20KB"))
        trainer.save_model(str(folder))
        wanted = values(model)
        assert not (folder / "model.safetensors").exists()
        several = {path.name for path in folder.glob("model-*-of-*.safetensors")}
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert all(torch.equal(wanted[name], parameter) for name, parameter in loaded.named_parameters())
        monkeypatch.setattr(trainer.engine, "export", lambda path: export(path, shard_size=None))
        trainer.save_model(str(folder))
    assert len(several) > 1
    assert {path.name for path in folder.glob("*model*")} == {"model.safetensors", "notes-model.safetensors"}


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = build(llama)
    other = torch.optim.AdamW(model.parameters())
    for given, told in (
        ({"optimizers": (other, None)}, r"optimizers=\(AdamW, \.\.\.\)"),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})}, "optimizer_cls_and_kwargs"),
    ):
        with pytest.raises(infinity.ConfigError, match=told):
            InfinityTrainer(model, arguments(tmp_path), infinity_config=config(tmp_path), **given)
    assert model.lm_head.weight.sum().isfinite()  # the model was not touched


def test_only_the_first_process_writes_what_all_of_them_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path / "ours")
    with InfinityTrainer(build(llama), args, infinity_config=config(tmp_path), train_dataset=data()) as trainer:
        trainer.create_optimizer_and_scheduler(4)
        monkeypatch.setattr(transformers.TrainingArguments, "should_save", False)
        trainer.save_model(str(tmp_path / "other"), _internal_call=True)
        trainer._save_optimizer_and_scheduler(str(tmp_path / "other"))
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["infinity"]


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    plain = arguments(tmp_path / "plain", save_strategy="steps", save_steps=4)
    transformers.Trainer(model=build(llama), args=plain, train_dataset=data()).train()
    with (
        InfinityTrainer(
            build(llama), arguments(tmp_path / "ours"), infinity_config=config(tmp_path), train_dataset=data()
        ) as trainer,
        pytest.raises(infinity.CheckpointError, match="from_pretrained"),
    ):
        trainer.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))


@pytest.mark.parametrize(("name", "value"), [("bf16", True), ("optim", "adafactor")])
def test_arguments_that_contradict_the_engine_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    model = build(llama)
    with pytest.raises(infinity.ConfigError, match=name):
        InfinityTrainer(model, arguments(tmp_path, **{name: value}), infinity_config=config(tmp_path))
    assert model.lm_head.weight.sum().isfinite()  # the model was not touched


def test_a_failing_constructor_gives_everything_back(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        InfinityTrainer(
            build(llama), arguments(tmp_path / "ours"), infinity_config=config(tmp_path), no_such_argument=1
        )
    assert list((tmp_path / "swap").iterdir()) == []


def test_an_engine_that_is_there_stays_the_callers(tmp_path: Path) -> None:
    model = build(llama)
    with infinity.offload(model, config(tmp_path)) as engine:
        trainer = InfinityTrainer(model, arguments(tmp_path / "ours", max_steps=1), engine=engine, train_dataset=data())
        trainer.train()
        trainer.close()
        assert not engine.is_closed
    state = json.dumps(trainer.state.log_history)
    assert "infinity/step/stall_s" in state


def test_a_model_is_needed() -> None:
    with pytest.raises(infinity.ConfigError, match="needs a model"):
        InfinityTrainer()


def test_settings_beside_an_engine_are_refused(tmp_path: Path) -> None:
    """They would be those of no engine."""
    model = llama()
    with (
        infinity.offload(model, config(tmp_path)) as engine,
        pytest.raises(infinity.ConfigError, match="an engine and infinity_config"),
    ):
        InfinityTrainer(model, engine=engine, infinity_config=config(tmp_path))
