"""What users of the leading engine ran into (PEER_DEEPSPEED section 4): where each of its 33 entries is tested.

`PLACES` names the tests by entry; that they exist is tested too. What had no test elsewhere has one here, with the
number of its entry.
"""

from __future__ import annotations

import ast
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from tests.conftest import MakeEngine
from tests.leaks import open_files
from tests.parity.loops import Loop, assert_parity, gathered_parameters
from tests.zoo import Block, Net, batch, build, loss_of

HERE = "parity/test_peer_reports.py"
PLACES: dict[int, tuple[str, ...]] = {
    1: (f"{HERE}::test_twenty_steps_with_odd_and_mixed_sizes",),
    2: ("infinity/test_checkpoint.py::test_resume_in_a_new_process", f"{HERE}::test_small_groups_keep_their_state"),
    3: (f"{HERE}::test_layers_without_gradients", "mechanics/test_iterations.py::test_step_without_gradients"),
    4: (f"{HERE}::test_shards_of_every_odd_length", "infinity/test_traffic.py::test_padding_is_counted_apart"),
    5: ("faults/test_engine_io.py::test_short_read", "faults/test_engine_io.py::test_error_of_a_spilled_gradient"),
    6: ("faults/test_storage_disk_full.py::test_more_than_the_disk_has_is_refused_with_the_arithmetic",
        "faults/test_several_disks_full.py::test_full_disks"),
    7: (f"{HERE}::test_shards_of_every_odd_length",),
    8: ("parity/test_loops_backward.py::test_two_losses_of_two_graphs",
        "parity/test_loops_backward.py::test_accumulation_with_no_sync_and_a_boundary_that_varies"),
    9: ("parity/test_loops_optimizers.py::test_bits_and_traffic",
        "parity/test_models_held.py::test_optimizers_of_whole_matrices_are_refused_with_the_reason"),
    10: (f"{HERE}::test_random_branches_are_read_ahead", f"{HERE}::test_policy_and_reference_in_one_model",
         "parity/test_models_changed.py::test_a_unit_that_runs_again_at_once_is_read_once"),
    11: ("parity/test_readahead.py::test_reads_are_ahead_from_the_second_step",),
    12: ("mechanics/test_iterations.py::test_exception_then_steps",
         "mechanics/test_outputs_and_uses.py::test_use_by_a_sibling_in_a_recomputation"),
    13: (f"{HERE}::test_twelve_layers_in_the_memory_of_little_more_than_one",),
    14: ("parity/test_models_modules.py::test_kinds_with_the_smallest_budgets",),
    15: (f"{HERE}::test_everything_below_the_threshold_of_a_unit",),
    16: ("infinity/test_config.py::test_mistakes", "infinity/test_init.py::test_unbuilt_and_built_train_alike"),
    17: (f"{HERE}::test_gathering_more_than_fits_says_so_and_costs_nothing",),
    18: ("parity/test_adoption.py::test_the_numbers_are_those_of_plain_pytorch",
         "parity/test_adoption_huggingface.py::test_resized_token_embeddings",
         "parity/test_adoption_huggingface.py::test_adapters_attached_late"),
    19: (f"{HERE}::test_many_steps_and_saves_open_nothing_and_fill_nothing",
         "parity/test_loops_torch_tools.py::test_twenty_engines_leave_nothing_behind"),
    20: ("ranks/test_branching.py::test_ranks_take_different_branches",),
    21: ("memory/test_train_under_limit.py::test_tiny_model_under_a_limit",),
    22: ("infinity/test_weights_in.py::test_memory_is_a_piece_and_not_a_tensor",
         "infinity/test_weights_in.py::test_every_byte_is_read_once_and_written_once"),
    23: ("infinity/test_engine.py::test_ranks_that_cannot_find_each_other_are_refused",),
    24: ("infinity/test_traffic.py::test_more_host_memory_never_moves_more",
         "infinity/test_placement.py::test_page_by_page_nothing_jumps_back"),
    25: ("scheduler/test_read_ahead.py::test_reads_of_the_next_units_are_under_way_before_a_computation_ends",
         f"{HERE}::test_a_gradient_crosses_the_link_once"),
    26: ("mechanics/test_iterations.py::test_evaluation_alone_writes_nothing",
         "parity/test_models_trainer.py::test_lora_never_writes_the_frozen_base"),
    27: ("infinity/test_placement.py::test_more_memory_is_never_used_worse",),
    28: ("infinity/test_engine.py::test_plan_describes_itself",
         "infinity/test_engine.py::test_metrics_are_flat_numbers"),
    29: ("packaging/test_wheel.py::test_the_installed_wheel_trains",
         "packaging/test_portable.py::test_training_uses_the_buffered_backend_and_gives_the_same_numbers"),
    30: ("storage/test_filesystems.py::test_memory_is_used_through_the_page_cache_that_it_is",),
    31: ("migration/test_deepspeed.py::test_a_typing_error_is_named_with_the_nearest_key",
         "infinity/test_config.py::test_mistakes"),
    32: (f"{HERE}::test_state_dicts_hold_values_or_refuse", "infinity/test_checkpoint.py::test_extra_keeps_its_types"),
    33: ("plan/test_wear.py::test_a_run_enters_in_the_ledger_what_it_has_written",),
}  # fmt: skip


