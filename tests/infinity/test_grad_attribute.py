"""`parameter.grad` between backward and step: shown, changed, taken away, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from tests.zoo import Net, batch, build, loss_of

_PLENTY = {"budget": "4MiB"}
_TIGHT = {"budget": "500KiB"}


def _offload(path: Path, *, schedule: str = "synchronous", host: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    model = build(Net)
    config = infinity.Config(
        precision="fp32",
        schedule=schedule,
        device={"kind": "cpu", "budget": "8MiB"},
        host=host or _PLENTY,
        nvme={"paths": [path]},
        resident_threshold="1KiB",
    )
    engine = infinity.offload(model, config)
    return model, engine, infinity.AdamW(model.parameters(), lr=1e-2)


def _plain():  # type: ignore[no-untyped-def]
    model = build(Net)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def test_gradients_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    model, engine, _ = _offload(tmp_path)
    plain, _ = _plain()
    with engine:
        assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, batch(0)).backward()
        loss_of(plain, batch(0)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def test_model_zero_grad_forgets_what_waits(tmp_path: Path) -> None:
    model, engine, optimizer = _offload(tmp_path)
    plain, reference = _plain()
    with engine:
        for net, steps in ((model, optimizer), (plain, reference)):
            loss_of(net, batch(0)).backward()
            net.zero_grad()
            assert all(parameter.grad is None for parameter in net.parameters())
            loss_of(net, batch(1)).backward()
            steps.step()
        with torch.no_grad():
            assert torch.equal(loss_of(model, batch(2)), loss_of(plain, batch(2)))


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_torchs_own_clipping_works_on_gradients_in_host_memory(tmp_path: Path, max_norm: float) -> None:
    model, engine, optimizer = _offload(tmp_path)
    plain, reference = _plain()
    with engine:
        for step in range(3):
            norms = []
            for net, steps in ((model, optimizer), (plain, reference)):
                loss_of(net, batch(step)).backward()
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm))
                steps.step()
                steps.zero_grad()
            assert torch.equal(*norms)
        with torch.no_grad():
            assert torch.equal(loss_of(model, batch(9)), loss_of(plain, batch(9)))


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_torchs_own_clipping_works_on_spilled_gradients(tmp_path: Path, max_norm: float) -> None:
    """What loops that are not ours call, as transformers.Trainer and Accelerate do: exact, without the gradients."""
    model, engine, optimizer = _offload(tmp_path, host=_TIGHT)
    plain, reference = _plain()
    with engine:
        assert engine.plan.placement.spilled_gradients
        for step in range(3):
            norms = []
            for net, steps in ((model, optimizer), (plain, reference)):
                for micro in range(2):
                    loss_of(net, batch(2 * step + micro)).backward()
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm))
                steps.step()
                steps.zero_grad()
            assert torch.equal(*norms)
        with torch.no_grad():
            assert torch.equal(loss_of(model, batch(9)), loss_of(plain, batch(9)))


def test_a_spilled_gradient_refuses_what_cannot_be_exact(tmp_path: Path) -> None:
    model, engine, optimizer = _offload(tmp_path, host=_TIGHT)
    with engine:
        assert engine.plan.placement.spilled_gradients
        loss_of(model, batch(0)).backward()
        with pytest.raises(infinity.NotGatheredError, match=r"waits in the swap file.*clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0)
        spilled = [p.grad for p in model.parameters() if type(p.grad).__name__ == "SpilledGradient"]
        with pytest.raises(infinity.NotGatheredError, match=r"waits in the swap file"):
            spilled[0].sum()
        spilled[0].mul_(0.5)
        with pytest.raises(infinity.ConfigError, match="clipped twice"):
            spilled[0].mul_(0.5)
        with pytest.raises(infinity.ConfigError, match="clipped twice"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()


def test_an_applied_gradient_refuses_to_be_clipped(tmp_path: Path) -> None:
    model, engine, optimizer = _offload(tmp_path, schedule="overlapped")
    with engine:
        loss_of(model, batch(0)).backward()
        with pytest.raises(infinity.IterationError, match="synchronous"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
