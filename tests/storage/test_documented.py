"""The user guide's example of failing and slow drives runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "user-guide.md"


def test_the_example_of_failing_and_slow_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = GUIDE.read_text().partition("## Test with drives that fail")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    exec(compile(found.group(1), "user-guide", "exec"), {})
    assert list((tmp_path / "swap").iterdir()) == []
