"""The textbook figures of ZeRO (Rajbhandari et al., section 5, figure 1 and section 7)."""

from __future__ import annotations

import pytest

from infinity.plan.stages import StageRow, stage_rows

GB = 1e9


def rows(parameters: float, ranks: int) -> dict[str, StageRow]:
    return {row.name: row for row in stage_rows(int(parameters), ranks, largest_unit=10**8)}


def device_gb(parameters: float, ranks: int, name: str) -> float:
    return rows(parameters, ranks)[name].device_nbytes / GB


def test_one_and_a_half_billion_parameters_hold_24_gb_for_3_gb_of_weights() -> None:
    assert device_gb(1.5e9, 1, "data parallel") == 24.0
    assert 2 * 1.5e9 / GB == 3.0


@pytest.mark.parametrize(
    ("name", "expected"), [("data parallel", 120.0), ("stage 1", 31.4), ("stage 2", 16.6), ("stage 3", 1.9)]
)
def test_seven_and_a_half_billion_parameters_on_64_ranks(name: str, expected: float) -> None:
    assert round(device_gb(7.5e9, 64, name), 1) == expected


def test_more_than_eight_billion_parameters_on_64_ranks() -> None:
    assert round(device_gb(8.3e9, 64, "data parallel")) == 133
    assert round(device_gb(8.3e9, 64, "stage 1")) == 35


def test_communication_is_two_and_three_numbers_per_parameter() -> None:
    parameters = 7.5e9
    sent = {name: row.sent_numel / parameters for name, row in rows(parameters, 64).items()}
    assert sent == {
        "data parallel": 2,
        "stage 1": 2,
        "stage 2": 2,
        "stage 3": 3,
        "stage 3, host": 3,
        "stage 3, NVMe": 3,
    }


def test_one_rank_sends_nothing() -> None:
    assert all(row.sent_numel == 0 for row in rows(1e9, 1).values())


def test_offloading_leaves_one_unit_on_the_device() -> None:
    table = rows(7.5e9, 64)
    assert table["stage 3, host"].device_nbytes == table["stage 3, NVMe"].device_nbytes == 4e8
    assert table["stage 3, host"].host_nbytes == table["stage 3"].device_nbytes
    # 14 read and 12 written for each parameter (ARCHITECTURE section 6).
    assert table["stage 3, NVMe"].nvme_read_nbytes * 64 == 14 * 7.5e9
    assert table["stage 3, NVMe"].nvme_write_nbytes * 64 == 12 * 7.5e9


@pytest.mark.parametrize(("parameters", "ranks", "largest"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_numbers_that_make_no_sense_are_refused(parameters: int, ranks: int, largest: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        stage_rows(parameters, ranks, largest_unit=largest)
