"""Which file system holds a directory, what that means for swap files, and the switch that stops copying on write.

The kernel's own table (/proc/self/mountinfo) tells; elsewhere psutil does, with less detail.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

_MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")  # blanks in paths are written as octal numbers
# ioctl numbers as on x86 and ARM. Where they are others, the call fails, which is no worse than a kernel without it.
_LONG_NBYTES = struct.calcsize("l")
_FS_IOC_GETFLAGS = 2 << 30 | _LONG_NBYTES << 16 | ord("f") << 8 | 1
_FS_IOC_SETFLAGS = 1 << 30 | _LONG_NBYTES << 16 | ord("f") << 8 | 2
_FS_NOCOW_FL = 0x00800000


class Kind(StrEnum):
    """What a file system is, as far as swap files care."""

    DISK = "disk"
    COPY_ON_WRITE = "copy on write"
    MEMORY = "memory"
    LAYERS = "layers"  # of a container, over another file system
    NETWORK = "network"
    USER_SPACE = "user space"  # served by a program (FUSE)
    UNKNOWN = "unknown"


_KINDS = {
    Kind.DISK: "ext2 ext3 ext4 xfs f2fs jfs reiserfs nilfs2 ntfs ntfs3 exfat vfat apfs hfs",
    Kind.COPY_ON_WRITE: "btrfs zfs bcachefs",
    Kind.MEMORY: "tmpfs ramfs devtmpfs rootfs hugetlbfs",
    Kind.LAYERS: "overlay aufs unionfs fuse.fuse-overlayfs",
    Kind.NETWORK: "nfs nfs4 cifs smb3 smbfs 9p virtiofs ceph glusterfs fuse.glusterfs fuse.sshfs lustre gpfs beegfs "
    "orangefs pvfs2 afs coda ocfs2 gfs2 fuse.s3fs fuse.gcsfuse fuse.ceph fuse.juicefs fuse.rclone",
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table.

    Attributes:
        number, parent: identify the mount and the one it is mounted on; `parent` is None where the table lacks it.
        point: directory.
        type_name: such as "ext4".
        source: device, or what a network file system calls its origin.
        options: of the file system, such as "upperdir=/…".
    """

    number: int
    parent: int | None
    point: Path
    type_name: str
    source: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileSystem:
    """The file system under a directory. `name` is "" when the system does not tell; `upper` belongs to overlays."""

    name: str
    kind: Kind
    source: str = ""
    upper: str = ""

    @property
    def is_memory(self) -> bool:
        return self.kind is Kind.MEMORY

    @property
    def note(self) -> str:
        """What whoever swaps there should know, in one line; "" when there is nothing to say."""
        match self.kind:
            case Kind.MEMORY:
                return f"{self.name} is memory, not a drive: what is swapped there still takes memory"
            case Kind.LAYERS:
                over = f" over {self.upper}" if self.upper else ""
                return f"{self.name} is the layers of a container{over}; a directory of the host, mounted, is better"
            case Kind.NETWORK:
                of = f" ({self.source})" if self.source else ""
                return f"{self.name}{of} is on a network: swapping is as fast, and as reliable, as that is"
            case Kind.USER_SPACE:
                return f"{self.name} is served by a program, which costs speed; a local ext4 or xfs is better"
            case Kind.COPY_ON_WRITE if self.name != "btrfs":  # there it is switched off, see `stop_copying`
                return f"{self.name} copies on every write, so swap files fragment; a local ext4 or xfs is better"
            case _:
                return ""


