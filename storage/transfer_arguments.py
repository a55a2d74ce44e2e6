"""The arguments of a transfer: whether its memory and its span of a key can be used."""

from __future__ import annotations

import numpy as np

from storage.align import PAGE_NBYTES, is_aligned
from storage.types import Op


def as_pages(op: Op, key: str, memory: memoryview) -> memoryview:
    """The memory of a transfer as bytes.

    Raises:
        ValueError: it is not contiguous, starts or ends inside a page, or is to be read into and cannot be written to.
    """
    nbytes = memory.nbytes
    if not nbytes or not is_aligned(nbytes):
        raise ValueError(f"a {op.value} of {nbytes} bytes for key {key!r}: sizes are positive multiples of 4096")
    if not memory.c_contiguous:
        raise ValueError(f"the memory of a {op.value} for key {key!r} is not contiguous")
    if op is Op.READ and memory.readonly:
        raise ValueError(f"the memory of a read for key {key!r} cannot be written to")
    pages = memory.cast("B")
    address = int(np.frombuffer(pages, np.uint8).__array_interface__["data"][0])
    if not is_aligned(address, PAGE_NBYTES):
        raise ValueError(
            f"the memory of a {op.value} for key {key!r} starts at address {address:#x}, which is not a multiple of "
            f"{PAGE_NBYTES}; lease it from a HostPool"
        )
    return pages


def check_span(key: str, size: int, offset: int, nbytes: int) -> None:
    """Of a key of `size` bytes.

    Raises:
        ValueError: the transfer begins inside a page, or leaves the key.
    """
    if not is_aligned(offset):
        raise ValueError(f"a transfer at offset {offset} of key {key!r}: offsets are multiples of 4096")
    if offset < 0 or offset + nbytes > size:
        raise ValueError(f"a transfer of {nbytes} bytes at {offset} leaves key {key!r}, which has {size} bytes")
