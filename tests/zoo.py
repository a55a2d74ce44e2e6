"""Small models of every awkward kind, and plain training loops to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block with odd sizes."""

    def __init__(self, width: int = 37, hidden: int = 53) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    """Embedding, blocks, head. `checkpointing`: None, "nr" (non-reentrant), "re" (reentrant), "span", "nested"."""

    def __init__(
        self,
        *,
        blocks: int = 4,
        width: int = 37,
        hidden: int = 53,
        vocab: int = 29,
        checkpointing: str | None = None,
        tied: bool = False,
        repeat: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, vocab, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.checkpointing = checkpointing
        self.repeat = repeat
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(ids))
        if self.checkpointing in ("span", "nested"):
            x = checkpoint(self._span, x, use_reentrant=False)
        else:
            for block in self.blocks:
                for _ in range(self.repeat):
                    x = self._run(block, x)
        out: torch.Tensor = self.head(x)
        return out

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing in ("nr", "re"):
            return checkpoint(block, x, use_reentrant=self.checkpointing == "re")  # type: ignore[no-any-return]
        return block(x)  # type: ignore[no-any-return]

    def _span(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing == "nested" else block(x)
        return x


def batch(step: int, *, vocab: int = 29, shape: tuple[int, int] = (3, 11)) -> torch.Tensor:
    """A deterministic batch of token ids."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, shape, generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same values every time."""
    torch.manual_seed(seed)
    return make()
