"""`infinity clean`: folders of dead owners go, everything else stays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.swap_directories import TEMPORARY_PREFIX
from tests.cli.command import call, run, start

_ABANDON = """
import os, sys
from pathlib import Path
from storage.swapfile import RunFolder
RunFolder(Path(sys.argv[1]), "infinity")
os._exit(9)
"""


def _abandon(folder: Path) -> Path:
    """A run folder whose owner died without closing it."""
    before = set(folder.iterdir())
    done = subprocess.run([sys.executable, "-c", _ABANDON, str(folder)], timeout=200, check=False, cwd=_root())
    assert done.returncode == 9
    (made,) = set(folder.iterdir()) - before
    return made


def _root() -> Path:
    return Path(__file__).parents[2]


@pytest.mark.slow
def test_removes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    dead = _abandon(tmp_path)
    (tmp_path / "notes").mkdir()
    unknown = tmp_path / "infinity-unknown"
    unknown.mkdir()
    process = start("train", "--preset", "tiny", "--steps", "100000", "--nvme", tmp_path)
    try:
        assert process.stdout is not None
        assert any(line.startswith("step 0") for line in process.stdout)
        code, output, _ = call("clean", tmp_path, "--json", tmp_path / "report.json")
        left = set(tmp_path.iterdir()) - {tmp_path / "report.json", tmp_path / "notes", unknown}
    finally:
        process.terminate()
        process.communicate(timeout=200)
    assert code == 0
    assert "removed: its owner is dead" in output
    assert not dead.exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [folder["path"] for folder in report["removed"]] == [str(dead)]
    assert len(left) == 1
    assert {str(folder) for folder in left} <= {folder["path"] for folder in report["left"]}
    assert unknown.exists()  # nobody can tell that its owner is dead
    assert (tmp_path / "notes").exists()


def test_removes_what_a_killed_run_without_nvme_left(tmp_path: Path) -> None:
    temporary = tmp_path / f"{TEMPORARY_PREFIX}abc"
    just_made = tmp_path / f"{TEMPORARY_PREFIX}def"  # of a run that starts this moment
    temporary.mkdir()
    just_made.mkdir()
    dead = _abandon(temporary)
    code, output, _ = call("clean", tmp_path)
    assert code == 0
    assert dead.name in output
    assert list(tmp_path.iterdir()) == [just_made]


def test_a_report_that_cannot_be_written_is_told_before_anything_is_removed(tmp_path: Path) -> None:
    dead = _abandon(tmp_path)
    code, _, error = call("clean", tmp_path, "--json", tmp_path / "missing" / "report.json")
    assert code == 2
    assert "does not exist" in error
    assert dead.exists()


def test_nothing_to_do(tmp_path: Path) -> None:
    code, output, _ = call("clean", tmp_path)
    assert code == 0
    assert "no swap folders" in output


def test_a_terminal_that_cannot_show_a_path_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    folder = tmp_path / "größe"
    folder.mkdir()
    code, output, error = run("clean", folder)
    assert (code, error) == (0, "")
    assert "gr??e: no swap folders" in output


def test_a_missing_folder_is_bad_usage(tmp_path: Path) -> None:
    code, _, error = call("clean", tmp_path / "missing")
    assert code == 2
    assert "does not exist" in error


def test_removes_what_ranks_left(tmp_path: Path) -> None:
    """Each of several ranks has a folder of its own in the one that --nvme was given."""
    for rank in (0, 1):
        (tmp_path / f"rank{rank}").mkdir()
    dead = _abandon(tmp_path / "rank1")
    code, output, _ = call("clean", tmp_path, "--json", tmp_path / "report.json")
    assert code == 0
    assert f"rank1/{dead.name}" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [folder["path"] for folder in report["removed"]] == [str(dead)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "report.json"]


_SAVING = """
import os, sys
from pathlib import Path
from infinity.checkpoint.folder import replaced_folder
with replaced_folder(Path(sys.argv[1]), lambda there: True) as made:
    (made / "content").write_bytes(bytes(70_000))
    print("making", flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
    sys.stdin.read()
"""


def test_removes_a_save_that_nobody_finishes_and_leaves_one_under_way(tmp_path: Path) -> None:
    def saving(name: str, how: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SAVING, str(tmp_path / name), how]
        return subprocess.Popen(command, cwd=_root(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with saving("alive", "lives") as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline() == "making\n"  # only then: a save that begins removes what others have left
        with saving("dead", "dies") as dead:
            assert dead.stdout is not None
            assert dead.stdout.readline() == "making\n"
            assert dead.wait(timeout=200) == -9
        (tmp_path / ".link.infinity-saving").symlink_to(tmp_path / ".dead.infinity-saving")
        code, output, _ = call("clean", tmp_path, "--json", tmp_path / "report.json")
        assert code == 0
        assert "removed: nobody finishes this save" in output
        assert "left: a process is saving there" in output
        report = json.loads((tmp_path / "report.json").read_text())
        assert [Path(one["path"]).name for one in report["removed"]] == [".dead.infinity-saving"]
        assert report["removed"][0]["bytes"] >= 70_000
        assert [Path(one["path"]).name for one in report["left"]] == [".alive.infinity-saving"]
        assert all(one["saving"] for one in (*report["removed"], *report["left"]))
        assert alive.stdin is not None
        alive.stdin.close()
        assert alive.wait(timeout=200) == 0
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == [".link.infinity-saving", "alive", "report.json"]
    assert (tmp_path / "alive" / "content").stat().st_size == 70_000
