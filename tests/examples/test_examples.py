"""Every script under examples/ runs as a user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import infinity

ROOT = Path(infinity.__file__).parent.parent
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow  # each starts a process that loads torch


def run(*command: str | Path, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    (tmp_path / "swap").mkdir()
    return tmp_path / "swap"


def losses(output: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in output.splitlines() if "loss " in line]


def test_plain_loop(tmp_path: Path, swap: Path) -> None:
    output = run(EXAMPLES / "plain_loop.py", "--nvme", swap, "--steps", "6", "--save", "trained", folder=tmp_path)
    found = losses(output)
    assert len(found) == 6
    assert found[-1] < found[0]
    assert (tmp_path / "trained").is_dir()
    assert list(swap.iterdir()) == []


def test_torchrun_loop(tmp_path: Path, swap: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    script = (EXAMPLES / "torchrun_loop.py", "--nvme", swap, "--steps", "3")
    output = run(*launcher, *script, folder=tmp_path)
    assert len(losses(output)) == 3
    assert {line.split(":")[0] for line in output.splitlines() if "read" in line} == {"rank 0", "rank 1"}
    assert list(swap.iterdir()) == []


def test_huggingface_trainer_trains_and_resumes(tmp_path: Path, swap: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra 'hf'")
    script = (EXAMPLES / "huggingface_trainer.py", "--nvme", swap, "--output", "out")
    assert "trained for 10 steps" in run(*script, "--steps", "10", folder=tmp_path)
    assert "trained for 12 steps" in run(*script, "--steps", "12", "--resume", folder=tmp_path)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    assert list(swap.iterdir()) == []


def test_accelerate_loop(tmp_path: Path, swap: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra 'hf'")
    found = losses(run(EXAMPLES / "accelerate_loop.py", "--nvme", swap, "--steps", "4", folder=tmp_path))
    assert len(found) == 4
    assert found[-1] < found[0]
    assert list(swap.iterdir()) == []


def test_lora(tmp_path: Path, swap: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra 'hf'")
    script = (EXAMPLES / "lora.py", "--nvme", swap, "--steps", "6", "--save", "adapter", "--merged", "merged")
    output = run(*script, folder=tmp_path)
    assert len(losses(output)) == 6
    before, after = (float(output.split(f"unseen answers {when}: ")[1].split()[0]) for when in ("before", "after"))
    assert after < before
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert list(swap.iterdir()) == []


def test_lora_over_a_base_of_ones_own(tmp_path: Path, swap: Path) -> None:
    """The merged model of a first run is the base of a second one, with a tokenizer of its own."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")
    script = (EXAMPLES / "lora.py", "--nvme", swap, "--steps", "1", "--accumulate", "1", "--length", "32")
    run(*script, "--merged", "base", folder=tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"Explain": 1, "the": 2, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path / "base")
    output = run(*script, "--base", "base", "--save", "adapter", folder=tmp_path)
    assert len(losses(output)) == 1
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_lightning_trainer_trains_and_resumes(tmp_path: Path, swap: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="needs the extra 'lightning'")
    script = (EXAMPLES / "lightning_trainer.py", "--nvme", swap, "--output", "out")
    first = run(*script, "--steps", "10", folder=tmp_path)
    assert len(losses(first)) == 10
    assert losses(first)[-1] < losses(first)[0]
    second = run(*script, "--steps", "12", "--resume", folder=tmp_path)
    assert len(losses(second)) == 2
    assert "trained for 12 steps" in second
    assert (tmp_path / "out" / "model-12" / "model.safetensors").is_file()
    assert list(swap.iterdir()) == []


def test_the_scheduler_test_passes(tmp_path: Path) -> None:
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLES / "scheduler_test.py", folder=tmp_path)
    assert "2 passed" in output


def test_every_script_is_listed_and_run() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    here = Path(__file__).read_text()
    for script in EXAMPLES.glob("*.py"):
        assert f"`{script.name}`" in listed
        assert f'"{script.name}"' in here
