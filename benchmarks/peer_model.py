"""The model, first values and batches of the driver that runs DeepSpeed: a GPT that both sides train.

Its parts have the driver's names and order, because a parameter's first values depend on its place among all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_STD = 0.02


@dataclass(frozen=True, slots=True)
class PeerShape:
    """Size of the model and of a batch."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocab: int = 16384
    seq: int = 128
    batch: int = 2


class Block(nn.Module):
    """One transformer block, normalised before each part."""

    def __init__(self, shape: PeerShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.ln1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.ln2 = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) to the same."""
        batch, seq, hidden = x.shape
        packed: Tensor = self.qkv(self.ln1(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, hidden))
        grown: Tensor = self.out(functional.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return x + grown


class PeerGpt(nn.Module):
    """Embeddings, blocks and a head of their own."""

    def __init__(self, shape: PeerShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.hidden)
        self.wpe = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.layers)])
        self.lnf = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the next tokens, from (batch, seq) token numbers."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.lnf(x))
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def first_values(model: nn.Module, layers: int, seed: int = 0) -> Callable[[nn.Module], None]:
    """What gives the parameters that a module owns their first values; each has a generator of its own."""
    numbers = {id(parameter): (index, name) for index, (name, parameter) in enumerate(model.named_parameters())}
    of_module = {
        id(module): {attribute: numbers[id(p)] for attribute, p in module.named_parameters(recurse=False)}
        for module in model.modules()
    }

    def fill(module: nn.Module) -> None:
        for attribute, (index, name) in of_module[id(module)].items():
            parameter = getattr(module, attribute)
            with torch.no_grad():
                if name.endswith("bias"):
                    parameter.zero_()
                elif ".ln" in name or name.startswith("ln"):
                    parameter.fill_(1.0)
                else:
                    generator = torch.Generator().manual_seed(seed * 100003 + index)
                    is_residual = ".proj." in name or ".out." in name
                    std = _STD / math.sqrt(2 * layers) if is_residual else _STD
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    return fill


def batches(shape: PeerShape, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batch for ever: token numbers and the next ones, each (batch, seq)."""
    generator = torch.Generator().manual_seed(seed + 7)
    tokens = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
    while True:
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