def test_every_entry_has_its_tests() -> None:
    tests = Path(__file__).parent.parent
    assert sorted(PLACES) == list(range(1, 34))
    found: dict[str, set[str]] = {}
    for places in PLACES.values():
        for file, name in (place.split("::") for place in places):
            if file not in found:
                tree = ast.parse((tests / file).read_text())
                found[file] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in found[file], f"{file} has no {name}"


# 1 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["600KiB", "1400KiB", "64MiB"])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_twenty_steps_with_odd_and_mixed_sizes(offload: MakeEngine, schedule: str, host: str) -> None:
    """#2272: gradients that did not reach the swapped optimizer made training 25 times slower to learn."""

    def make() -> nn.Module:
        net = Net(blocks=2, hidden=37)
        net.blocks.append(Block(37, 513))
        net.blocks.append(Block(37, 1))
        return net

    loop = Loop(make, steps=20, hyper={"lr": 3e-3})
    assert_parity(loop, offload, schedule=schedule, host={"budget": host}, check_traffic=False)


# 2 -----------------------------------------------------------------------------------------------------------------


def test_small_groups_keep_their_state(offload: MakeEngine, tmp_path: Path) -> None:
    """#2082: a tiny group without decay, a scheduler, and a model built before, whose names are the same."""

    def groups(model: Any) -> list[dict[str, Any]]:
        tiny = [p for n, p in model.named_parameters() if "norm" in n or "bias" in n]
        rest = [p for n, p in model.named_parameters() if not ("norm" in n or "bias" in n)]
        return [{"params": tiny, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]

    def start() -> tuple[infinity.Engine, nn.Module, Any, Any]:
        model = build(Net)
        engine = offload(model)
        optimizer = infinity.AdamW(groups(model), lr=1e-2)
        return engine, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def steps(model: nn.Module, optimizer: Any, scheduler: Any, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = loss_of(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    engine, model, optimizer, scheduler = start()
    steps(model, optimizer, scheduler, range(3))
    engine.save(tmp_path / "saved", optimizer=optimizer, extra={"scheduler": scheduler.state_dict()})
    expected = steps(model, optimizer, scheduler, range(3, 6))
    _, other, other_optimizer, other_scheduler = start()
    steps(other, other_optimizer, other_scheduler, range(2))
    again, resumed, resumed_optimizer, resumed_scheduler = start()
    extra = again.load(tmp_path / "saved", optimizer=resumed_optimizer)
    resumed_scheduler.load_state_dict(extra["scheduler"])
    assert steps(resumed, resumed_optimizer, resumed_scheduler, range(3, 6)) == expected


# 3 -----------------------------------------------------------------------------------------------------------------


class _Unused(Net):
    """A block that no forward uses, and a parameter that only some use."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.spare = Block()
        self.scale = nn.Parameter(torch.ones(37, 37))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(frozen == "none" or (frozen == "all but one" and name == "blocks.2.up.weight"))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if int(ids.sum()) % 2:
            x = x @ self.scale
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("frozen", ["none", "all but one"])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_layers_without_gradients(offload: MakeEngine, schedule: str, frozen: str) -> None:
    """#4565: a group whose gradient is None; it neither moves nor decays, and clipping leaves it out."""
    max_norm = None if schedule == "overlapped" else 0.1
    loop = Loop(partial(_Unused, frozen), steps=5, max_norm=max_norm)
    assert_parity(loop, offload, schedule=schedule, host={"budget": "800KiB"}, check_traffic=False)


def test_a_model_that_does_not_train(offload: MakeEngine) -> None:
    """#4565, the whole model frozen: forwards work, an optimizer over nothing steps, nothing is written."""
    model = build(partial(_Unused, "all"))
    engine = offload(model, host={"budget": "64KiB"})
    optimizer = infinity.AdamW(model.parameters())
    before = engine.metrics()["nvme/write_operations"]
    expected = loss_of(build(partial(_Unused, "all")), batch(0))
    assert torch.equal(loss_of(model, batch(0)), expected)
    optimizer.step()
    optimizer.zero_grad()
    assert engine.metrics()["nvme/write_operations"] == before


# 4, 7 --------------------------------------------------------------------------------------------------------------

_LENGTHS = (0, 1, 3, 511, 512, 513, 4095, 4096, 4097, 513_000 // 19)


class _Lengths(nn.Module):
    """One unit per length, used whole; and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Length(numel) for numel in _LENGTHS)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.float().mean() * self.scalar
        for part in self.parts:
            x = part(x)
        return x


class _Length(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, numel))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight * self.weight).sum() / (1 + self.weight.numel())


@pytest.mark.parametrize("engine", ["direct", "buffered"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shards_of_every_odd_length(offload: MakeEngine, precision: str, engine: str) -> None:
    """#1070, #1033, HF #25816: what lies beyond the last aligned block was never written; unaligned sizes crashed."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        out: Tensor = model(ids)
        return out

    nvme = {"engine": engine}
    if precision == "fp32":
        loop = Loop(_Lengths, loss=loss, steps=3)
        assert_parity(loop, offload, nvme=nvme, host={"budget": "900KiB"}, check_traffic=False)
        return
    model: Any = build(_Lengths)
    offload(model, precision=precision, nvme=nvme, host={"budget": "900KiB"})
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    found = gathered_parameters(model)
    for name, parameter in build(_Lengths).named_parameters():
        assert torch.equal(found[name], parameter.detach().to(dtype).to(found[name].dtype)), name


# 10 ----------------------------------------------------------------------------------------------------------------


class _Flagged(nn.Module):
    """The repro of #5828 at length: layers of which a coin decides whether they run, several times in a row or not."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(layers))
        self.head = nn.Linear(48, 29)
        self.coins = random.Random(3)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for number, layer in enumerate(self.layers):
            if number % 3 != 1 or self.coins.random() < 0.5:
                x = torch.tanh(layer(x))
                if self.coins.random() < 0.2:
                    x = torch.tanh(layer(x))
        out: Tensor = self.head(x)
        return out


@pytest.mark.somewhere
@pytest.mark.parametrize("between", ["nothing", "evaluation", "generation"])
@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_random_branches_are_read_ahead(offload: MakeEngine, schedule: str, between: str) -> None:
    """#5828, #6870, #5006: a trace thrown away in every step. Here four uses in five find their bytes read ahead."""

    def run(model: Any, optimizer: torch.optim.Optimizer, engine: infinity.Engine | None) -> tuple[list[float], float]:
        losses = []
        demand = ready = 0.0
        for step in range(24):
            before = engine.metrics() if engine is not None and step >= 4 else {}
            loss = loss_of(model, batch(step))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if engine is not None and before:
                after = engine.metrics()
                demand += after["readahead/gathers_demand"] - before["readahead/gathers_demand"]
                ready += sum(
                    after[f"readahead/gathers_{name}"] - before[f"readahead/gathers_{name}"]
                    for name in ("ready", "in_flight")
                )
            with torch.no_grad():
                if between == "evaluation":
                    losses.append(loss_of(model.eval(), batch(100 + step)).item())
                    model.train()
                elif between == "generation":
                    ids = batch(200 + step, shape=(1, 2))
                    for _ in range(3):
                        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
                    losses.append(float(ids.sum()))
        return losses, ready / (ready + demand) if engine is not None else 1.0

    plain, ours = build(_Flagged), build(_Flagged)
    expected, _ = run(plain, torch.optim.AdamW(plain.parameters(), fused=True), None)
    engine = offload(ours, schedule=schedule, host={"budget": "640KiB"})
    losses, share = run(ours, infinity.AdamW(ours.parameters()), engine)
    assert losses == expected
    assert engine.plan.placement.nvme_nbytes
    assert share >= 0.8


def test_policy_and_reference_in_one_model(offload: MakeEngine) -> None:
    """LoRA with DPO (#5828 and others): adapters are switched off for the reference and on for the policy."""

    class Switched(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.adapters = nn.ModuleList(nn.Linear(37, 37, bias=False) for _ in self.blocks)
            self.is_policy = True

        def forward(self, ids: Tensor) -> Tensor:
            x: Tensor = self.embed(ids)
            for block, adapter in zip(self.blocks, self.adapters, strict=True):
                x = block(x) + adapter(x) if self.is_policy else block(x)
            out: Tensor = self.head(x)
            return out

    def loss(model: Any, ids: Tensor) -> Tensor:
        model.is_policy = False
        with torch.no_grad():
            reference = loss_of(model, ids)
        model.is_policy = True
        return nn.functional.softplus(loss_of(model, ids) - reference)

    engine = assert_parity(
        Loop(Switched, loss=loss, steps=6), offload, host={"budget": "500KiB"}, check_traffic=False
    )
    metrics = engine.metrics()
    on_demand, ahead = metrics["readahead/reads_on_demand"], metrics["readahead/reads_ahead"]
    assert ahead >= 0.8 * (ahead + on_demand)


# 13 ----------------------------------------------------------------------------------------------------------------


def test_twelve_layers_in_the_memory_of_little_more_than_one(offload: MakeEngine) -> None:
    """#3062: buffers ran out where prefetching met their number. Here a budget of bytes is all there is."""
    loop = Loop(partial(Net, blocks=12, width=64, hidden=256), steps=3)
    plan = offload(build(loop.make), schedule="overlapped", host={"budget": "64MiB"}).plan
    layer_nbytes = 4 * (2 * 64 * 256 + 256 + 3 * 64)
    budget = 12 * layer_nbytes * 4 // 10  # of parameters, gradient and state of twelve layers, what two layers have
    assert budget < plan.state_bytes // 6
    engine = assert_parity(loop, offload, schedule="overlapped", chunk="64KiB", host={"budget": budget})
    assert engine.metrics()["host/peak_bytes"] <= budget


# 15 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["overlapped", "synchronous", "deferred"])
def test_everything_below_the_threshold_of_a_unit(offload: MakeEngine, schedule: str) -> None:
    """#7703: waiting for transfers when none had been submitted ended the process."""
    settings = {"schedule": schedule, "resident_threshold": "64MiB", "host": {"budget": "2MiB"}}
    engine = assert_parity(
        Loop(lambda: nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 29))), offload, **settings
    )
    assert engine.plan.units == 1
    assert engine.metrics()["readahead/reads_ahead"] == 0


# 17 ----------------------------------------------------------------------------------------------------------------


def test_gathering_more_than_fits_says_so_and_costs_nothing(offload: MakeEngine) -> None:
    """HF #46822: gathering all parameters at once where the device holds two layers; one by one it works."""
    model = build(Net)
    engine = offload(model, device={"kind": "cpu", "budget": "100KiB"})
    with pytest.raises(infinity.DeviceOutOfMemoryError), infinity.gathered(list(model.parameters())):
        pass
    assert engine.metrics()["device/held_bytes"] == 0
    for module in (model.embed, *model.blocks):  # type: ignore[misc]
        with infinity.gathered(module), torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.01)
    assert all(bool((value == 0.01).all()) for name, value in gathered_parameters(model).items() if "head" not in name)


# 19 ----------------------------------------------------------------------------------------------------------------


def test_many_steps_and_saves_open_nothing_and_fill_nothing(offload: MakeEngine, tmp_path: Path) -> None:
    """#8075, #8003: a descriptor lost per operation, and disk space held by files without a name."""
    model = build(partial(Net, blocks=2))
    swap = tmp_path / "swap"
    swap.mkdir()
    engine = offload(model, schedule="overlapped", nvme={"paths": [swap]})
    optimizer = infinity.AdamW(model.parameters())

    def used_nbytes() -> int:
        return sum(os.stat(path).st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())

    seen = []
    for step in range(60):
        loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9:
            engine.save(tmp_path / "saved")
            seen.append((len(open_files()), used_nbytes()))
    assert len({files for files, _ in seen}) == 1
    assert max(nbytes for _, nbytes in seen) - seen[0][1] <= 64 << 10


# 25 ----------------------------------------------------------------------------------------------------------------


def test_a_gradient_crosses_the_link_once(offload: MakeEngine) -> None:
    """#4113: three crossings per gradient."""
    model = build(Net)
    engine = offload(model, schedule="synchronous", host={"budget": "64MiB"})
    optimizer = infinity.AdamW(model.parameters())
    for step in range(2):
        loss_of(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gradient_nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert [step["d2h_bytes"] for step in engine.traffic.per_step] == [gradient_nbytes] * 2


# 32 ----------------------------------------------------------------------------------------------------------------


def test_state_dicts_hold_values_or_refuse(offload: MakeEngine, tmp_path: Path) -> None:
    """#1009, peft #297 and others: files of empty tensors."""
    model = build(Net)
    offload(model)
    with pytest.raises(infinity.NotGatheredError):
        torch.save(model.state_dict(), tmp_path / "outside.pt")
    with infinity.gathered(model):
        torch.save(model.state_dict(), tmp_path / "inside.pt")
        merged = model.head.weight.detach().clone()  # type: ignore[union-attr]
    saved = torch.load(tmp_path / "inside.pt", weights_only=True)
    plain = build(Net).state_dict()
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], value) for name, value in plain.items())
    assert torch.equal(merged, plain["head.weight"])


