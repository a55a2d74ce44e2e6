"""Small models of every awkward kind, and plain training loops to compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A residual block with odd sizes."""

    def __init__(self, width: int = 37, hidden: int = 53) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
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
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Steps `first` to `last` (excluded) of a loop; their losses."""
    losses = []
    for step in range(first, last):
        loss = loss_of(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with the same values every time."""
    torch.manual_seed(seed)
    return make()


class Attention(nn.Module):
    """Reads weights of a child that is never called: `nn.MultiheadAttention.out_proj`."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 40, dropout=0.1, batch_first=True) for _ in range(blocks)
        )
        self.single = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = x + self.single(x, x, x, need_weights=False)[0]
        out: torch.Tensor = self.head(x)
        return out


class Adapted(nn.Module):
    """A frozen projection with a trained low-rank adapter beside it; the frozen part may have another dtype."""

    def __init__(self, width: int, frozen_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=frozen_dtype)
        self.base.requires_grad_(False)
        self.a = nn.Linear(width, 3, bias=False)
        self.b = nn.Linear(3, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x))
        return x + functional.gelu(y)


class Frozen(nn.Module):
    """Units that train in part, one that does not train at all, and a parameter of integers."""

    def __init__(
        self,
        width: int = 37,
        frozen_dtype: torch.dtype = torch.float32,
        blocks: int = 3,
        *,
        trains_embedding: bool = True,  # otherwise no backward reaches it
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.embed.requires_grad_(trains_embedding)
        self.order = nn.Parameter(torch.randperm(width), requires_grad=False)
        self.blocks = nn.ModuleList(Adapted(width, frozen_dtype) for _ in range(blocks))
        self.whole = Block(width)
        self.whole.requires_grad_(False)
        self.head = nn.Linear(width, 29, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)[..., self.order]
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.whole(x))
        return out


class Odd(nn.Module):
    """Parameters without dimensions, without elements, and with one element; a frozen one beside them."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.shift = nn.Parameter(torch.randn(width), requires_grad=False)
        self.line = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.line(x) * self.scale + self.one + self.shift + self.empty.sum()
        return x + y


class OddNet(nn.Module):
    """A net of `Odd` blocks, with a scalar of its own at the top."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.embed = nn.Embedding(29, width)
        self.blocks = nn.ModuleList(Odd(width) for _ in range(3))
        self.head = nn.Linear(width, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x) * self.temperature
        return out


class Skipping(Net):
    """Leaves out a block, another one every time; the last block is never used."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        skipped = self.calls % 4  # 3 is the unused block: nothing else is left out then
        self.calls += 1
        x = self.embed(ids)
        for number, block in enumerate(list(self.blocks)[:3]):
            if number != skipped:
                x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Outer(nn.Module):
    """A unit with parameters of its own around another unit."""

    def __init__(self, width: int = 37, checkpointing: str | None = None) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(width, width) / width)
        self.inner = nn.ModuleList(Block(width) for _ in range(2))
        self.after = nn.Parameter(torch.randn(width, width) / width)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.before
        for block in self.inner:
            if self.checkpointing is None:
                y = block(y)
            else:
                y = checkpoint(block, y, use_reentrant=self.checkpointing == "re")
        return x + y @ self.after


class Nested(nn.Module):
    """Units inside units."""

    def __init__(self, width: int = 37, checkpointing: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.first = Outer(width, checkpointing)
        self.second = Outer(width, checkpointing)
        self.head = nn.Linear(width, 29)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(self.first(self.embed(ids))))
        return out


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Forward, backward and update with the batch of a number; the loss."""
    loss = loss_of(model, batch(number))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
