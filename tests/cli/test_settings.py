"""How presets, options and settings files become one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.settings import resolve
from infinity.cli.sizing import comfortable_budgets, minima_of
from infinity.cli.train_options import TrainOptions
from infinity.config import ActivationPolicy, Config, Precision, Schedule, StateFormat
from infinity.errors import ConfigError
from infinity.models.gpt import GptShape
from infinity.models.presets import DEFAULT_PRESET, PRESETS
from infinity.sizes import parse_nbytes


@pytest.mark.pairs
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous"])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_preset_budgets_work_and_are_below_the_state(name: str, precision: str, schedule: str, device: str) -> None:
    options = TrainOptions(preset=name, precision=precision, schedule=schedule, device=device)
    settings = resolve(options)
    least = minima_of(settings.training.shape, settings.config)
    assert settings.config.device.budget == parse_nbytes(PRESETS[name].device_budget)
    assert least.device_nbytes <= parse_nbytes(PRESETS[name].device_budget)
    assert least.host_nbytes <= parse_nbytes(PRESETS[name].host_budget)
    together = parse_nbytes(PRESETS[name].device_budget) + parse_nbytes(PRESETS[name].host_budget)
    assert least.state_nbytes >= (2 if name == "tiny" else 4) * together


def test_the_tokens_of_a_step_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    training = resolve(TrainOptions(preset="tiny", accumulate=3)).training
    alone = training.tokens_per_step
    assert alone == 3 * training.batch * training.shape.seq
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert resolve(TrainOptions(preset="tiny", accumulate=3)).training.tokens_per_step == 4 * alone


def test_the_default_state_is_four_times_its_budgets() -> None:
    settings = resolve(TrainOptions(preset=DEFAULT_PRESET))
    budgets = (settings.config.device.budget or 0) + (settings.config.host.budget or 0)
    assert 12 * settings.training.shape.parameters >= 4 * budgets


@pytest.mark.parametrize("shape", [GptShape(2, 64, 2, 32), GptShape(24, 1024, 16, 512), GptShape(1, 2048, 32, 64)])
def test_derived_budgets_are_at_least_the_smallest(shape: GptShape) -> None:
    for precision in Precision:
        least = minima_of(shape, Config(precision=precision))
        device, host = comfortable_budgets(least)
        assert device >= least.device_nbytes
        assert host >= least.host_nbytes


def test_derived_budgets_of_a_deep_model_are_a_quarter_of_its_state() -> None:
    least = minima_of(GptShape(24, 1024, 16, 512), Config())
    assert sum(comfortable_budgets(least)) <= least.state_nbytes // 4


@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        (TrainOptions(preset="tiny"), Schedule.OVERLAPPED),
        (TrainOptions(preset="tiny", accumulate=2), Schedule.AUTO),
        (TrainOptions(preset="tiny", clip=1.0), Schedule.AUTO),
        (TrainOptions(preset="tiny", schedule="synchronous"), Schedule.SYNCHRONOUS),
    ],
)
def test_auto_schedule_is_the_best_that_the_loop_allows(options: TrainOptions, schedule: Schedule) -> None:
    settings = resolve(options)
    assert settings.config.schedule is schedule
    assert any(note.startswith(f"schedule: {schedule.value}") for note in settings.notes)


def test_options_go_before_the_file_and_the_file_before_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('precision = "fp32"\n[host]\nbudget = "9MiB"\n[device]\nbudget = "7MiB"\nkind = "fake"\n')
    settings = resolve(TrainOptions(preset="tiny", config=file, device_budget="5MiB"))
    assert settings.config.precision is Precision.FP32
    assert settings.config.host.budget == 9 << 20
    assert settings.config.device.budget == 5 << 20
    assert settings.training.device == "fake"


def test_heads_follow_hidden_when_only_hidden_is_given() -> None:
    settings = resolve(TrainOptions(preset="small", hidden=320, layers=4))
    assert settings.training.shape.hidden % settings.training.shape.heads == 0
    assert resolve(TrainOptions(preset="small", hidden=132)).training.shape.heads == 2


def test_the_state_format_reaches_the_engine_and_the_budgets() -> None:
    sizes = {form: resolve(TrainOptions(layers=8, hidden=256, state_format=form)) for form in ("fp32", "int8")}
    assert sizes["int8"].config.state_format is StateFormat.INT8
    host = {form: settings.config.host.budget or 0 for form, settings in sizes.items()}
    assert host["int8"] < host["fp32"]
    with pytest.raises(ConfigError, match="only AdamW in bf16"):
        resolve(TrainOptions(preset="tiny", precision="fp32", state_format="bf16"))


def test_units_or_the_model_recompute_but_not_both() -> None:
    assert resolve(TrainOptions(preset="tiny", recompute=True)).training.recompute
    settings = resolve(TrainOptions(preset="small", activations="nvme"))
    assert settings.config.activations.policy is ActivationPolicy.NVME
    assert not settings.training.recompute
    assert resolve(TrainOptions(preset="small", activations="host", recompute=True)).training.recompute
