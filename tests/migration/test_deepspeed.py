"""DeepSpeed's settings become ours: the files that people have, every documented key, and clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.migration.deepspeed import read_deepspeed
from infinity.migration.report import Migration, Outcome
from tests.cli.command import call

FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_WARMUP = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"]
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(_WARMUP, "auto")}
SCHEDULE = {"type": "WarmupDecayLR", "params": dict.fromkeys([*_WARMUP, "total_num_steps"], "auto")}
BATCHES = dict.fromkeys(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"], "auto")
SHARED = {"steps_per_print": 2000, "wall_clock_breakdown": False}
STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": "auto",
    "contiguous_gradients": True,
}
STAGE3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
}
CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
AIO = {
    "block_size": 262144,
    "queue_depth": 32,
    "thread_count": 1,
    "single_submit": False,
    "overlap_events": True,
}
AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
TORCH_ADAMW = {"type": "AdamW", "params": AUTO_ADAMW["params"] | {"torch_adam": True, "adam_w_mode": True}}  # type: ignore[operator]

# The settings of the files that accelerate's examples and the tests and documentation of transformers use.
_ACCELERATE = {"fp16": FP16, "scheduler": SCHEDULE, "gradient_accumulation_steps": 1, **BATCHES, **SHARED}
FILES: dict[str, dict[str, Any]] = {
    "accelerate stage 1": _ACCELERATE | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2 | {"stage": 1}},
    "accelerate stage 2": _ACCELERATE | {"optimizer": TORCH_ADAMW, "zero_optimization": STAGE2},
    "accelerate stage 2 offload": _ACCELERATE
    | {"optimizer": AUTO_ADAMW, "zero_optimization": STAGE2 | {"offload_optimizer": CPU}},
    "accelerate stage 3": _ACCELERATE | {"optimizer": AUTO_ADAMW, "zero_optimization": STAGE3},
    "accelerate stage 3 offload": _ACCELERATE
    | {"optimizer": AUTO_ADAMW, "zero_optimization": STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU}},
    "transformers tests stage 2": {
        "fp16": FP16 | {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": SCHEDULE,
        "zero_optimization": STAGE2 | {"offload_optimizer": CPU, "reduce_bucket_size": 2e8},
        "gradient_accumulation_steps": "auto",
        **BATCHES,
        **SHARED,
    },
    "transformers tests stage 3": {
        "fp16": FP16,
        "zero_optimization": STAGE3
        | {"offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 1e14, "reduce_bucket_size": 0}
        | {"stage3_param_persistence_threshold": 0, "stage3_gather_fp16_weights_on_model_save": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5}},
        **SHARED,
    },
    "transformers tests stage 3, older": {
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": WARMUP,
        "zero_optimization": STAGE3
        | {"offload_optimizer": CPU, "offload_param": CPU, "stage3_gather_fp16_weights_on_model_save": True},
        "gradient_accumulation_steps": "auto",
        **BATCHES,
        **SHARED,
    },
    "accelerate tests stage 2": {
        "fp16": FP16 | {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": TORCH_ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": STAGE2 | {"offload_optimizer": CPU},
        "gradient_accumulation_steps": 1,
        **BATCHES,
        **SHARED,
    },
    "accelerate tests stage 3, model only": {
        "fp16": FP16 | {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU},
        "train_batch_size": 1,
    },
    "accelerate long sequences": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": 1,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "seq_parallel_communication_data_type": "bf16",
    },
    "accelerate documentation ZeRO++": {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 8,
            "zero_quantized_gradients": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "transformers documentation stage 1": {"zero_optimization": {"stage": 1}},
    "transformers documentation stage 2": {
        "zero_optimization": STAGE2 | {"offload_optimizer": CPU, "round_robin_gradients": True},
        "fp16": {"enabled": False},
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"use_node_local_storage": True},
    },
    "transformers documentation NVMe": {
        "fp16": FP16 | {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
        "scheduler": WARMUP,
        "gradient_accumulation_steps": "auto",
        **BATCHES,
        **SHARED,
        "zero_optimization": STAGE3
        | {"offload_optimizer": NVME | {"buffer_count": 4, "fast_init": False}}
        | {"offload_param": NVME | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}}
        | {"aio": AIO},
    },
}
# Sections 1.2 to 1.5 of the feature list of DeepSpeed 0.19.
ZERO_KEYS = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint round_robin_gradients
    ignore_unused_parameters legacy_stage1 sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
    stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential leaf_module.classes leaf_module.names
    leaf_module.name_suffixes zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
    save_muon_momentum_buffer_in_memory zenflow.topk_ratio cpu_offload cpu_offload_param cpu_offload_use_pin_memory
    offload_param.device offload_param.nvme_path offload_param.pin_memory offload_param.buffer_count
    offload_param.buffer_size offload_param.max_in_cpu offload_optimizer.device offload_optimizer.nvme_path
    offload_optimizer.pin_memory offload_optimizer.buffer_count offload_optimizer.pipeline_read
    offload_optimizer.pipeline_write offload_optimizer.fast_init offload_optimizer.ratio offload_optimizer.super_offload
    offload_optimizer.cpuadam_cores_perc offload_optimizer.buffer_size
"""
AIO_KEYS = "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count"


