"""The transformer that `infinity train` trains."""

from __future__ import annotations

import pytest
import torch

import infinity
from infinity.models.gpt import Gpt, GptShape, build_plain, init_weights

TINY = GptShape(layers=2, hidden=32, heads=4, seq=16)


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (3, TINY.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_counts_its_parameters_without_building() -> None:
    model = build_plain(TINY, recompute=False, seed=0)
    assert sum(p.numel() for p in model.parameters()) == TINY.parameters


def test_looks_only_backwards() -> None:
    model = build_plain(TINY, recompute=False, seed=0)
    inputs, _ = _batch(1)
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_starts_as_a_uniform_guess() -> None:
    loss = build_plain(TINY, recompute=False, seed=0)(*_batch(1))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)


def test_recomputation_changes_no_bit() -> None:
    results = []
    for recompute in (False, True):
        model = build_plain(TINY, recompute=recompute, seed=3)
        loss = model(*_batch(2))
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_refuses_heads_that_do_not_divide_hidden() -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        Gpt(GptShape(layers=1, hidden=30, heads=4, seq=8))


def test_same_first_values_offloaded_as_plain() -> None:
    plain = build_plain(TINY, recompute=False, seed=7)
    with infinity.empty_init():
        model = Gpt(TINY)
    config = infinity.Config(
        precision="fp32",
        device={"kind": "cpu", "budget": "4MiB"},
        host={"budget": "2MiB"},
        resident_threshold="1KiB",
    )
    torch.manual_seed(7)
    with infinity.offload(model, config, init_fn=init_weights):
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is None:
                continue
            with infinity.gathered(list(module.parameters(recurse=False))):
                expected = dict(plain.get_submodule(name).named_parameters(recurse=False))
                for own, parameter in module.named_parameters(recurse=False):
                    assert torch.equal(parameter, expected[own]), f"{name}.{own}"
