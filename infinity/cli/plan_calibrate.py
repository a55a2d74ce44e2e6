"""`infinity plan --calibrate`: measure this machine, keep what was found, show it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from infinity.bench.machine import describe_machine
from infinity.cli.plan_options import PlanOptions
from infinity.errors import ConfigError
from infinity.plan.calibration import CalibrationFile, MachineCalibration
from infinity.plan.measure import calibrate_machine
from infinity.sizes import MIB
from infinity.swap_directories import default_directory


def calibrate(options: PlanOptions, console: Console) -> dict[str, Any]:
    """Measure, keep, show; what was found is returned for --json.

    Raises:
        ConfigError: a folder does not exist, or the result cannot be kept.
        StorageError: a drive cannot be measured.
    """
    directories = options.nvme or (default_directory(),)
    for directory in directories:
        if not directory.is_dir():
            what = "not a directory" if directory.exists() else "there is no such directory"
            raise ConfigError(f"--nvme {directory}: {what}")
    machine = describe_machine()
    if machine["load"] > machine["cores"] / 2:
        console.print(
            f"{machine['load']:g} processes are busy on {machine['cores']} cores: the figures will be those of a "
            "machine that does other things as well. Calibrate again when it is quiet",
            style="yellow",
        )
    with console.status("measuring") as status:
        found = calibrate_machine(directories, lambda what: status.update(f"measuring: {what}".replace("[", r"\[")))
    file = CalibrationFile(machine)
    file.save(found)
    console.print(_table(found))
    console.print(found.describe(), markup=False, soft_wrap=True)
    kept = f"kept in {file.path}; `infinity plan` without hardware options uses it"
    console.print(kept, markup=False, soft_wrap=True)
    return asdict(found) | {"path": str(file.path)}


def _table(found: MachineCalibration) -> Table:
    alone, factors = found.alone, found.corrections
    table = Table("", title="This machine", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("alone", "in a run"):
        table.add_column(column, justify="right")
    rows = [
        ("computing", f"{alone.flops_per_s / 1e9:,.1f} GFLOPS", factors.compute),
        ("overhead of a unit", f"{alone.unit_s * 1e6:,.0f} us", factors.compute),
        ("optimizer", f"{1e-6 / alone.optimizer_s:,.0f} M parameters/s", factors.optimizer),
        ("host memory copy", f"{alone.copy_bytes_per_s / 1e9:,.1f} GB/s", None),
    ]
    for name, drive in alone.drives.items():
        rows.append((f"{name} read", f"{drive.read_bytes_per_s / 1e9:,.2f} GB/s", factors.read))
        rows.append((f"{name} written", f"{drive.write_bytes_per_s / 1e9:,.2f} GB/s", factors.write))
    for name, value, factor in rows:
        table.add_row(name, value, "" if factor is None else f"{factor:.2f} x the time")
    table.add_row("hand-over between threads", "", f"{found.hand_over_s * 1e6:,.0f} us")
    if not found.has_gpu:
        lost_s = found.contention.transfers_s(1, MIB)
        table.add_row("computing loses to each MiB beside it", "", f"{lost_s * 1e6:,.0f} us")
    for residual in found.residuals:
        predicted = f"{residual.predicted_s:.3f} s predicted"
        table.add_row(f"a step, {residual.what}", predicted, f"{residual.measured_s:.3f} s ({residual.error:+.1%})")
    return table
