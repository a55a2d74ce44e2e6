"""Everything that is decided of an engine before anything of it is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from infinity.collectives import Collectives
from infinity.config import Config
from infinity.demand import Request
from infinity.devices.base import Device
from infinity.groups import FlatGroup, Unit
from infinity.optim.hyper import Kernel
from infinity.optim.kernel_threads import KernelThreads
from infinity.placement import Placement
from infinity.released import Access
from storage.drives import WrapBackend


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The plan of one engine. Made by `infinity.assemble`, carried out by `infinity.allocate`.

    Attributes:
        request: what the placement was made from.
        collectives: with several ranks.
        nvme_budget_nbytes: this process's part of it; None where there is no limit.
        wrap_backend: the user's; see `infinity.offload`.
    """

    model: nn.Module
    config: Config
    access: Access
    placement: Placement
    request: Request
    units: Sequence[Unit]
    groups: Sequence[FlatGroup]
    kernel: Kernel
    threads: KernelThreads
    device: Device
    collectives: Collectives | None = None
    nvme_budget_nbytes: int | None = None
    wrap_backend: WrapBackend | None = None
