"""How much of a node's memory the ranks of a plan may use: what is there, less what everything else needs.

The reserves are estimates on the safe side: a CUDA context with its libraries and their workspaces takes several
hundred MiB of a device; system, interpreter and libraries take a few GiB of the host, or a tenth of a large one.
"""

from __future__ import annotations

import math

from infinity.plan.hardware import Hardware
from infinity.sizes import GIB, format_nbytes

_RESERVED_DEVICE_NBYTES = GIB
_RESERVED_HOST_NBYTES = 4 * GIB  # at least
_RESERVED_HOST_SHARE = 0.1


def device_room_nbytes(hardware: Hardware) -> int:
    """Device memory of one rank for activations and for the budget of parameters and gradients; negative: none."""
    return hardware.device_memory_nbytes - _RESERVED_DEVICE_NBYTES


def describe_device_room(hardware: Hardware) -> str:
    """In words, what a device has and what of that is not for a run."""
    memory = format_nbytes(hardware.device_memory_nbytes)
    return f"{format_nbytes(_RESERVED_DEVICE_NBYTES)} are for libraries, but the device has {memory}"


def host_room_nbytes(hardware: Hardware) -> int:
    """What one rank may use of the host memory of its node. What a CPU computes in is host memory that is taken."""
    memory = hardware.host_memory_nbytes
    left = memory - _reserved_nbytes(memory) - hardware.devices_in_host_nbytes
    return max(left, 0) // hardware.gpus


def least_host_memory_nbytes(hardware: Hardware, rank_nbytes: int) -> int:
    """Host memory of a node that leaves so much to each of its ranks."""
    share = hardware.host_share_of_devices
    fixed_nbytes = 0 if share else hardware.devices_in_host_nbytes
    needed_nbytes = rank_nbytes * hardware.gpus + fixed_nbytes
    small = (needed_nbytes + _RESERVED_HOST_NBYTES) / (1 - share)
    large = needed_nbytes / (1 - share - _RESERVED_HOST_SHARE)
    return math.ceil(max(small, large))


def describe_host_room(hardware: Hardware) -> str:
    """In words, what of the host memory of a node is not for the budgets of its ranks."""
    memory = hardware.host_memory_nbytes
    kept = (
        f"of {format_nbytes(memory)} of host memory {format_nbytes(_reserved_nbytes(memory))} are kept for the system, "
        "the interpreter and libraries"
    )
    if not hardware.devices_in_host_nbytes:
        return kept
    return f"{kept}, and the CPU computes in {format_nbytes(hardware.devices_in_host_nbytes)} of it"


def _reserved_nbytes(memory_nbytes: int) -> int:
    return max(_RESERVED_HOST_NBYTES, int(memory_nbytes * _RESERVED_HOST_SHARE))
