"""A decoder-only byte-level transformer: learned positions, pre-LN blocks, causal attention, GELU MLP, untied head.

The model is ordinary PyTorch and knows nothing of offloading. Its blocks lie in one `nn.ModuleList`, so that the engine
finds them by itself, and `init_weights` gives the same values however the model was built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256
_STD = 0.02


@dataclass(frozen=True, slots=True)
class GptShape:
    """Sizes of a `Gpt`. `hidden` must be a multiple of `heads`; `seq` is the longest input in bytes."""

    layers: int
    hidden: int
    heads: int
    seq: int

    @property
    def parameters(self) -> int:
        """Number of parameters, without building anything."""
        h = self.hidden
        block = 12 * h * h + 13 * h
        return self.layers * block + (2 * VOCABULARY + self.seq) * h + 2 * h


class ResidualLinear(nn.Linear):
    """The linear layer at the end of a residual branch; it starts smaller, by the root of the number of branches."""

    def __init__(self, in_features: int, out_features: int, branches: int) -> None:
        super().__init__(in_features, out_features)
        self.std = _STD / branches**0.5


class Block(nn.Module):
    """One pre-LN transformer block. Input and output: [batch, seq, hidden]."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        hidden, branches = shape.hidden, 2 * shape.layers
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attention_out = ResidualLinear(hidden, hidden, branches)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = ResidualLinear(4 * hidden, hidden, branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.norm_attention(x))
        activated = functional.gelu(self.mlp_in(self.norm_mlp(x)))
        return x + self.mlp_out(activated)  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, seq, head]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(attended.transpose(1, 2).reshape(batch, seq, hidden))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Predicts the next byte.

    Args:
        shape: sizes.
        recompute: keep only the input of each block and compute the rest again in backward.

    Raises:
        ValueError: `hidden` is not a multiple of `heads`.
    """

    def __init__(self, shape: GptShape, *, recompute: bool = False) -> None:
        super().__init__()
        if shape.hidden % shape.heads:
            raise ValueError(f"hidden is {shape.hidden}; it must be a multiple of heads, which is {shape.heads}")
        self.shape = shape
        self.recompute = recompute
        self.tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, VOCABULARY, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Mean loss over all targets (0-dim, fp32), or logits [batch, seq, 256] without targets.

        Args:
            inputs, targets: int64 [batch, seq], values 0..255, seq at most `shape.seq`.
        """
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = self._run(block, x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))

    def _run(self, block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            # No dropout: the random state need not be replayed.
            return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return block(x)


def init_weights(module: nn.Module) -> None:
    """Give the parameters that `module` itself owns their first values.

    Call it for every module that owns parameters, in the order of `model.modules()`, after seeding torch once: the
    values then depend on the seed alone, whether the model was built with memory or under `infinity.empty_init()`.
    """
    with torch.no_grad():
        if isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, _STD)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, module.std if isinstance(module, ResidualLinear) else _STD)
            if module.bias is not None:
                module.bias.zero_()


def build_plain(shape: GptShape, *, recompute: bool, seed: int) -> Gpt:
    """The whole model in host memory, as the baseline trains it: the values an offloaded model of this seed has."""
    with torch.device("meta"):
        model = Gpt(shape, recompute=recompute)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            init_weights(module)
    return model
