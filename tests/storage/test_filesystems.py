"""Which file system holds a directory: on recorded mount tables, and on real ones in files of their own."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storage import filesystems
from storage.backends.probe import Engine, choose_engine, probe_direct, probe_folder
from storage.filesystems import Kind, Mount, describe_mount, find_file_system, mount_at, parse_mounts, stop_copying
from storage.pool import HostPool
from storage.statx import direct_alignment
from storage.store import ShardStore, StorageOptions
from tests.mounts import MakeFileSystem, mounting, run_tool
from tests.storage.helpers import MIB, PAGE, TAG, filled, finish

# A host with several drives; the second mount on /srv covers the first one and what was mounted below it.
_HOST = r"""
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
23 22 0:22 / /proc rw,nosuid shared:13 - proc proc rw
24 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=16G
25 24 0:24 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
30 22 259:5 / /mnt/nvme\0401 rw,relatime shared:30 master:1 - xfs /dev/nvme1n1 rw,attr2,noquota
31 22 0:45 /@swap /mnt/pool rw,relatime shared:31 - btrfs /dev/sda1 rw,space_cache=v2,subvol=/@swap
32 31 0:50 / /mnt/pool/tank rw,relatime shared:32 - zfs tank/swap rw,xattr,posixacl
33 22 0:52 / /home rw,relatime shared:33 - nfs4 server:/export/home rw,vers=4.2,addr=10.0.0.1
34 33 0:53 / /home/me/remote rw,nosuid - fuse.sshfs me@host: rw,user_id=1000
35 22 8:17 / /media/usb rw - fuseblk /dev/sdb1 rw,user_id=0
40 22 259:7 / /srv rw - ext4 /dev/nvme2n1 rw
41 40 259:8 / /srv/fast rw - xfs /dev/nvme3n1 rw
42 40 0:60 / /srv rw - tmpfs tmpfs rw
this line is not a mount
"""
_CONTAINER = (
    "700 650 0:100 / / rw,relatime master:210 - overlay overlay rw,lowerdir=/var/l/A:/var/l/B,"
    "upperdir=/var/lib/docker/overlay2/f00/diff,workdir=/var/lib/docker/overlay2/f00/work\n"
    "701 700 259:2 /data /swap rw - ext4 /dev/nvme0n1p2 rw\n"
)


@pytest.mark.parametrize(
    ("path", "name", "kind", "note"),
    [
        ("/var/tmp", "ext4", Kind.DISK, ""),
        ("/dev/shm/x", "tmpfs", Kind.MEMORY, "memory, not a drive"),
        ("/mnt/nvme 1/swap", "xfs", Kind.DISK, ""),
        ("/mnt/nvme", "ext4", Kind.DISK, ""),
        ("/mnt/pool/a", "btrfs", Kind.COPY_ON_WRITE, ""),
        ("/mnt/pool/tank/a", "zfs", Kind.COPY_ON_WRITE, "fragment"),
        ("/home/me", "nfs4", Kind.NETWORK, "nfs4 (server:/export/home) is on a network"),
        ("/home/me/remote/a", "fuse.sshfs", Kind.NETWORK, "on a network"),
        ("/media/usb", "fuseblk", Kind.USER_SPACE, "served by a program"),
        ("/srv/fast", "tmpfs", Kind.MEMORY, "memory"),
        ("/proc", "proc", Kind.UNKNOWN, ""),
    ],
)
def test_a_host(path: str, name: str, kind: Kind, note: str) -> None:
    found = describe_mount(mount_at(parse_mounts(_HOST), Path(path)))
    assert (found.name, found.kind) == (name, kind)
    assert note in found.note
    assert bool(found.note) == bool(note)


def test_a_container_names_its_upper_layer() -> None:
    mounts = parse_mounts(_CONTAINER)
    found = describe_mount(mount_at(mounts, Path("/workspace/swap")))
    assert (found.kind, found.upper) == (Kind.LAYERS, "/var/lib/docker/overlay2/f00/diff")
    assert found.upper in found.note
    assert "\n" not in found.note
    assert describe_mount(mount_at(mounts, Path("/swap/run"))).kind is Kind.DISK


def test_a_table_without_numbers_of_parents_is_read_by_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What psutil tells on systems without /proc."""
    part = type("Part", (), {})
    rows = [("/", "apfs", "/dev/disk1"), ("/Volumes/Fast", "apfs", "/dev/disk4"), ("/Volumes/Net", "smbfs", "//h/s")]
    parts = []
    for row in rows:
        parts.append(part())
        parts[-1].mountpoint, parts[-1].fstype, parts[-1].device = row
    monkeypatch.setattr(filesystems, "_MOUNTINFO", Path("/nonexistent"))
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)
    mounts = filesystems.read_mounts()
    assert [mount_at(mounts, Path(p)).source for p in ("/tmp", "/Volumes/Fast/x", "/Volumes/Faster")] == [  # type: ignore[union-attr]
        "/dev/disk1",
        "/dev/disk4",
        "/dev/disk1",
    ]
    assert describe_mount(mount_at(mounts, Path("/Volumes/Net"))).kind is Kind.NETWORK


