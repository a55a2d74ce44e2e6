"""From a node to the rates of one of its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Hardware, gpu_named
from infinity.plan.rates import collective_bytes_per_s, collective_latency_s, rank_drive, rank_speeds
from infinity.sizes import GIB

ALONE = Hardware(gpu_named("h100"), (), 64 * GIB)


def test_one_rank_has_no_collectives() -> None:
    assert collective_bytes_per_s(ALONE) is None
    assert collective_latency_s(ALONE) == 0.0


@pytest.mark.parametrize(
    ("gpu", "gpus", "nodes", "expected_s"),
    [
        ("h100", 8, 1, 8.4e-6 + 7 * 3.4e-6),
        ("rtx4090", 2, 1, 8.4e-6 + 5.7e-6),
        ("h100", 1, 4, 8.4e-6 + 3 * 14e-6),
        ("h100", 8, 64, 8.4e-6 + 448 * 3.4e-6 + 63 * 14e-6),
    ],
)
def test_a_ring_has_a_hop_less_than_ranks(gpu: str, gpus: int, nodes: int, expected_s: float) -> None:
    node = replace(ALONE, gpu=gpu_named(gpu), gpus=gpus, nodes=nodes)
    assert collective_latency_s(node) == pytest.approx(expected_s)
    assert rank_speeds(node).collective_s == collective_latency_s(node)


def test_the_slower_of_the_ways_inside_and_between_nodes_counts() -> None:
    assert collective_bytes_per_s(replace(ALONE, gpus=8)) == pytest.approx(450e9 * 8 / 7)
    assert collective_bytes_per_s(replace(ALONE, gpus=8, nodes=4)) == pytest.approx(25e9 * 4 / 3)
    over_the_link = replace(ALONE, gpu=gpu_named("rtx4090"), gpus=2, link_bytes_per_s=20e9)
    assert collective_bytes_per_s(over_the_link) == pytest.approx(20e9 * 2)


def test_ranks_of_a_node_share_its_memory_and_drives() -> None:
    assert rank_speeds(replace(ALONE, gpus=4)).dram_bytes_per_s == pytest.approx(ALONE.dram_bytes_per_s / 4)
    drive = DriveModel(8e9, 4e9, slc_nbytes=40e9, slc_write_bytes_per_s=6e9)
    assert rank_drive(drive, 1) is drive
    shared = DriveModel(2e9, 1e9, slc_nbytes=10e9, slc_write_bytes_per_s=1.5e9)
    assert rank_drive(drive, 4) == shared
