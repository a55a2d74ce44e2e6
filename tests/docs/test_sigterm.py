"""What the user guide says of SIGTERM, by scripts that get it in the middle of training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
from tests.cli.command import call

ROOT = Path(infinity.__file__).parent.parent
TIMEOUT_S = 100.0
_SCRIPT = """
import signal, sys
import torch
import infinity

{handler}
config = infinity.Config(
    device={{"kind": "cpu", "budget": "1MiB"}},
    host={{"budget": "300KiB"}},
    nvme={{"paths": [sys.argv[1]]}},
    resident_threshold=0,
)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
with infinity.offload(model, config) as engine:
    optimizer = infinity.AdamW(model.parameters(), lr=3e-4)
    while True:
        model(torch.ones(1, 64, dtype=engine.compute_dtype)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", flush=True)
"""


def shown_handler() -> str:
    """The line that the guide shows."""
    text = " ".join((ROOT / "docs" / "user-guide.md").read_text().split())
    found = re.search(r"`(signal\.signal\(signal\.SIGTERM, [^`]*)`", text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("has_handler", [True, False])
def test_a_script_that_is_terminated(tmp_path: Path, has_handler: bool) -> None:
    """With the handler everything is closed; without it swap folders stay, and `infinity clean` removes them."""
    script = _SCRIPT.format(handler=shown_handler() if has_handler else "")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "step\n"
            process.send_signal(signal.SIGTERM)
            _, error = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == (143 if has_handler else -signal.SIGTERM), error
    assert (list(tmp_path.iterdir()) == []) == has_handler
    if not has_handler:
        code, output, error = call("clean", tmp_path)
        assert code == 0, error
        assert "its owner is dead" in output
        assert list(tmp_path.iterdir()) == []
