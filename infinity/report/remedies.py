"""What removes a stall, by its cause: the same advice as docs/tuning.md gives."""

from __future__ import annotations

from collections.abc import Mapping

REMEDIES: Mapping[str, str] = {
    "nvme_read": "larger batches or micro_batches, more host memory, another drive, state_format='int8'",
    "nvme_write": "a drive that writes faster, more host memory",
    "optimizer": "schedule='deferred' where host memory holds all gradients, more optimizer_threads",
    "gradient_space": "a larger host budget; schedule='overlapped' without accumulation and clipping",
    "gradient_read": "a host budget that holds the gradients: 4 bytes per parameter",
    "activation": "a larger host budget, or recomputing instead of keeping activations",
    "link": "pinned memory (host.pin), a device budget that keeps more",
    "commit": "drives that sync faster; durability='checkpoint' if steps need not survive",
    "save": "save less often, or to the drive of the swap files, where bytes can be shared",
    "ranks": "ranks with equal batches and drives",
}


def remedy_of(cause: str) -> str:
    """One line; empty for a cause that has none."""
    return REMEDIES.get(cause, "")
