"""Huge pages for memory that comes from elsewhere, such as the C library.

Memory that was just mapped is filled in by page faults, one for every 4 KiB, or one for 2 MiB of a huge page. Most
systems give huge pages only where a program asks for them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

from storage.align import PAGE_NBYTES, align_down, align_up

HUGE_NBYTES = 2 << 20  # of less, no page could be huge


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask the kernel for huge pages in these bytes, from their first touch on. False where it cannot be asked.

    Only a hint: values do not change, and what is mapped already stays as it is. It ends when the memory is unmapped.
    """
    start, stop = align_up(address, PAGE_NBYTES), align_down(address + nbytes, PAGE_NBYTES)
    madvise = _madvise()
    if madvise is None or stop - start < HUGE_NBYTES:
        return False
    return madvise(start, stop - start, mmap.MADV_HUGEPAGE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None  # Linux alone has it
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
