"""From the hardware of a node to how fast things are for one of its ranks, all of which behave alike."""

from __future__ import annotations

from dataclasses import replace

from infinity.plan.drives import DriveModel
from infinity.plan.hardware import Hardware
from infinity.plan.scenario import Speeds

# Latencies of a ring in its protocol for large messages: to begin with, and of every hop over NVLink, over the host's
# bus, and between nodes. Source: NCCL's own model, by which it chooses its algorithms (src/graph/tuning.cc of 2.18 and
# later, `baseLat` and `hwLat` of "Ring" and "Simple").
_BEGIN_S = 8.4e-6
_PEER_HOP_S = 3.4e-6
_BUS_HOP_S = 5.7e-6
_NETWORK_HOP_S = 14.0e-6


def rank_speeds(hardware: Hardware) -> Speeds:
    """How fast everything around the device of one rank is."""
    collective = collective_bytes_per_s(hardware)
    return Speeds(
        h2d_bytes_per_s=hardware.link_bytes_per_s,
        d2h_bytes_per_s=hardware.link_bytes_per_s,
        kernel_s=hardware.optimizer_s,
        is_async=hardware.has_gpu,
        gather_bytes_per_s=collective,
        reduce_bytes_per_s=collective,
        collective_s=collective_latency_s(hardware),
        dram_bytes_per_s=hardware.dram_bytes_per_s / hardware.gpus,
        hand_over_s=hardware.hand_over_s,
        contention=hardware.contention,
    )


def collective_bytes_per_s(hardware: Hardware) -> float | None:
    """Rate of an all-gather or reduce-scatter of a whole unit: the slower of the way inside and between nodes.

    In a ring each rank takes in (N - 1) / N of the whole; between nodes each node takes in its part once. None where
    there is one rank.
    """
    ranks, nodes = hardware.ranks, hardware.nodes
    if ranks == 1:
        return None
    peer = hardware.gpu.peer_bytes_per_s or hardware.link_bytes_per_s
    inside_s = (ranks - 1) / ranks / peer if hardware.gpus > 1 else 0.0
    between_s = (nodes - 1) / nodes / hardware.network_bytes_per_s
    return 1.0 / max(inside_s, between_s)


def collective_latency_s(hardware: Hardware) -> float:
    """Seconds of an all-gather or reduce-scatter of next to nothing: a ring of N ranks has N - 1 hops.

    Of these, as many as there are nodes, less one, are between nodes.
    """
    if hardware.ranks == 1:
        return 0.0
    hop_s = _BUS_HOP_S if hardware.gpu.peer_bytes_per_s is None else _PEER_HOP_S
    return _BEGIN_S + (hardware.ranks - hardware.nodes) * hop_s + (hardware.nodes - 1) * _NETWORK_HOP_S


def rank_drive(model: DriveModel, gpus: int) -> DriveModel:
    """What each of several ranks that behave alike gets of a drive of their node."""
    if gpus == 1:
        return model
    return replace(
        model,
        read_bytes_per_s=model.read_bytes_per_s / gpus,
        write_bytes_per_s=model.write_bytes_per_s / gpus,
        slc_nbytes=model.slc_nbytes / gpus,
        slc_write_bytes_per_s=model.slc_write_bytes_per_s / gpus,
    )