def nested(key: str, value: object) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return {name: nested(rest, value) if rest else value}


def deep(levels: int) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for number in range(levels):
        made = {number: made}
    return made


def silent(source: dict[str, Any]) -> infinity.Config:
    return infinity.Config.from_deepspeed(source, on_report=lambda report: None)


@pytest.mark.parametrize("name", FILES)
def test_files_that_people_have_load_and_every_setting_is_explained(name: str) -> None:
    migration = read_deepspeed(FILES[name])
    assert migration.with_outcome(Outcome.UNKNOWN) == []
    explained = {finding.key for finding in migration.findings}

    def check(settings: dict[str, Any], prefix: str = "") -> None:
        for key, value in settings.items():
            if isinstance(value, dict):
                check(value, f"{prefix}{key}.")
            else:
                assert f"{prefix}{key}" in explained

    check(FILES[name])
    assert all(finding.text for finding in migration.findings)
    assert migration.config.stage == FILES[name]["zero_optimization"]["stage"]


EVERY_KEY = [f"zero_optimization.{key}" for key in ZERO_KEYS.split()] + [f"aio.{key}" for key in AIO_KEYS.split()]


@pytest.mark.parametrize("key", EVERY_KEY)
def test_every_key_is_known(key: str) -> None:
    value: object = "auto" if key.endswith(("device", "nvme_path")) else 1
    if key.endswith("device"):
        value = "cpu"
    if key.endswith(("pin_memory", "single_submit")):
        value = True
    (finding,) = read_deepspeed(nested(key, value)).findings
    assert finding.outcome is not Outcome.UNKNOWN
    assert finding.text


def test_nvme_paths_precision_and_stage_are_mapped() -> None:
    config = silent(
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": NVME | {"nvme_path": "/a", "pin_memory": False},
                "offload_param": NVME | {"nvme_path": "/b"},
                "stage3_param_persistence_threshold": 1e5,
            },
        }
    )
    assert config.nvme.paths == (Path("/b"), Path("/a"))
    assert (config.precision, config.stage, config.host.pin) == (infinity.Precision.BF16, 2, False)
    assert config.resident_threshold == 200_000


def test_the_former_name_of_a_section_counts_and_is_shown() -> None:
    migration = read_deepspeed({"bfloat16": {"enabled": True}})
    assert migration.config.precision is infinity.Precision.BF16
    assert [finding.key for finding in migration.findings] == ["bfloat16.enabled"]
    with pytest.raises(infinity.ConfigError, match="bfloat16 and bf16 are both given"):
        read_deepspeed({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


def test_what_is_turned_off_is_not_missed() -> None:
    off = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "sparse_gradients": False,
        "wall_clock_breakdown": False,
        "zero_optimization": {"zero_quantized_weights": False},
    }
    findings = read_deepspeed(off).findings
    assert len(findings) == 7
    assert {(finding.outcome, finding.text) for finding in findings} == {(Outcome.UNNEEDED, "off")}
    on = read_deepspeed({"elasticity": {"enabled": True, "max_train_batch_size": 2000}}).findings
    assert {finding.outcome for finding in on} == {Outcome.UNSUPPORTED}


def test_empty_sections_are_defaults() -> None:
    sections: list[tuple[str, Any]] = [("fp16", None), ("zero_optimization", {}), ("optimizer", None), ("aio", False)]
    migration = read_deepspeed(dict(sections))
    assert [(f.outcome, f.text) for f in migration.findings] == [(Outcome.UNNEEDED, "off")] * 4
    assert migration.config == infinity.Config(precision="fp32", stage=1)


def test_state_format_and_activations_are_mapped() -> None:
    settings: dict[str, Any] = {
        "bf16": {"enabled": True, "bf16_optimizer_states": True},
        "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
    }
    config = silent(settings)
    assert config.state_format.value == "bf16"
    assert config.activations.policy.value == "host"
    plain = silent({"bf16": {"enabled": True}})
    assert (plain.state_format.value, plain.activations.policy.value) == ("fp32", "none")


def test_the_same_folder_for_both_is_one_drive() -> None:
    assert silent(FILES["transformers documentation NVMe"]).nvme.paths == (Path("/local_nvme"),)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16"),
    ],
)
def test_precision(settings: dict[str, Any], precision: str) -> None:
    assert silent(settings).precision.value == precision


def test_what_the_engine_did_becomes_lines_of_the_loop() -> None:
    settings = FILES["transformers tests stage 3"] | {"gradient_clipping": 0.5, "gradient_accumulation_steps": 4}
    loop = read_deepspeed(settings).loop
    assert loop[1] == (
        "optimizer = infinity.AdamW(model.parameters(), lr=3e-05, betas=(0.8, 0.999), eps=1e-08, weight_decay=3e-07, "
        "max_grad_norm=0.5)"
    )
    assert any("GradScaler(init_scale=65536, growth_interval=1000)" in line for line in loop)
    assert any("(loss / 4).backward()" in line for line in loop)
    assert any("get_constant_schedule_with_warmup(optimizer, 5)" in line for line in loop)


