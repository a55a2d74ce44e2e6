"""A batch that the machine's memory could not hold under any setting is refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from infinity.cli.memory import activation_nbytes, check_activations
from infinity.cli.settings import Training, resolve
from infinity.cli.train_options import TrainOptions
from infinity.errors import ConfigError
from infinity.sizes import GIB


def training(**options: int) -> Training:
    return resolve(TrainOptions(preset="tiny", **options)).training  # type: ignore[arg-type]


@pytest.fixture
def one_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=GIB // 2))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=GIB // 2))


@pytest.mark.usefixtures("one_gibibyte")
def test_what_some_setting_has_room_for_is_not_refused() -> None:
    """Its activations need more than there is, but need not be in memory together."""
    tight = training(batch=400, layers=12, seq=64)
    assert activation_nbytes(tight) > GIB
    check_activations(tight)


@pytest.mark.usefixtures("one_gibibyte")
def test_slices_of_a_batch_count_one_at_a_time() -> None:
    with pytest.raises(ConfigError, match=r"activations of 4000 x .* need more than .* but 1 GiB are available"):
        check_activations(training(batch=4000, seq=64))
    check_activations(training(batch=4000, seq=64, micro_batches=10))
