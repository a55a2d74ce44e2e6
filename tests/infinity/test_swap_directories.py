"""Where swap files go: on a disk if there is one, and nothing stays behind."""

import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from infinity import swap_directories as module
from infinity.swap_directories import default_directory, file_system_of, swap_directories

ROOT = Path(__file__).parents[2]


class Mount(NamedTuple):
    mountpoint: str
    fstype: str


Mounts = dict[str, str]


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> Mounts:
    """File systems by mount point, in place of the machine's."""
    table: Mounts = {"/": "ext4"}
    monkeypatch.setattr(
        module.psutil, "disk_partitions", lambda all: [Mount(*entry) for entry in table.items()]
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
    with swap_directories(paths) as chosen:
        assert chosen == paths
    assert entries(tmp_path) == []
    assert caplog.messages == []


def test_a_given_directory_in_memory_is_told(
    mounts: Mounts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounts[str(tmp_path / "ram")] = "tmpfs"
    (tmp_path / "ram").mkdir()
    paths = (tmp_path / "disk", tmp_path / "ram" / "not yet there")
    with caplog.at_level(logging.WARNING), swap_directories(paths) as chosen:
        assert chosen == paths
    (message,) = caplog.messages
    assert message.startswith(f"{paths[1]} is in memory, not on a disk")


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
        timeout=50,
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


# File systems ----------------------------------------------------------------------------------------------------


def test_the_innermost_mount_counts(mounts: Mounts, tmp_path: Path) -> None:
    inner = tmp_path / "data" / "fast"
    inner.mkdir(parents=True)
    mounts[str(tmp_path / "data")] = "xfs"
    mounts[str(inner)] = "btrfs"
    assert file_system_of(tmp_path) == "ext4"
    assert file_system_of(tmp_path / "data") == "xfs"
    assert file_system_of(inner / "not" / "there" / "yet") == "btrfs"
    assert file_system_of(tmp_path / "database") == "ext4"


def test_links_are_followed(mounts: Mounts, tmp_path: Path) -> None:
    (tmp_path / "ram").mkdir()
    mounts[str(tmp_path / "ram")] = "tmpfs"
    (tmp_path / "link").symlink_to(tmp_path / "ram")
    assert file_system_of(tmp_path / "link") == "tmpfs"
    assert file_system_of(tmp_path / "link" / "new") == "tmpfs"


def test_relative_paths(mounts: Mounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts[str(tmp_path)] = "xfs"
    monkeypatch.chdir(tmp_path)
    assert file_system_of(Path("swap")) == "xfs"


def test_a_path_that_cannot_exist_counts_as_its_parent(mounts: Mounts, tmp_path: Path) -> None:
    mounts[str(tmp_path)] = "xfs"
    (tmp_path / "file").touch()
    assert file_system_of(tmp_path / "file" / "below") == "xfs"
    assert file_system_of(tmp_path / ("x" * 300) / "below") == "xfs"


def test_an_unknown_file_system_has_no_name(mounts: Mounts, tmp_path: Path) -> None:
    mounts.clear()
    assert file_system_of(tmp_path) == ""


def test_this_machine_tells() -> None:
    assert file_system_of(Path("/proc")) == "proc"
