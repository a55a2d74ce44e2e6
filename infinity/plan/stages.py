"""What the stages of ZeRO hold and send: the textbook figures, for any model and number of ranks.

Mixed-precision Adam holds 16 bytes per parameter: 2 of the 16-bit parameter, 2 of its gradient, and 12 of optimizer
state (fp32 master and two moments). Stage 1 divides the state between the ranks, stage 2 the gradients too, stage 3
the parameters as well (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5 and figure 1). A step sends 2 numbers per parameter and rank, a reduce-scatter and an all-gather; stage 3
gathers the parameters once more (section 7). Offloading (ZeRO-Offload, ZeRO-Infinity) moves the parts of stage 3 to the
host or to drives; the device keeps what one unit needs.
"""

from __future__ import annotations

from dataclasses import dataclass

PARAM_NBYTES = 2
GRAD_NBYTES = 2
STATE_NBYTES = 12


@dataclass(frozen=True, slots=True)
class StageRow:
    """One way to divide a model. Bytes of one rank, model state only, without activations.

    Attributes:
        sent_numel: numbers that a rank sends in a step, when there is more than one.
        link_nbytes: bytes between host and device in a step.
        nvme_read_nbytes, nvme_write_nbytes: on its drives in a step.
    """

    name: str
    device_nbytes: float
    host_nbytes: float = 0.0
    drive_nbytes: float = 0.0
    sent_numel: float = 0.0
    link_nbytes: float = 0.0
    nvme_read_nbytes: float = 0.0
    nvme_write_nbytes: float = 0.0


def stage_rows(parameters: int, ranks: int, *, largest_unit: int) -> list[StageRow]:
    """Data parallelism, stages 1 to 3, and stage 3 with everything in host memory or on drives.

    Args:
        parameters: of the model, all of which train.
        ranks: among which it is divided.
        largest_unit: parameters of the largest unit, which an offloaded rank holds on the device with its gradient.

    Raises:
        ValueError: a number is not positive.
    """
    if parameters <= 0 or ranks <= 0 or largest_unit <= 0:
        raise ValueError("parameters, ranks and largest_unit must be positive")
    p, n = float(parameters), float(ranks)
    sent = 0.0 if ranks == 1 else p
    unit = largest_unit * (PARAM_NBYTES + GRAD_NBYTES)
    everything = (PARAM_NBYTES + GRAD_NBYTES + STATE_NBYTES) * p
    # Parameters go up for forward and for backward, gradients come down: each rank its part, the rest is gathered.
    link = (2 * PARAM_NBYTES + GRAD_NBYTES) * p / n
    return [
        StageRow("data parallel", everything, sent_numel=2 * sent),
        StageRow("stage 1", (PARAM_NBYTES + GRAD_NBYTES) * p + STATE_NBYTES * p / n, sent_numel=2 * sent),
        StageRow("stage 2", PARAM_NBYTES * p + (GRAD_NBYTES + STATE_NBYTES) * p / n, sent_numel=2 * sent),
        StageRow("stage 3", everything / n, sent_numel=3 * sent),
        StageRow("stage 3, host", unit, everything / n, sent_numel=3 * sent, link_nbytes=link),
        # The split master: 2 of parameter, which is also half of the master, 2 of its rest, 8 of moments.
        StageRow(
            "stage 3, NVMe",
            unit,
            0.0,
            12 * p / n,
            sent_numel=3 * sent,
            link_nbytes=link,
            nvme_read_nbytes=14 * p / n,
            nvme_write_nbytes=12 * p / n,
        ),
    ]
