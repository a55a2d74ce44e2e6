"""Huge pages for memory of others: what the kernel notes about it, and what is left alone."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from storage.align import PAGE_NBYTES
from storage.huge_pages import HUGE_NBYTES, advise_huge_pages

SMAPS = Path("/proc/self/smaps")
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()
needs_huge_pages = pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")


def flags_of(address: int) -> set[str]:
    """What the kernel notes about the mapping of an address; "hg" stands for huge pages that were asked for."""
    is_inside = False
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < stop
        elif is_inside and first == "VmFlags:":
            return set(rest)
    raise AssertionError(f"{address:#x} is not mapped")


def mapped(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


@needs_huge_pages
def test_the_kernel_is_asked_for_all_but_parts_of_pages() -> None:
    memory = mapped(16 << 20)
    address = memory.ctypes.data
    assert "hg" not in flags_of(address)
    first = 3 * PAGE_NBYTES + 64
    assert advise_huge_pages(address + first, (8 << 20) + 100)
    for place, is_asked in (
        (0, False),
        (first, False),
        (first + PAGE_NBYTES, True),
        (first + (8 << 20) - PAGE_NBYTES, True),
        (first + (8 << 20) + PAGE_NBYTES, False),
    ):
        assert ("hg" in flags_of(address + place)) is is_asked, place


@needs_huge_pages
def test_values_stay() -> None:
    memory = mapped(4 << 20).copy()
    memory[:] = np.arange(memory.size, dtype=np.uint8)
    before = memory.copy()
    advise_huge_pages(memory.ctypes.data, memory.size)
    assert np.array_equal(memory, before)


def test_too_little_is_not_asked_for() -> None:
    memory = mapped(HUGE_NBYTES)
    assert not advise_huge_pages(memory.ctypes.data + 1, memory.size - 1)
    assert not advise_huge_pages(memory.ctypes.data, 0)
