"""GPUDirect Storage on a machine that has it: bytes go from the device to a file and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.backends.gds import probe_gds
from storage.backends.probe import choose_engine
from storage.errors import StorageError

_PROBLEM = probe_gds(None)
pytestmark = [pytest.mark.device, pytest.mark.skipif(_PROBLEM is not None, reason=f"no GPUDirect Storage: {_PROBLEM}")]


def test_a_round_trip_or_the_reason(tmp_path: Path) -> None:
    problem = probe_gds(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert problem is None or problem.startswith("cuFile refused a file there: ")
    with pytest.raises(StorageError, match=problem or "device memory only"):
        choose_engine(tmp_path, "gds")