def test_the_line_for_the_optimizer_runs() -> None:
    import torch

    migration = read_deepspeed(FILES["transformers tests stage 3"] | {"fp16": {"enabled": False}})
    model = torch.nn.Linear(2, 2)
    budgets = migration.config.with_(device={"kind": "cpu", "budget": "8MiB"}, host={"budget": "8MiB"})
    with infinity.offload(model, budgets) as engine:
        scope: dict[str, Any] = {"infinity": infinity, "model": model, "engine": engine}
        exec(migration.loop[1], scope)
        model(torch.ones(1, 2)).sum().backward()
        scope["optimizer"].step()
        assert scope["optimizer"].defaults["betas"] == (0.8, 0.999)


@pytest.mark.parametrize(
    ("kind", "mode", "name"),
    [("Adam", True, "AdamW"), ("Adam", False, "Adam"), ("AdamW", True, "AdamW"), ("Lion", True, "Lion")],
)
def test_optimizers(kind: str, mode: bool, name: str) -> None:
    migration = read_deepspeed({"optimizer": {"type": kind, "params": {"lr": 1e-3, "adam_w_mode": mode}}})
    assert migration.loop[1] == f"optimizer = infinity.{name}(model.parameters(), lr=0.001)"
    assert migration.config.optimizer.value == name.lower()


def test_unsupported_says_why() -> None:
    migration = read_deepspeed({"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"zenflow": {"x": 1}}})
    assert [f.key for f in migration.with_outcome(Outcome.UNSUPPORTED)] == [
        "optimizer.type",
        "zero_optimization.zenflow.x",
    ]


def test_a_typing_error_is_named_with_the_nearest_key() -> None:
    (finding,) = read_deepspeed({"zero_optimization": {"stage3_max_live_parameter": 1}}).with_outcome(Outcome.UNKNOWN)
    assert "did you mean 'zero_optimization.stage3_max_live_parameters'?" in finding.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"zero_optimization": {"stage": 4}}, r"stage = 4"),
        ({"zero_optimization": {"stage": "three"}}, "wants a number"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "'none', 'cpu', 'nvme'"),
        ({"fp16": {"enabled": True, "loss_scale": 1000}}, "powers of two"),
        ({"bf16": {"enabled": "yes"}}, "true, false"),
        ({"gradient_clipping": True}, "wants a number"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, r"initial_scale_power = 5000: only powers"),
        ({"fp16": {"enabled": True, "initial_scale_power": 1.5}}, r"initial_scale_power = 1\.5: only powers"),
        ({"fp16": {"enabled": True, "loss_scale": -8}}, r"loss_scale = -8: only powers"),
        ({"fp16": True}, "fp16 = True: DeepSpeed wants settings by name"),
        ({"zero_optimization": 3}, "zero_optimization = 3: DeepSpeed wants settings"),
        ({"zero_optimization": {"offload_param": "nvme"}}, r"offload_param = 'nvme': DeepSpeed wants settings"),
        ({"optimizer": ["AdamW"]}, r"optimizer = \['AdamW'\]: DeepSpeed wants settings"),
        (5, "given as 5; give the JSON file's path"),
        (None, "given as None; give the JSON file's path"),
        (deep(2000), "more than 20 deep"),
    ],
)
def test_wrong_values_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(infinity.ConfigError, match=message):
        read_deepspeed(settings)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(infinity.ConfigError, match="cannot be read"):
        read_deepspeed(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(infinity.ConfigError, match=r"broken\.json: not valid JSON"):
        read_deepspeed(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(infinity.ConfigError, match="holds list"):
        read_deepspeed(tmp_path / "list.json")


def test_from_deepspeed_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    infinity.Config.from_deepspeed({"zero_optimization": {"stage": 3, "overlap_comm": True}})
    printed = capsys.readouterr().out
    assert "zero_optimization.stage = 3: stage=3" in printed
    assert "optimizer = infinity.AdamW(model.parameters())" in printed
    kept: list[Migration] = []
    infinity.Config.from_deepspeed({}, on_report=kept.append)
    assert capsys.readouterr().out == ""
    assert len(kept) == 1


def test_migrate_command_writes_settings_that_load(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(json.dumps(FILES["transformers documentation NVMe"]))
    code, output, error = call("migrate", source, "--write", tmp_path / "our.json", "--json", tmp_path / "report.json")
    assert (code, error) == (0, "")
    assert "zero_optimization.aio.thread_count" in output
    config = infinity.Config.load(tmp_path / "our.json")
    assert config == silent(FILES["transformers documentation NVMe"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["config"] == json.loads((tmp_path / "our.json").read_text())
    assert {finding["outcome"] for finding in report["findings"]} >= {"mapped", "better default", "unneeded"}


def test_migrate_command_refuses_bad_input(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text('{"zero_optimization": {"stage": 9}}')
    code, _, error = call("migrate", source)
    assert code == 2
    assert "zero_optimization.stage = 9" in error
    source.write_text("{}")
    code, _, error = call("migrate", source, "--write", tmp_path / "our.toml")
    assert code == 2
    assert not (tmp_path / "our.toml").exists()
