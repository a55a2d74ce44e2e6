"""Models of the kinds that people have, each with a parameter use that a gather and release engine may miss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

VOCAB, WIDTH = 29, 32


class Stack(nn.Module):
    """Embedding, a list of blocks, head."""

    def __init__(self, body: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.ModuleList(body)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for block in self.body:
            x = self.apply_block(block, x)
        out: Tensor = self.head(x)
        return out

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(functional.gelu(self.a(x)))
        return x + y


class Recurrent(Stack):
    """RNN modules hand the flat list of their weights to the kernel."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__(kind(WIDTH, WIDTH, batch_first=True, **options) for _ in range(2))  # type: ignore[arg-type]

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)[0]
        return y


class BidirectionalLstm(nn.Module):
    """Weights are used where the module is not one of several; dropout between its layers draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(ids))[0])
        return out


class Cells(Stack):
    """Each cell is called once per position."""

    def __init__(self) -> None:
        super().__init__(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], WIDTH)
        outs = []
        for position in range(x.shape[1]):
            h, c = block(x[:, position], (h, c))
            outs.append(h)
        return torch.stack(outs, 1)


class SelfAttention(Stack):
    """`nn.MultiheadAttention` reads the weights of a child whose forward it never calls."""

    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x, x, x)[0]
        return x + y


class SeparateAttention(nn.Module):
    """The same, beside each other and with separate projections of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.second = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=WIDTH // 2, vdim=WIDTH // 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.first(x, x, x)[0]
        half = x[..., : WIDTH // 2]
        x = x + self.second(x, half, half, need_weights=False)[0]
        out: Tensor = self.head(x)
        return out


class EncoderDecoder(nn.Module):
    """All decoder layers read what the encoder gave."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.both = nn.Transformer(WIDTH, 4, 2, 2, 48, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head(self.both(x, x))
        return out


class Reparametrized(nn.Module):
    """A block whose weight is computed of other parameters; `make` parametrizes a layer."""

    def __init__(self, make: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.line = make(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.line(x))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    """The hook that older code has; it sets a plain attribute before every forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)  # type: ignore[no-any-return]


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old_weight_norm": old_weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
}


class LoneReparametrized(nn.Module):
    """The parametrized layer is no block: it is a unit by itself."""

    def __init__(self, make: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.line = make(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(functional.gelu(self.line(self.embed(ids))))
        return out


class Normalized(nn.Module):
    """Convolution and batch statistics, which live in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.relu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


class Counting(Stack):
    """A buffer that every forward changes, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__(Mlp() for _ in range(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        return super().forward(ids) * (self.count + self.turned.mean())


class Experts(nn.Module):
    """A router that sends every token to one expert, so that some are idle in a step."""

    def __init__(self, n_experts: int = 6, n_used: int = 4) -> None:
        super().__init__()
        self.n_used = n_used  # the others never get a token
        self.router = nn.Linear(WIDTH, n_experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(n_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        chosen = weights[:, : self.n_used].argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if bool(mask.any()):
                out[mask] = expert(tokens[mask]) * weights[mask, number : number + 1]
        return x + out.view_as(x)


class ExpertUnits(nn.Module):
    """One layer of experts: each expert is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = Experts()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(ids)))
        return out


class Branching(Stack):
    """Data decide which blocks run."""

    def __init__(self) -> None:
        super().__init__(Mlp() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for number, block in enumerate(self.body):
            if int(ids.sum()) * 7 % 3 != number % 3:
                x = block(x)
        out: Tensor = self.head(x)
        return out


class Aliased(Stack):
    """One block several times in the list and under another name, used outside its place too."""

    def __init__(self) -> None:
        block = Mlp()
        super().__init__([block, Mlp(), block, Mlp(), block])
        self.alias = block

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids) + self.head(self.alias(self.embed(ids)))
        return out


class Repeating(Stack):
    """Every block runs one to five times, as in ALBERT; another number in every step."""

    def __init__(self) -> None:
        super().__init__(Mlp() for _ in range(2))

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        for _ in range(1 + int(x.detach().abs().sum() * 100) % 5):
            x = block(x)
        return x


class Returning(nn.Module):
    """Gives a parameter, and a view of one, to whoever called it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.line(x), self.weight, self.line.weight.t()


class ReturnsParameters(Stack):
    """Computes with parameters that its blocks returned."""

    def __init__(self) -> None:
        super().__init__(Returning() for _ in range(3))

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y, weight, view = block(x)
        return x + y @ weight @ view


class ManyTiny(nn.Module):
    """A thousand parameters of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(WIDTH) * 0.1) for _ in range(1000))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids) + torch.stack(list(self.tiny)).sum(0))
        return out


class InDictionary(nn.Module):
    """Parameters in a `ParameterDict`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.matrices = nn.ParameterDict({name: nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for name in "abc"})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for matrix in self.matrices.values():
            x = x + x @ matrix
        out: Tensor = self.head(x)
        return out


class Large(Stack):
    """A parameter much larger than everything else, used several times."""

    def __init__(self) -> None:
        super().__init__(Mlp() for _ in range(2))
        self.large = nn.Embedding(6000, WIDTH)

    def apply_block(self, block: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = block(x)
        return y + self.large(x.detach().abs().mul(1000).long()[..., 0] % 6000)


class Turned(Stack):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__(Mlp() for _ in range(2))
        for block in self.body:
            block.a.weight = nn.Parameter(block.a.weight.detach().t().contiguous().t())


class Multiplying(nn.Module):
    """Uses its input twice in one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.slope = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.PReLU(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.slope(self.both(x, x).transpose(1, 2))
        return x + y.transpose(1, 2)


class Bags(nn.Module):
    """Embeddings with padding, and bags of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode="sum")
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(ids) + self.bag(ids)[:, None])
        return out


class Holding(Stack):
    """Computes with weights that it holds where no module holds them; `hold` says how."""

    def __init__(self, hold: Callable[[Holding], Callable[[], Iterable[Tensor]]]) -> None:
        super().__init__(Mlp() for _ in range(2))
        self.weights = hold(self)

    def forward(self, ids: Tensor) -> Tensor:
        total: Tensor = super().forward(ids)
        for weight in self.weights():
            total = total + total.mean() * weight.sum()
        return total


def _in_closure(model: Holding) -> Callable[[], Iterable[Tensor]]:
    weights = [model.embed.weight, model.body[1].b.weight]
    return lambda: (weight * 2 for weight in weights)


def _in_attributes(model: Holding) -> Callable[[], Iterable[Tensor]]:
    object.__setattr__(model, "tied", model.head.weight)
    return lambda: [model.tied]


def _in_containers(model: Holding) -> Callable[[], Iterable[Tensor]]:
    model.weights_by_name = {"embed": model.embed.weight}
    model.some_weights = (model.body[0].a.weight, [model.body[0].a.bias])
    return lambda: [model.weights_by_name["embed"], model.some_weights[0], *model.some_weights[1]]


class _Helper:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self) -> Iterable[Tensor]:
        return [self.weight]


HOLDERS: dict[str, Callable[[Holding], Callable[[], Iterable[Tensor]]]] = {
    "closure": _in_closure,
    "attribute": _in_attributes,
    "containers": _in_containers,
    "object": lambda model: _Helper(model.body[1].a.weight),
}
