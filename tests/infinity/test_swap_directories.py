"""Where swap files go: on a disk if there is one, and nothing stays behind."""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import infinity
from infinity.errors import ConfigError
from infinity.swap_directories import default_directory, swap_directories
from storage import filesystems
from storage.errors import StorageError
from storage.filesystems import Mount
from tests.zoo import Net

ROOT = Path(__file__).parents[2]


Mounts = dict[str, str]


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Mounts:
    """File systems by mount point, in place of the machine's."""
    table: Mounts = {"/": "ext4"}
    monkeypatch.setattr(
        filesystems,
        "read_mounts",
        lambda: [Mount(number, None, Path(point), name) for number, (point, name) in enumerate(table.items())],
    )
    return table


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The system's temporary directory."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def entries(folder: Path) -> list[Path]:
    return list(folder.iterdir())


# Given directories -----------------------------------------------------------------------------------------------


def test_given_directories_are_left_alone(mounts: Mounts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = (tmp_path / "a", tmp_path / "b")
    for path in paths:
        path.mkdir()
    with swap_directories(paths) as chosen:
        assert chosen == paths
    assert set(entries(tmp_path)) == set(paths)
    assert caplog.messages == []


@pytest.mark.parametrize("rank", [None, 1])
def test_a_missing_directory_is_made_and_told_once(
    mounts: Mounts, tmp_path: Path, caplog: pytest.LogCaptureFixture, rank: int | None
) -> None:
    """The drive that belongs there may not be mounted."""
    there, missing = tmp_path / "there", tmp_path / "missing"
    there.mkdir()
    mounts[str(tmp_path)] = "xfs"
    for _ in range(2):
        with swap_directories((there, missing), rank=rank):
            assert missing.is_dir()
    (message,) = caplog.messages
    assert f"{missing} did not exist and was made, on the xfs that is mounted at {tmp_path} with" in message
    assert "iB free" in message
    assert "mount it" in message


@pytest.mark.parametrize("rank", [None, 1])
def test_nothing_is_made_where_its_parent_is_missing(tmp_path: Path, rank: int | None) -> None:
    there = tmp_path / "there"
    there.mkdir()
    paths = (there, tmp_path / "nvmee0" / "swap")
    refusal = rf"{paths[1]} cannot be made, because there is no folder {paths[1].parent}.*mkdir -p {paths[1]}"
    with pytest.raises(ConfigError, match=refusal), swap_directories(paths, rank=rank):
        pass
    assert entries(tmp_path) == [there]


def test_what_fits_in_memory_does_not_hide_a_slip(tmp_path: Path) -> None:
    """The folders are looked at in any case, and none is made where none is needed."""
    slip, fine = tmp_path / "nope" / "a", tmp_path / "fine"
    for model in (Net(), Net()):
        with pytest.raises(ConfigError, match=f"{slip} cannot be made, because there is no folder {slip.parent}"):
            infinity.offload(model, infinity.Config(nvme={"paths": [fine, slip]}))
    with pytest.raises(ConfigError, match=f"{slip} cannot be made"):
        infinity.AdamW(Net().parameters(), config=infinity.Config(nvme={"paths": [slip]}))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file cannot hold swap files"):
        infinity.offload(Net(), infinity.Config(nvme={"paths": [tmp_path / "file"]}))
    with infinity.offload(Net(), infinity.Config(nvme={"paths": [fine, fine / "inner"]})) as engine:
        assert engine.plan.placement.nvme_nbytes == 0
    assert entries(tmp_path) == [tmp_path / "file"]


def test_a_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "swap"):
        with pytest.raises((StorageError, ConfigError), match=str(path)), swap_directories((path,), rank=0):
            pass


# Without any -----------------------------------------------------------------------------------------------------


def test_a_temporary_directory_is_made_and_removed(mounts: Mounts, temporary: Path) -> None:
    with swap_directories(None) as (folder,):
        assert folder.parent == temporary
        assert folder.name.startswith("infinity-swap-")
        (folder / "rank0.swap").write_bytes(b"x")
    assert entries(temporary) == []


def test_a_temporary_directory_is_removed_after_an_error(mounts: Mounts, temporary: Path) -> None:
    with pytest.raises(RuntimeError, match="no room"), swap_directories(None) as (folder,):
        assert folder.is_dir()
        raise RuntimeError("no room")
    assert entries(temporary) == []


def test_two_runs_have_directories_of_their_own(mounts: Mounts, temporary: Path) -> None:
    with swap_directories(None) as (one,), swap_directories(None) as (other,):
        assert one != other
        assert len(entries(temporary)) == 2
    assert entries(temporary) == []


def test_a_directory_that_somebody_removed_is_no_error(mounts: Mounts, temporary: Path) -> None:
    with swap_directories(None) as (folder,):
        folder.rmdir()
    assert entries(temporary) == []


def test_a_temporary_directory_does_not_survive_the_process(temporary: Path) -> None:
    program = (
        "import sys, tempfile\n"
        "from infinity.swap_directories import swap_directories\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "entered = swap_directories(None)\n"
        "print(entered.__enter__()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(temporary)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=ROOT,
    )
    made = Path(done.stdout.strip())
    assert made.name.startswith("infinity-swap-")
    assert not made.exists()
    assert entries(temporary) == []


# Where temporary files go ----------------------------------------------------------------------------------------


def test_the_usual_directory_where_it_is_on_a_disk(mounts: Mounts, temporary: Path) -> None:
    assert default_directory() == temporary


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_another_one_where_the_usual_is_in_memory(mounts: Mounts, temporary: Path, kind: str) -> None:
    mounts[str(temporary)] = kind
    assert default_directory() == Path("/var/tmp")


def test_memory_is_told_where_there_is_no_disk(
    mounts: Mounts, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounts["/"] = "tmpfs"
    with caplog.at_level(logging.WARNING):
        assert default_directory() == temporary
    assert caplog.messages == [f"{temporary} is in memory, not on a disk; give nvme.paths a directory on a drive"]


def test_a_forked_child_leaves_the_directory_of_its_parent(tmp_path: Path) -> None:
    """Whoever forks without a new program (daemons, pre-forking servers) runs the exit functions of the parent too."""
    script = """
import os, sys, warnings
from infinity.swap_directories import swap_directories
warnings.simplefilter("ignore")
with swap_directories(None) as (folder,):
    child = os.fork()
    if child == 0:
        sys.stdout.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(folder.is_dir())
print(folder.is_dir())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False"]
