"""What was measured of this machine, and how predictions from it have turned out.

A calibration holds what each resource gives alone, and a correction for each: how much longer the same work takes in a
training run, where everything goes on at once. Plans of this machine use rates that are corrected so. What is left, the
difference between predicted and measured steps, is a residual: it is kept and shown, and nothing is fitted to it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from infinity.errors import ConfigError
from infinity.plan.contention import NO_CONTENTION, Contention
from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Drive, Gpu, Hardware
from infinity.plan.ledger import state_folder
from infinity.replacing import replaced_file

_log = logging.getLogger(__name__)
_MACHINE_ID = Path("/etc/machine-id")
_IDENTITY = ("cpu", "cores", "memory_bytes")


@dataclass(frozen=True, slots=True)
class Alone:
    """What each resource gives when nothing else goes on.

    Attributes:
        flops_per_s, unit_s: of a transformer block, time = `unit_s` + operations / `flops_per_s`, fitted to sizes.
        optimizer_s: seconds of AdamW in bf16 for one element, with all threads.
        copy_bytes_per_s: of host memory, with all threads; each byte is read once and written once.
        link_bytes_per_s: between host and device; on a machine without a GPU the copy of one thread.
        drives: by directory, reading alone and writing alone.
    """

    flops_per_s: float
    unit_s: float
    optimizer_s: float
    copy_bytes_per_s: float
    link_bytes_per_s: float
    drives: dict[str, DriveModel]

    def __post_init__(self) -> None:
        _refuse_not_positive(
            flops_per_s=self.flops_per_s,
            optimizer_s=self.optimizer_s,
            copy_bytes_per_s=self.copy_bytes_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
        )
        if not 0 <= self.unit_s < math.inf:
            raise ValueError(f"unit_s is {self.unit_s}, and should be 0 or more")


@dataclass(frozen=True, slots=True)
class Corrections:
    """Seconds in a run over seconds alone, for the same work. Above 1: slower in a run."""

    compute: float
    optimizer: float
    read: float
    write: float

    def __post_init__(self) -> None:
        _refuse_not_positive(**asdict(self))


@dataclass(frozen=True, slots=True)
class Residual:
    """A predicted step beside the measured one. `what` tells which run it was."""

    what: str
    predicted_s: float
    measured_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # looked at when a file is read
    made: str

    @property
    def error(self) -> float:
        """Relative: above 0 the prediction was too long."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class MachineCalibration:
    """A calibrated machine. `machine` and `versions` say which it was, and of what software; `made` is in UTC.

    `device_memory_nbytes` is a GPU's own; `hand_over_s` and `contention` are those of
    `infinity.plan.scenario.Speeds`, in a run.
    """

    machine: dict[str, Any]
    made: str
    versions: dict[str, str]
    device: str
    has_gpu: bool
    device_memory_nbytes: int
    alone: Alone
    corrections: Corrections
    residuals: tuple[Residual, ...]
    hand_over_s: float = 0.0
    contention: Contention = NO_CONTENTION

    def __post_init__(self) -> None:
        memory_nbytes = self.machine.get("memory_bytes")
        if not isinstance(memory_nbytes, int) or memory_nbytes <= 0:
            raise ValueError(f"memory_bytes of the machine is {memory_nbytes!r}, and should be greater than 0")
        if self.has_gpu:
            _refuse_not_positive(device_memory_nbytes=self.device_memory_nbytes)
        if not 0 <= self.hand_over_s < math.inf:
            raise ValueError(f"hand_over_s is {self.hand_over_s}, and should be 0 or more")

    def hardware(self) -> Hardware:
        """This machine for the planner, as it is in a run."""
        alone, factors = self.alone, self.corrections
        source = f"measured here on {self.made[:10]}"
        gpu = Gpu(
            name=self.device,
            memory_nbytes=self.device_memory_nbytes if self.has_gpu else 0,
            flops_per_s=alone.flops_per_s / factors.compute,
            link_bytes_per_s=alone.link_bytes_per_s,
            peer_bytes_per_s=None,
            source=source,
        )
        return Hardware(
            gpu=gpu,
            drives=tuple(Drive(name, self._in_a_run(drive), source=source) for name, drive in alone.drives.items()),
            host_memory_nbytes=int(self.machine["memory_bytes"]),
            efficiency=1.0,
            unit_s=alone.unit_s * factors.compute,
            hand_over_s=self.hand_over_s,
            contention=self.contention,
            link_bytes_per_s=alone.link_bytes_per_s,
            dram_bytes_per_s=2 * alone.copy_bytes_per_s,
            optimizer_s=alone.optimizer_s * factors.optimizer,
            has_gpu=self.has_gpu,
            notes=(self.describe(),),
        )

    def _in_a_run(self, drive: DriveModel) -> DriveModel:
        """The corrections are of each direction beside the other, so both go on at once."""
        return replace(
            drive,
            read_bytes_per_s=drive.read_bytes_per_s / self.corrections.read,
            write_bytes_per_s=drive.write_bytes_per_s / self.corrections.write,
            duplex=1.0,
        )

    def describe(self) -> str:
        """One line: when, how much slower everything is in a run than alone, and how well predictions did."""
        factors = ", ".join(f"{name} x{value:.2f}" for name, value in asdict(self.corrections).items())
        errors = sorted(abs(residual.error) for residual in self.residuals)
        worst = f"; predictions since then missed by {errors[len(errors) // 2]:.1%} (median of {len(errors)})"
        software = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"calibrated on this machine on {self.made[:10]} with {software}; time in a run over time alone: {factors}"
            + (worst if errors else "")
        )


