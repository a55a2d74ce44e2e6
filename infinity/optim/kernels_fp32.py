"""AdamW on fp32 parameters: the operation `torch.optim.AdamW(fused=True)` runs, on views of a chunk."""

from infinity.optim.forms import WholeMaster
from infinity.optim.rules import AdamWRule


class FusedAdamW(WholeMaster):
    """`Kernel` for fp32; bit for bit `torch.optim.AdamW(fused=True)` on the CPU, however the chunks are cut.

    torch releases the GIL inside and uses its own intra-operation threads.
    """

    def __init__(self) -> None:
        super().__init__(AdamWRule())