def test_no_mounts_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filesystems, "read_mounts", list)
    assert find_file_system(tmp_path).name == ""


def test_this_machine_tells() -> None:
    assert find_file_system(Path("/proc")).name == "proc"
    known = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    assert find_file_system(Path("/")).name == known["/"]


def test_paths_that_are_links_relative_missing_or_impossible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ram").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "ram")
    mounts = [Mount(1, None, Path("/"), "ext4"), Mount(2, 1, tmp_path / "ram", "tmpfs")]
    monkeypatch.setattr(filesystems, "read_mounts", lambda: mounts)
    monkeypatch.chdir(tmp_path)
    for path, name in (("link", "tmpfs"), ("link/new/er", "tmpfs"), ("file/below", "ext4"), ("x" * 300, "ext4")):
        assert find_file_system(tmp_path / path).name == name
        assert find_file_system(Path(path)).name == name


# Real file systems ---------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in /dev/shm."""
    if find_file_system(Path("/dev/shm")).name != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    folder = Path("/dev/shm") / f"infinity-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_memory_is_used_through_the_page_cache_that_it_is(in_memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, reason = choose_engine(in_memory, "auto")
    assert engine is Engine.BUFFERED
    assert probe_direct(in_memory) is not None or reason == "tmpfs is memory"  # direct works there from Linux 6.6 on
    (message,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert message == f"{in_memory}: tmpfs is memory, not a drive: what is swapped there still takes memory"


@pytest.fixture
def make_file_system(tmp_path: Path) -> Iterator[MakeFileSystem]:
    with mounting(tmp_path) as make:
        yield make


def _flags(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    try:
        return int(struct.unpack_from("i", fcntl.ioctl(fd, filesystems._FS_IOC_GETFLAGS, bytes(8)))[0])
    finally:
        os.close(fd)


def _write_and_read(folder: Path, pool: HostPool, engine: str) -> None:
    """What is written to a store there comes back; its swap file is made as on that file system it should."""
    store = ShardStore.open([folder], MIB, options=StorageOptions(free_margin_nbytes=0))
    try:
        assert store.engine_name.startswith(engine)
        if find_file_system(folder).name == "btrfs":
            (swap,) = folder.rglob("*.swap")
            assert _flags(swap) & filesystems._FS_NOCOW_FL
        store.create("key", MIB)
        with filled(pool, MIB, 1) as written, pool.lease(MIB, "read") as read:
            finish(store.submit_write("key", written.memory, tag=TAG))
            finish(store.submit_read("key", read.memory, tag=TAG))
            assert read.memory == written.memory
    finally:
        store.close()


@pytest.mark.parametrize("sector_nbytes", [512, 4096])
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_a_real_file_system(make_file_system: MakeFileSystem, pool: HostPool, kind: str, sector_nbytes: int) -> None:
    point = make_file_system(kind, sector_nbytes=sector_nbytes)
    assert find_file_system(point / "not" / "yet").name == kind
    _write_and_read(point, pool, "direct (O_DIRECT works here)")
    if kind != "btrfs":  # which tells the size of its own blocks
        file = point / "file"
        file.write_bytes(bytes(PAGE))
        told = direct_alignment(file)
        assert told is None or told.offset_nbytes == sector_nbytes


def test_btrfs_without_a_way_out_of_copying_goes_through_the_page_cache(
    make_file_system: MakeFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = make_file_system("btrfs")
    monkeypatch.setattr(filesystems, "_FS_IOC_SETFLAGS", 0)
    engine, reason = choose_engine(point, "auto")
    assert engine is Engine.BUFFERED
    assert "copy on write" in reason
    assert choose_engine(point, "direct")[0] is Engine.DIRECT  # our writes never change their memory


def test_layers_tell_what_is_below(tmp_path: Path, make_file_system: MakeFileSystem, pool: HostPool) -> None:
    disk = make_file_system("ext4")
    lower, upper, work, merged = (disk / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    run_tool("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={lower},upperdir={upper},workdir={work}", merged)
    try:
        found = probe_folder(merged)
        assert (found.file_system.kind, found.file_system.upper) == (Kind.LAYERS, str(upper))
        assert found.direct_problem is None
        _write_and_read(merged, pool, "direct")
    finally:
        subprocess.run(["umount", str(merged)], check=True, timeout=200)


def test_stopping_copies_says_why_it_cannot(tmp_path: Path, in_memory: Path) -> None:
    assert stop_copying(tmp_path / "missing") == "No such file or directory"
    refusal = stop_copying(in_memory)
    assert refusal is None or refusal
