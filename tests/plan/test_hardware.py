"""Hardware from options, tables and bench files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infinity.errors import ConfigError
from infinity.plan.hardware import (
    CPU,
    DRIVES,
    GPUS,
    Hardware,
    effective_link,
    from_bench,
    gpu_named,
    parse_drives,
    parse_link,
)
from infinity.sizes import GIB


def test_every_figure_of_the_tables_has_a_source() -> None:
    assert all(gpu.source for gpu in GPUS.values())
    assert all(drive.source for drive in DRIVES.values())


def test_a_drive_is_rates_capacity_and_endurance() -> None:
    (drive,) = parse_drives(["7.0:3.4:4TB:2400TBW"])
    assert (drive.model.read_bytes_per_s, drive.model.write_bytes_per_s) == (7.0e9, 3.4e9)
    assert (drive.capacity_nbytes, drive.endurance_nbytes) == (4 * 10**12, 2400 * 10**12)
    (short,) = parse_drives(["7:2.5"])
    assert (short.capacity_nbytes, short.endurance_nbytes) == (0, 0)


def test_several_drives_and_names() -> None:
    assert parse_drives(["4x990pro-4tb", "7:3"])[:4] == (DRIVES["990pro-4tb"],) * 4
    assert len(parse_drives(["4x990pro-4tb", "7:3"])) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7.0", "allowed: READ:WRITE"),
        ("990pro-2tb", "did you mean '990pro-4tb'"),
        ("a:b", "could not convert"),
        ("0:1", "must be positive"),
        ("1:1:4T", "unknown unit"),
        ("1:1:4TB:1TB:1", "too many parts"),
        ("0x7:3", "allowed: READ:WRITE"),
        ("nan:3", "must be positive"),
        ("7:inf", "must be positive"),
        ("1e300:1", "must be positive"),
        ("-7:3", "must be positive"),
        ("7:", "could not convert"),
        (":", "could not convert"),
        ("99999999999x7:3", "1024 drives at most"),
        ("", "allowed: READ:WRITE"),
    ],
)
def test_drives_that_are_not_understood(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_drives([text])


def test_a_link_is_a_rate_or_a_name() -> None:
    assert parse_link("25") == 25e9
    assert parse_link("pcie4-x16") == effective_link(GPUS["rtx4090"]) == pytest.approx(25.2e9)
    assert parse_link("PCIe5-x8") == parse_link("pcie4-x16") == 2 * parse_link("pcie3-x16")
    for text, message in (
        ("pcie6", "allowed: GB/s such as 25, or pcie3-x16"),
        ("0", "greater than 0"),
        ("nan", "than 0"),
        ("inf", "than 0"),
        ("1e300", "than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_link(text)


def test_unknown_gpus_are_refused_with_the_nearest() -> None:
    assert gpu_named("RTX4090").memory_nbytes == 24 * GIB
    with pytest.raises(ConfigError, match="did you mean 'rtx4090'"):
        gpu_named("rtx4091")


def job(directory: str, read: float, write: float) -> dict[str, Any]:
    return {"job options": {"filename": directory}, "read": {"bw_bytes": read}, "write": {"bw_bytes": write}}


def rate(name: str, alone: float, beside: float | None) -> dict[str, Any]:
    beside_disk = None if beside is None else {"median": beside}
    return {"name": name, "unit": "parameters/s", "alone": {"median": alone}, "beside_disk": beside_disk}


def test_a_bench_file_gives_drives_optimizer_and_memory(tmp_path: Path) -> None:
    jobs = [job("/a", 3e9, 0), job("/a", 2e9, 0), job("/a", 0, 1e9), job("/a", 1.5e9, 0.5e9), job("/a:/b", 9e9, 0)]
    rates = [rate("AdamW bf16", 1e8, 9e7), rate("AdamW bf16", 4e8, 2e8), rate("AdamW fp32", 1.0, None)]
    rates += [rate("host memory copy", 9e9, None), rate("host memory copy", 1.5e10, 1e10)]
    report = {"jobs": jobs, "memory": {"rates": rates}, "machine": {"memory_bytes": 8 * GIB}}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report))
    base = Hardware(GPUS["rtx4090"], (), GIB)
    hardware = from_bench(path, base)
    (drive,) = hardware.drives
    assert (drive.model.read_bytes_per_s, drive.model.write_bytes_per_s) == (3e9, 1e9)
    assert drive.model.duplex == 0.0  # half and half of both
    assert hardware.optimizer_s == 1 / 2e8
    assert hardware.host_memory_nbytes == 8 * GIB
    assert hardware.dram_bytes_per_s == 2e10  # each byte is read and written


def test_a_cpu_has_its_share_of_the_memory_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"jobs": [], "machine": {"memory_bytes": 8 * GIB}}))
    assert from_bench(path, Hardware(CPU, (), 64 * GIB, has_gpu=False)).device_memory_nbytes == 2 * GIB


def test_a_drive_that_reads_and_writes_at_full_rate_together_is_duplex(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"jobs": [job("/a", 3e9, 0), job("/a", 0, 1e9), job("/a", 3e9, 1e9)]}))
    (drive,) = from_bench(path, Hardware(GPUS["rtx4090"], (), GIB)).drives
    assert drive.model.duplex == 1.0
    assert drive.model.seconds(3e9, 1e9) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "not what `infinity bench tier"),
        ("[]", "bench tier"),
        ('{"jobs": [{"read": {}}]}', "KeyError: 'job options'"),
        ('{"jobs": 1}', "TypeError"),
        ('{"jobs": [], "memory": {"rates": [{"name": "AdamW bf16", "alone": {"median": 0}}]}}', "AdamW bf16 is 0"),
        ('{"jobs": [], "memory": {"rates": [{"name": "host to device", "alone": {"median": 0}}]}}', "device is 0"),
        ('{"jobs": [], "memory": {"rates": [{"name": "host memory copy", "alone": {"median": NaN}}]}}', "copy is nan"),
        ('{"jobs": [], "memory": {"rates": ["AdamW bf16"]}}', "bench tier"),
        ('{"jobs": [], "memory": [1]}', "AttributeError"),
        ('{"jobs": [], "machine": {"memory_bytes": -1}}', "memory_bytes is -1"),
        ('{"jobs": [], "machine": {"memory_bytes": 1e999}}', "memory_bytes is inf"),
        ('{"jobs": ["a"]}', "TypeError"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_bench(path, Hardware(GPUS["rtx4090"], (), GIB))
    with pytest.raises(ConfigError, match="cannot be read"):
        from_bench(tmp_path / "none.json", Hardware(GPUS["rtx4090"], (), GIB))
