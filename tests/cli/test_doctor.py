"""`infinity doctor`: what it finds, what it advises, and its exit code."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.doctor import directories, memory, software
from infinity.doctor.check import Status
from storage import filesystems
from storage.backends.probe import Capabilities
from storage.filesystems import Mount, describe_mount
from storage.statx import DirectAlignment, direct_alignment
from tests.cli.command import ROOT, call

GIB = 1 << 30


def test_looks_at_the_machine_and_at_every_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    code, output, error = call("doctor", first, second, "--json", tmp_path / "d.json")
    assert code == 0, error
    report = json.loads((tmp_path / "d.json").read_text())
    by_subject: dict[str, set[str]] = {}
    for check in report["checks"]:
        by_subject.setdefault(check["subject"], set()).add(check["name"])
        assert check["found"]
        assert check["status"] in ("ok", "note", "warning", "failure")
        assert check["name"] in output
    machine = {"torch", "CUDA", "system", "memory", "memlock", "default directory", "kernel cache", "processor"}
    assert machine | {"GPUDirect Storage"} == by_subject[""]
    of_directory = {"file system", "direct I/O", "alignment", "free space", "stale swap"}
    assert by_subject[str(first)] == by_subject[str(second)] == of_directory
    assert list(first.iterdir()) == []


def test_brackets_in_a_directory_are_no_markup(tmp_path: Path) -> None:
    folder = tmp_path / "a[b]" / "[" / "bold]"
    folder.mkdir(parents=True)
    code, output, error = call("doctor", folder)
    assert code == 0, error
    assert str(folder) in "".join(output.split())


def test_every_warning_comes_with_the_line_that_repairs_it(tmp_path: Path) -> None:
    code, _, _ = call("doctor", tmp_path / "none", "--json", tmp_path / "d.json")
    assert code == 0  # `train` makes the directory
    for check in json.loads((tmp_path / "d.json").read_text())["checks"]:
        assert bool(check["fix"]) or check["status"] in ("ok", "note"), check


def test_exit_code_tells_that_training_is_impossible(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    code, output, _ = call("doctor", file)
    assert code == 1
    assert "is not a directory" in output
    assert file.read_text() == "mine"


def test_files_of_the_user_are_left_alone(tmp_path: Path) -> None:
    for name in ("probe", "alignment"):
        (tmp_path / name).write_text("mine")
    assert call("doctor", tmp_path)[0] == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"probe": "mine", "alignment": "mine"}


@pytest.mark.parametrize(
    ("kind", "status", "advice"),
    [
        ("ext4", Status.OK, ""),
        ("xfs", Status.OK, ""),
        ("btrfs", Status.OK, ""),
        ("zfs", Status.WARNING, "--nvme"),
        ("tmpfs", Status.WARNING, "--nvme"),
        ("overlay", Status.WARNING, "docker run -v"),
        ("nfs4", Status.WARNING, "--nvme"),
        ("fuse.sshfs", Status.WARNING, "--nvme"),
        ("minix", Status.NOTE, ""),
        ("", Status.NOTE, ""),
    ],
)
def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: Status, advice: str) -> None:
    monkeypatch.setattr(directories, "describe_drive", lambda _: {"device": "nvme0n1"})
    check = directories.check_file_system(tmp_path, describe_mount(Mount(1, None, tmp_path, kind)))
    assert check.status is status
    assert advice in check.fix
    assert (check.fix == "") == (advice == "")


@pytest.mark.parametrize(
    ("problem", "better", "status"),
    [
        (None, None, Status.OK),
        (None, "tmpfs is memory", Status.NOTE),
        ("it is refused", None, Status.WARNING),
        ("it is refused", "tmpfs is memory", Status.WARNING),
    ],
)
def test_direct_transfers(tmp_path: Path, problem: str | None, better: str | None, status: Status) -> None:
    found = Capabilities(describe_mount(Mount(1, None, tmp_path, "ext4")), problem, better)
    check = directories.check_direct(tmp_path, found)
    assert check.status is status
    assert (problem or better or "came back") in check.found
    assert bool(check.fix) == (status is Status.WARNING)


@pytest.mark.parametrize(
    ("told", "logical", "problem", "source", "status"),
    [
        (DirectAlignment(4, 512), 512, None, "statx", Status.OK),
        (DirectAlignment(4096, 65536), 512, None, "statx", Status.WARNING),
        (None, 4096, None, "logical_block_size", Status.OK),
        (None, None, None, "tried", Status.OK),
    ],
)
def test_alignment_comes_from_whoever_knows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: DirectAlignment | None,
    logical: int | None,
    problem: str | None,
    source: str,
    status: Status,
) -> None:
    monkeypatch.setattr(directories, "direct_alignment", lambda _: told)
    monkeypatch.setattr(directories, "describe_drive", lambda _: {"logical_block_bytes": logical} if logical else {})
    check = directories.check_alignment(tmp_path, tmp_path, problem)
    assert (check.data["source"], check.status) == (source, status)
    assert source in check.found


def test_alignment_when_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "direct_alignment", lambda _: None)
    monkeypatch.setattr(directories, "describe_drive", lambda _: {})
    assert directories.check_alignment(tmp_path, tmp_path, "it is refused").status is Status.NOTE


def test_statx_answers_with_powers_of_two_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    told = direct_alignment(file)
    if told is not None:
        for nbytes in (told.memory_nbytes, told.offset_nbytes):
            assert nbytes & (nbytes - 1) == 0
    assert direct_alignment(tmp_path / "none") is None


def test_stale_folders_are_found_with_the_command_that_removes_them(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from storage.swapfile import RunFolder\n"
        'RunFolder(Path(sys.argv[1]), "x"); os._exit(0)'
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=200, check=True)
    check = directories.check_stale_folders(tmp_path)
    assert check.status is Status.WARNING
    assert check.fix == f"infinity clean {tmp_path}"
    assert call("clean", tmp_path)[0] == 0
    assert directories.check_stale_folders(tmp_path).status is Status.OK


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_cgroup_limit_of_version_2_is_the_smallest_above(tmp_path: Path) -> None:
    _write(tmp_path / "self", "0::/user.slice/job")
    _write(tmp_path / "cg/user.slice/memory.max", str(4 * GIB))
    _write(tmp_path / "cg/user.slice/job/memory.max", "max")
    assert memory.cgroup_limit(tmp_path / "self", tmp_path / "cg") == (
        4 * GIB,
        tmp_path / "cg/user.slice/memory.max",
    )


def test_cgroup_limit_of_version_1(tmp_path: Path) -> None:
    _write(tmp_path / "self", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/")
    # In a container the path of the host does not exist; the group is the root.
    _write(tmp_path / "cg/memory/memory.limit_in_bytes", str(2 * GIB))
    limit = memory.cgroup_limit(tmp_path / "self", tmp_path / "cg")
    assert limit is not None
    assert limit[0] == 2 * GIB
    _write(tmp_path / "cg/memory/memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000))
    assert memory.cgroup_limit(tmp_path / "self", tmp_path / "cg") is None


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert memory.cgroup_limit(tmp_path / "none", tmp_path) is None


def test_a_limit_below_what_is_available_names_a_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "cgroup_limit", lambda: (3 * GIB, tmp_path / "memory.max"))
    monkeypatch.setattr(memory.psutil, "virtual_memory", type("Memory", (), {"available": 64 * GIB}))
    check = memory.check_memory()
    assert check.status is Status.WARNING
    assert check.fix.startswith("infinity train --host-budget 1536MiB")


@pytest.mark.parametrize(
    ("limit", "has_cuda", "status"),
    [(resource.RLIM_INFINITY, True, Status.OK), (8 << 20, False, Status.OK), (8 << 20, True, Status.WARNING)],
)
def test_memlock_matters_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, limit: int, has_cuda: bool, status: Status
) -> None:
    monkeypatch.setattr(memory.resource, "getrlimit", lambda _: (limit, limit))
    assert memory.check_memlock(has_cuda=has_cuda).status is status


@pytest.mark.parametrize(("used", "status"), [("/var/tmp", Status.OK), ("/tmp", Status.WARNING)])
def test_temporary_directory_in_memory(monkeypatch: pytest.MonkeyPatch, used: str, status: Status) -> None:
    monkeypatch.setattr(software.tempfile, "gettempdir", lambda: "/tmp")
    mounts = [Mount(1, None, Path("/"), "ext4"), Mount(2, 1, Path("/tmp"), "tmpfs")]
    monkeypatch.setattr(filesystems, "read_mounts", lambda: mounts)
    monkeypatch.setattr(software, "default_directory", lambda: Path(used))
    assert software.check_temporary_directory().status is status


def test_kernel_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    check = software.check_numba_cache()
    assert check.status is Status.WARNING
    assert "NUMBA_CACHE_DIR" in check.fix
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    assert software.check_numba_cache().status is Status.OK
