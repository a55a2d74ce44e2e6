"""The documentation builds without a warning, and its catalogues are complete."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import infinity
import infinity.errors
import storage.errors

ROOT = Path(infinity.__file__).parent.parent


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra 'docs'")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    shown = set(re.findall(r'<h\d id="(infinity[\w.]+)"', api))
    assert {"infinity.offloading.offload", "infinity.optim.scaler.GradScaler", "infinity.config.Config.with_"} <= shown
    assert {f"infinity.optim.adamw.AdamW.{name}" for name in ("step", "state_dict", "last_grad_norm")} <= shown
    assert {f"infinity.engine.Engine.{name}" for name in _listed_of_the_engine()} <= shown
    examples = re.findall(r'<details class="example".*?</details>', api, re.DOTALL)
    assert len(examples) >= 3
    assert all("<code>" in example for example in examples)
    loaded = re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?:[^"]+)"', api)
    assert [url for url in loaded if "canonical" not in url] == []


def _listed_of_the_engine() -> set[str]:
    text = (ROOT / "docs" / "api.md").read_text()
    listed = re.search(r"infinity\.engine\.Engine\n.*? members: \[(.*?)\]", text, re.DOTALL)
    assert listed is not None
    return set(listed[1].replace(" ", "").replace("\n", "").split(","))


def test_the_api_lists_what_an_engine_does() -> None:
    documented = {
        name
        for name, member in inspect.getmembers(infinity.Engine)
        if not name.startswith("_") and (doc := inspect.getdoc(member)) and not doc.startswith("Called by")
    }
    internal = {"clip", "discard_gradients", "gradient_of", "has_module_parameter", "hold", "owns_module"}
    internal |= {"set_gradient"}
    assert documented - internal == _listed_of_the_engine()


def _errors() -> list[str]:
    return [
        name
        for module in (infinity.errors, storage.errors)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == module.__name__ and not name.startswith("_")
    ]


def test_every_error_is_in_the_catalogue() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    abstract = {"InfinityError", "StorageError", "IoError", "CapacityError"}
    missing = [name for name in _errors() if name not in abstract and f"`{name}`" not in text]
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == pages


def test_every_page_was_merged() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    assert [path.name for path in pages if re.search(r"^(<<<<<<<|=======|>>>>>>>)( |$)", path.read_text(), re.M)] == []


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    missing = [path.name for path in (ROOT / "benchmarks").glob("*.py") if f"`{path.name}`" not in text]
    assert missing == []
