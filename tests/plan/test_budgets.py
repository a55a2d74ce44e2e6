"""What ranks may use of the memory of their node."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from infinity.errors import PlacementError
from infinity.plan.budgets import describe_host_room, device_room_nbytes, host_room_nbytes, least_host_memory_nbytes
from infinity.plan.hardware import CPU, Hardware, gpu_named
from infinity.plan.planner import make_plan, plan_rank
from infinity.sizes import GIB, MIB
from tests.plan.test_advice import model, request

GPU_NODE = Hardware(gpu_named("rtx4090"), (), 64 * GIB)
CPU_NODE = Hardware(CPU, (), 64 * GIB, has_gpu=False)


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("memory", [8 * GIB, 20 * GIB, 40 * GIB, 64 * GIB, 2048 * GIB])
@pytest.mark.parametrize("given", [0, GIB])
def test_what_a_cpu_computes_in_is_not_given_to_the_host_as_well(gpus: int, memory: int, given: int) -> None:
    node = replace(CPU_NODE, gpus=gpus, host_memory_nbytes=memory, gpu=replace(CPU, memory_nbytes=given))
    assert gpus * (node.device_memory_nbytes + host_room_nbytes(node)) <= memory
    assert node.device_memory_nbytes == (given or memory // 4 // gpus)


def test_a_gpu_has_memory_of_its_own() -> None:
    assert GPU_NODE.devices_in_host_nbytes == 0
    assert host_room_nbytes(GPU_NODE) == 64 * GIB - int(64 * GIB * 0.1)
    assert host_room_nbytes(replace(GPU_NODE, gpus=2, host_memory_nbytes=20 * GIB)) == 8 * GIB
    assert host_room_nbytes(replace(GPU_NODE, host_memory_nbytes=3 * GIB)) == 0
    assert device_room_nbytes(GPU_NODE) == 23 * GIB


@pytest.mark.parametrize("node", [GPU_NODE, CPU_NODE, replace(CPU_NODE, gpu=replace(CPU, memory_nbytes=5 * GIB))])
@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("rank_nbytes", [MIB, 3 * GIB, 100 * GIB])
def test_the_least_memory_of_a_node_leaves_what_its_ranks_need(node: Hardware, gpus: int, rank_nbytes: int) -> None:
    node = replace(node, gpus=gpus)
    least = least_host_memory_nbytes(node, rank_nbytes)
    assert host_room_nbytes(replace(node, host_memory_nbytes=least)) >= rank_nbytes
    assert host_room_nbytes(replace(node, host_memory_nbytes=least - 4096)) < rank_nbytes


def test_what_is_kept_is_told() -> None:
    assert "64 GiB of host memory 6.4 GiB are kept" in describe_host_room(GPU_NODE)
    assert "the CPU computes in 16 GiB of it" in describe_host_room(CPU_NODE)


def test_the_largest_batch_that_is_told_fits_and_no_larger_one() -> None:
    wanted = request(device_nbytes=GIB + 256 * MIB, drive="3:2", batch=64)
    with pytest.raises(PlacementError, match=r"Use a smaller batch \(\d+ at most\)") as refused:
        make_plan(wanted)
    found = re.search(r"\((\d+) at most\)", str(refused.value))
    assert found is not None
    largest = int(found[1])
    room = device_room_nbytes(wanted.hardware)
    needs = [replace(wanted, workload=replace(wanted.workload, batch=largest + more)) for more in (0, 1)]
    assert needs[0].activation_nbytes < room <= needs[1].activation_nbytes


@pytest.mark.parametrize("device_nbytes", [512 * MIB, GIB, GIB + MIB])
def test_a_device_that_is_too_small_for_any_batch_is_told_as_such(device_nbytes: int) -> None:
    with pytest.raises(PlacementError, match="Even a batch of 1 needs"):
        plan_rank(request(device_nbytes=device_nbytes, drive="3:2", batch=4))


def test_more_memory_of_a_cpu_helps_its_device_too() -> None:
    small = replace(request(), hardware=replace(CPU_NODE, host_memory_nbytes=8 * GIB))
    large = replace(small, hardware=replace(CPU_NODE, host_memory_nbytes=16 * GIB))
    assert small.model is large.model is model()
    before, after = (plan_rank(each).placement for each in (small, large))
    assert after.device_budget_nbytes == before.device_budget_nbytes + 2 * GIB
