"""Backends and wrap policies of other distributions: real ones on the path, and what is wrong with some."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from storage.drives import StorageOptions
from storage.errors import PluginError, StorageError
from tests.conftest import small_config

Install = Callable[..., None]
BACKEND = '''
from storage.backends.buffered import BufferedBackend


class Counting(BufferedBackend):
    """Counts what it moves."""

    submitted = 0

    def submit(self, request):
        type(self).submitted += 1
        super().submit(request)
'''
POLICY = '''
from torch import nn


def every_linear(model):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def foreign(model):
    return [nn.Linear(2, 2)]


NOT_CALLABLE = 3
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with one module and some entry points where Python looks for them."""
    made: list[str] = []

    def make(distribution: str, module: str, code: str, **groups: dict[str, str]) -> None:
        site = tmp_path / distribution
        about = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        about.mkdir(parents=True)
        (site / f"{module}.py").write_text(code)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [
            line
            for group, points in groups.items()
            for line in (f"[infinity.{group}]", *(f"{name} = {target}" for name, target in points.items()))
        ]
        (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        made.append(module)

    yield make
    for module in made:
        sys.modules.pop(module, None)


class Block(nn.Module):
    """Two layers, one unit unless a policy says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(x).tanh())
        return down


def train(model: nn.Module, config: infinity.Config, *, units: int = 6) -> list[float]:
    losses = []
    with infinity.offload(model, config) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(torch.full((2, 8), float(step + 1))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert engine.metrics()["nvme/read_bytes"] > 0
        assert engine.plan.units == units
    return losses


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def config_for(folder: Path, **settings: object) -> infinity.Config:
    (folder / "swap").mkdir(exist_ok=True)
    return small_config(folder / "swap", **{"host": {"budget": "440KiB"}, "resident_threshold": 0} | settings)


# Backends ----------------------------------------------------------------------------------------------------------


def test_a_run_uses_the_backend_of_another_distribution(tmp_path: Path, install: Install) -> None:
    install("fast-disk", "fast_disk", BACKEND, storage_backends={"counting": "fast_disk:Counting"})
    expected = train(model(), config_for(tmp_path))
    assert train(model(), config_for(tmp_path, nvme={"engine": "counting"})) == expected
    assert importlib.import_module("fast_disk").Counting.submitted > 0


def test_naming_a_backend_imports_nothing(install: Install) -> None:
    install("fast-disk", "fast_disk", "raise RuntimeError", storage_backends={"counting": "fast_disk:Counting"})
    assert infinity.NvmeConfig(engine="counting").engine == "counting"
    assert StorageOptions(engine="counting").engine == "counting"
    assert "fast_disk" not in sys.modules


def test_an_unknown_backend_lists_ours_and_those_installed(install: Install) -> None:
    install("fast-disk", "fast_disk", BACKEND, storage_backends={"counting": "fast_disk:Counting"})
    with pytest.raises(infinity.ConfigError, match=r"nvme.engine = 'countin'.*'buffered'.*installed .*'counting'"):
        infinity.Config(nvme={"engine": "countin"})
    with pytest.raises(ValueError, match=r"must be one of auto, .*, counting"):
        StorageOptions(engine="other")


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        ("import nothing_of_this_name", "m:X", "of broken-disk 1.0 cannot be loaded from m:X: ModuleNotFoundError"),
        ("", "m:X", "of broken-disk 1.0 cannot be loaded from m:X: AttributeError"),
        ("X = 3", "m:X", "of broken-disk 1.0 has to be a class or a function with an attribute opens_direct"),
        ("class X:\n    opens_direct = False", "m:X", "of broken-disk 1.0 could not be made: TypeError"),
        (
            "class X:\n    opens_direct = False\n    def __init__(self, **settings): ...",
            "m:X",
            "of broken-disk 1.0 is no backend: X lacks name, progress, cost, submit, promote, in_flight, close",
        ),
    ],
    ids=["import", "attribute", "kind", "arguments", "contract"],
)
def test_a_broken_backend_names_its_distribution(
    tmp_path: Path, install: Install, code: str, target: str, message: str
) -> None:
    install("broken-disk", "m", code, storage_backends={"broken": target})
    whole = model()
    with pytest.raises(PluginError, match=f"'broken'.* {message}"):
        infinity.offload(whole, config_for(tmp_path, nvme={"engine": "broken"}))
    assert list((tmp_path / "swap").iterdir()) == []
    assert all(parameter.sum().isfinite() for parameter in whole.parameters())


def test_two_distributions_with_one_name_are_refused(tmp_path: Path, install: Install) -> None:
    install("fast-disk", "fast_disk", BACKEND, storage_backends={"counting": "fast_disk:Counting"})
    install("other-disk", "other_disk", BACKEND, storage_backends={"counting": "other_disk:Counting"})
    with pytest.raises(StorageError, match=r"brought by fast-disk 1\.0 and by other-disk 1\.0; uninstall all but one"):
        infinity.offload(model(), config_for(tmp_path, nvme={"engine": "counting"}))


# Wrap policies -----------------------------------------------------------------------------------------------------


def test_a_policy_of_another_distribution_chooses_the_units(tmp_path: Path, install: Install) -> None:
    install("my-policies", "my_policies", POLICY, wrap_policies={"linears": "my_policies:every_linear"})
    expected = train(model(), config_for(tmp_path))
    assert train(model(), config_for(tmp_path, wrap_policy="linears"), units=12) == expected


def test_a_function_chooses_the_units(tmp_path: Path) -> None:
    def second_half(whole: nn.Module) -> list[nn.Module]:
        return list(whole.children())[3:]

    config = config_for(tmp_path, wrap_policy=second_half, resident_threshold="1MiB")
    with infinity.offload(model(), config) as engine:
        assert engine.plan.units == 4  # the three, and one for what stays on the device


def test_an_unknown_policy_lists_those_installed(install: Install) -> None:
    install("my-policies", "my_policies", POLICY, wrap_policies={"linears": "my_policies:every_linear"})
    with pytest.raises(infinity.ConfigError, match=r"wrap_policy = 'linear'.*installed .*'linears'; did you mean"):
        infinity.Config(wrap_policy="linear")
    with pytest.raises(infinity.ConfigError, match="allowed: a function"):
        infinity.Config(wrap_policy=3)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("my_policies:nothing", infinity.ConfigError, "my-policies 1.0 cannot be loaded"),
        ("my_policies:NOT_CALLABLE", infinity.ConfigError, "of my-policies 1.0 is 3, which cannot be called"),
        ("my_policies:foreign", infinity.UnsupportedModelError, "of my-policies 1.0 chose Linear, which is no"),
    ],
)
def test_a_broken_policy_names_its_distribution(
    tmp_path: Path, install: Install, target: str, error: type[Exception], message: str
) -> None:
    install("my-policies", "my_policies", POLICY, wrap_policies={"broken": target})
    with pytest.raises(error, match=f"wrap_policy.*'broken'.*{message}"):
        infinity.offload(model(), config_for(tmp_path, wrap_policy="broken"))


def test_a_policy_that_chooses_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(infinity.UnsupportedModelError, match=r"wrap_policy .*matches no module"):
        infinity.offload(model(), config_for(tmp_path, wrap_policy=lambda whole: []))


def test_units_are_chosen_once() -> None:
    with pytest.raises(infinity.ConfigError, match="unit_classes and wrap_policy both choose"):
        infinity.Config(unit_classes=["Linear"], wrap_policy=lambda whole: [])