def parse_mounts(text: str) -> list[Mount]:
    """The mounts in a text like that of /proc/self/mountinfo; lines that are not understood are left out.

    See `man 5 proc_pid_mountinfo`: number, parent, device, root, mount point, options, optional fields, "-", type,
    source, options of the file system.
    """
    found = []
    for line in text.splitlines():
        first, separator, second = line.partition(" - ")
        before, after = first.split(), second.split(" ")
        if not separator or len(before) < 6 or not (before[0].isdigit() and before[1].isdigit()):
            continue
        type_name, source, options = (*after, "", "")[:3]
        found.append((int(before[0]), int(before[1]), before[4], type_name, source, options))
    numbers = {number for number, *_ in found}
    return [
        Mount(
            number,
            parent if parent in numbers and parent != number else None,
            Path(_unescape(point)),
            type_name,
            _unescape(source),
            tuple(_unescape(option) for option in options.split(",")),
        )
        for number, parent, point, type_name, source, options in found
    ]


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def read_mounts() -> list[Mount]:
    """The mounts of this process."""
    try:
        return parse_mounts(_MOUNTINFO.read_text(errors="surrogateescape"))
    except OSError:
        partitions = psutil.disk_partitions(all=True)
        return [
            Mount(number, None, Path(part.mountpoint), part.fstype, part.device)
            for number, part in enumerate(partitions)
        ]


def mount_at(mounts: Sequence[Mount], path: Path) -> Mount | None:
    """The mount that an absolute path without links leads to.

    As the kernel does: from the root on, whatever is mounted on the mount that has been reached covers it. A mount
    point that lies under another mount, made later, is therefore not taken.
    """
    children: dict[tuple[int | None, Path], Mount] = {(mount.parent, mount.point): mount for mount in mounts}
    current: Mount | None = None
    for place in (*reversed(path.parents), path):
        for _ in mounts:  # mounts are stacked no deeper than there are mounts
            below = children.get((current.number, place)) if current is not None else None
            orphan = children.get((None, place))
            found = below or (orphan if orphan is not current else None)
            if found is None or found is current:
                break
            current = found
    return current


def find_mount(path: Path) -> Mount | None:
    """The mount that holds a path, or will when it is made; None when the system does not tell."""
    return mount_at(read_mounts(), existing_part(path))


def existing_part(path: Path) -> Path:
    """The path without links, or what of it exists."""
    # A path that may not be looked at counts like one that is not there; `Path.exists` would raise.
    candidates = (path.absolute(), *path.absolute().parents)
    return next((p for p in candidates if os.path.exists(p)), Path("/")).resolve()


def find_file_system(path: Path) -> FileSystem:
    """The file system that holds a path, or will when it is made."""
    return describe_mount(find_mount(path))


def describe_mount(mount: Mount | None) -> FileSystem:
    """What a mount means for swap files."""
    if mount is None:
        return FileSystem("", Kind.UNKNOWN)
    name = mount.type_name
    kind = _KIND_OF.get(name, Kind.USER_SPACE if name.startswith("fuse") else Kind.UNKNOWN)
    uppers = [option.removeprefix("upperdir=") for option in mount.options if option.startswith("upperdir=")]
    return FileSystem(name, kind, mount.source, uppers[0] if uppers else "")


def stop_copying(folder: Path) -> str | None:
    """Switch copy on write, and with it checksums, off for files that will be made in a folder (FS_NOCOW_FL).

    Only btrfs needs it, before a file has data. Files inherit it, so it is set on the folder they are made in.

    Returns:
        None, or why that is not possible.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        flags = _flags_of(fd) | _FS_NOCOW_FL
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, struct.pack("i", flags).ljust(_LONG_NBYTES, b"\0"))
        return None
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(fd)


def is_written_in_place(fd: int) -> bool:
    """Whether copy on write has been switched off for an open file."""
    try:
        return bool(_flags_of(fd) & _FS_NOCOW_FL)
    except OSError:
        return False  # a file system without such flags


def _flags_of(fd: int) -> int:
    (flags,) = struct.unpack_from("i", fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(_LONG_NBYTES)))
    return int(flags)


def sync_data(fd: int) -> None:
    """Wait until the content of a file is on its drive. macOS has no fdatasync, and its fsync stops at the drive."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    elif hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def make_folders(folder: Path, mode: int = 0o777) -> None:
    """Make a folder with its parents, unless they are there, and bring the new names to the drive."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the drive."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
