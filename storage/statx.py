"""What the kernel tells about direct I/O on a file: `statx` with STATX_DIOALIGN (Linux 6.1), through ctypes."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_STRUCT_NBYTES = 256
_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 152, 156  # of stx_mask, stx_dio_mem_align, stx_dio_offset_align


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """Multiples that memory addresses, and offsets and sizes, must have; both 0: no direct I/O on this file."""

    memory_nbytes: int
    offset_nbytes: int


def direct_alignment(path: Path) -> DirectAlignment | None:
    """Of a regular file; None where the system, the C library or the file system does not tell."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    statx.restype = ctypes.c_int
    buffer = ctypes.create_string_buffer(_STRUCT_NBYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, buffer) != 0:
        return None
    if not _number(buffer, _MASK_AT) & _STATX_DIOALIGN:
        return None
    return DirectAlignment(_number(buffer, _MEMORY_AT), _number(buffer, _OFFSET_AT))


def _number(buffer: ctypes.Array[ctypes.c_char], at: int) -> int:
    return ctypes.c_uint32.from_buffer(buffer, at).value