def _refuse_not_positive(**values: float) -> None:
    """Files of calibrations can be edited and damaged; what is divided by has to be there."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}, and should be greater than 0")


def now() -> str:
    """The moment, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine_id(machine: Mapping[str, Any]) -> str:
    """The same for the same installation, processor, cores, memory and GPU."""
    try:
        installed = _MACHINE_ID.read_text().strip()
    except OSError:
        installed = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return xxhash.xxh3_64_hexdigest(repr([installed, gpu, *(machine.get(name) for name in _IDENTITY)]).encode())


class CalibrationFile:
    """The calibration of one machine in the user's folder for state, and beside it a line for every prediction since.

    Args:
        machine: as `infinity.bench.machine.describe_machine` gives it.
        folder: default: `infinity/machines` in the folder for state.
    """

    def __init__(self, machine: Mapping[str, Any], folder: Path | None = None) -> None:
        folder = state_folder() / "machines" if folder is None else folder
        name = machine_id(machine)
        self.path = folder / f"{name}.json"
        self._residuals = folder / f"{name}.residuals.jsonl"

    def load(self) -> MachineCalibration | None:
        """What was measured, with all residuals since; None where this machine has not been calibrated.

        Raises:
            ConfigError: the file is there and damaged.
        """
        try:
            found = TypeAdapter(MachineCalibration).validate_json(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            what = " ".join(str(error).partition("For further")[0].split())
            raise ConfigError(f"{self.path} cannot be read ({what}); run `infinity plan --calibrate` again") from error
        return replace(found, residuals=(*found.residuals, *self._since(found.made)))

    def save(self, calibration: MachineCalibration) -> None:
        """Replace the file as a whole.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(self.path) as file:
                file.write(json.dumps(asdict(calibration), indent=2) + "\n")
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror or error}. Set XDG_STATE_HOME to a folder you can "
                "write to"
            ) from error

    def note(self, residual: Residual) -> None:
        """Keep how a prediction turned out. A file that cannot be written is told, and no reason to fail a run."""
        try:
            self._residuals.parent.mkdir(parents=True, exist_ok=True)
            with self._residuals.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(residual)) + "\n")  # one write: lines of several processes stay whole
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._residuals, error)

    def _since(self, made: str) -> Sequence[Residual]:
        """Predictions after a calibration; a line that is damaged counts as not there."""
        try:
            lines = self._residuals.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()
        found = []
        for line in lines:
            try:
                found.append(TypeAdapter(Residual).validate_json(line))
            except ValidationError:
                _log.warning("%s has a damaged line: %.80s", self._residuals, line)
        return [residual for residual in found if residual.made >= made]
