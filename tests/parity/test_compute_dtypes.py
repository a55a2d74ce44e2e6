"""bf16 with buffers: what computes in fp32, what does not, and what an operation that meets two dtypes is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import infinity
from infinity.devices.cpu import CpuDevice
from tests.conftest import MakeEngine
from tests.parity.loops import gathered_parameters


@pytest.fixture(autouse=True)
def _computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and on every CPU: slow where it is not native, but the models are small."""
    monkeypatch.setattr(CpuDevice, "compute_dtype", lambda device, precision: torch.bfloat16)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(3 if not n else 8) for n in range(2)))
        self.norm = nn.BatchNorm2d(8, affine=False)
        self.head = nn.Conv2d(8, 4, 1)

    @staticmethod
    def _block(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(images))).mean((2, 3))
        return scores


def _as_autocast(model: nn.Module) -> nn.Module:
    """Everything in bf16 but the parameters and the statistics of BatchNorm."""
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.float()
    return model


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Tensor:
    torch.manual_seed(step)
    loss = functional.cross_entropy(model(torch.randn(4, 3, 6, 6).bfloat16()).float(), torch.arange(4))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def test_batch_norm_computes_with_fp32_parameters(offload: MakeEngine) -> None:
    """Training and evaluation have the bits of the plain model in which BatchNorm alone is fp32."""
    torch.manual_seed(0)
    ours, plain = Convolutions(), Convolutions()
    plain.load_state_dict(ours.state_dict())
    plain = _as_autocast(plain)  # type: ignore[assignment]
    engine = offload(ours, precision="bf16", schedule="synchronous")
    optimizer = infinity.AdamW(ours.parameters(), lr=0.0, weight_decay=0.0)
    for step in range(2):
        losses = [_train(model, optimizer, step) for model in (ours, plain)]
        assert torch.equal(*losses)
        for name, buffer in plain.named_buffers():
            assert torch.equal(ours.get_buffer(name), buffer), name
        for name, parameter in plain.named_parameters():
            grad = ours.get_parameter(name).grad
            assert grad is not None and parameter.grad is not None
            assert torch.equal(grad.float(), parameter.grad.float()), name
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()
    with torch.no_grad():
        images = torch.randn(2, 3, 6, 6).bfloat16()
        assert torch.equal(ours.eval()(images), plain.eval()(images))
    assert engine.compute_dtype is torch.bfloat16
    dtypes = {n: p.dtype for n, p in gathered_parameters(ours).items()}
    assert dtypes["blocks.0.1.weight"] is torch.float32
    assert dtypes["blocks.0.0.weight"] is torch.bfloat16


def test_batch_norm_with_statistics_of_its_own_dtype_stays_in_it(offload: MakeEngine) -> None:
    """The user's own conversion counts: everything in bf16, as after `model.bfloat16()`."""
    torch.manual_seed(0)
    ours = Convolutions().bfloat16()
    engine = offload(ours, precision="bf16")
    ours.eval()
    with torch.no_grad():
        assert ours(torch.randn(2, 3, 6, 6).bfloat16()).dtype is engine.compute_dtype
    assert {p.dtype for p in gathered_parameters(ours).values()} == {torch.bfloat16}


class Encoded(nn.Module):
    """Adds a registered encoding, which makes its input fp32 unless it is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("encoding", torch.randn(16))
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.norm(values) + self.encoding)
        return out


def test_two_dtypes_are_explained(offload: MakeEngine) -> None:
    """By the buffers that may have brought the other one, and by what to do, which then works."""
    model = Encoded()
    engine = offload(model, precision="bf16")
    values = torch.randn(4, 16).bfloat16()
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(values)
    (note,) = caught.value.__notes__
    assert "computes in torch.bfloat16" in note
    assert "'encoding' (torch.float32)" in note
    assert "running_mean" not in note
    model.encoding = model.encoding.to(engine.compute_dtype)
    assert model(values).dtype is torch.bfloat16


def test_inputs_in_another_dtype_are_explained(offload: MakeEngine) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    offload(model, precision="bf16")
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.randn(4, 16))
    (note,) = caught.value.__notes__
    assert "inputs are to be given in it" in note
    assert "Buffers" not in note


def test_other_errors_stay_as_they_are(offload: MakeEngine) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    offload(model, precision="bf16")
    with pytest.raises(RuntimeError, match="shapes") as caught:
        model(torch.randn(4, 15).bfloat16())
    assert not getattr(caught.value, "__notes__", [])
