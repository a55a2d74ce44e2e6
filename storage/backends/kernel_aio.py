"""Asynchronous transfers of the Linux kernel (`io_submit`, `io_getevents`), called by number through ctypes.

One thread can keep many small transfers at a drive: a system call starts several and another one collects several,
where a thread per transfer pays a switch of contexts and a turn of the interpreter's lock for each. ctypes lets go of
that lock during a call. The layouts are those of <linux/aio_abi.h>, the numbers those of the kernel's system call
tables; see `man 2 io_submit`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

import numpy as np

from storage.types import Op

# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209)}
_NUMBERS_ELSEWHERE = (0, 1, 4, 2)  # the generic table, which newer architectures share
_GENERIC = ("aarch64", "riscv64", "loongarch64")

_IOCB_NBYTES, _EVENT_NBYTES = 64, 32
_DATA_AT, _CALL_AT = 0, 16
_DATA = struct.Struct("=Q")
_CALL = struct.Struct("=HhIQQq")  # aio_lio_opcode, aio_reqprio, aio_fildes, aio_buf, aio_nbytes, aio_offset
_EVENT = struct.Struct("=QQqq")  # data, obj, res, res2
_OPCODES = {Op.READ: 0, Op.WRITE: 1}
_POLL, _POLLIN = 5, 1


def why_not() -> str | None:
    """Why this machine's kernel cannot be asked; None when it can."""
    if platform.system() != "Linux":
        return "asynchronous transfers by system call are Linux's"
    if ctypes.sizeof(ctypes.c_void_p) != 8 or _numbers() is None:
        return f"the numbers of its system calls are not known for {platform.machine()}"
    if not hasattr(os, "eventfd"):
        return "this Python has no os.eventfd"
    try:
        KernelAio(1).close()
    except OSError as error:
        return f"the kernel refuses: {error.strerror}"
    return None


def address_of(memory: memoryview) -> int:
    """Where memory starts. It stays there as long as somebody holds the view."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class KernelAio:
    """Up to `depth` transfers in the kernel. One thread uses it; only `ring_bell` is for others.

    A transfer has a slot, 0 to `depth` - 1, from `prepare` until `wait` has told how it ended.

    Raises:
        OSError: the kernel has no such thing, lacks what this needs of it (Linux 4.18), or has no room
            (fs.aio-max-nr).
    """

    def __init__(self, depth: int) -> None:
        numbers = _numbers()
        if numbers is None:
            raise OSError(errno.ENOSYS, f"numbers of system calls are not known for {platform.machine()}")
        self._bell_slot = depth
        slots = depth + 1
        self._setup, self._destroy, self._getevents, self._submit = (ctypes.c_long(one) for one in numbers)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._blocks = bytearray(_IOCB_NBYTES * slots)
        self._blocks_address = address_of(memoryview(self._blocks))
        self._pointers = (ctypes.c_uint64 * slots)()
        self._pointers_address = ctypes.addressof(self._pointers)
        self._events = bytearray(_EVENT_NBYTES * slots)
        self._events_address = ctypes.c_void_p(address_of(memoryview(self._events)))
        self._most_events = ctypes.c_long(slots)
        for slot in range(slots):
            _DATA.pack_into(self._blocks, slot * _IOCB_NBYTES + _DATA_AT, slot)
        self._bell = -1
        context = ctypes.c_ulong(0)
        self._check(self._syscall(self._setup, ctypes.c_uint(slots), ctypes.byref(context)))
        self._context = context
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._hang_bell()
        except BaseException:
            self.close()
            raise

    def prepare(self, slot: int, op: Op, fd: int, address: int, nbytes: int, offset: int) -> None:
        """Describe the transfer of a slot."""
        _CALL.pack_into(self._blocks, slot * _IOCB_NBYTES + _CALL_AT, _OPCODES[op], 0, fd, address, nbytes, offset)

    def submit(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Start the transfers of these slots; those that did not start, as (slot, -errno)."""
        for place, slot in enumerate(slots):
            self._pointers[place] = self._blocks_address + slot * _IOCB_NBYTES
        refused, start = [], 0
        while start < len(slots):
            pointers = ctypes.c_void_p(self._pointers_address + 8 * start)
            taken = self._syscall(self._submit, self._context, ctypes.c_long(len(slots) - start), pointers)
            if taken > 0:
                start += taken
                continue
            number = ctypes.get_errno() if taken < 0 else errno.EAGAIN
            if number != errno.EINTR:
                refused.append((slots[start], -number))  # the first one is at fault
                start += 1
        return refused

    def wait(self) -> list[tuple[int, int]]:
        """Block until a transfer has ended or the bell rings; what has ended, as (slot, bytes moved or -errno)."""
        count = self._syscall(
            self._getevents, self._context, ctypes.c_long(1), self._most_events, self._events_address, None
        )
        if count < 0:
            if (number := ctypes.get_errno()) == errno.EINTR:
                return []
            raise OSError(number, os.strerror(number))
        ended, has_rung = [], False
        for at in range(0, count * _EVENT_NBYTES, _EVENT_NBYTES):
            slot, _, result, _ = _EVENT.unpack_from(self._events, at)
            if slot == self._bell_slot:
                has_rung = True
            else:
                ended.append((slot, result))
        if has_rung:
            os.eventfd_read(self._bell)
            self._hang_bell()
        return ended

    def ring_bell(self) -> None:
        """End `wait`. For other threads."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let go of the kernel's part; waits for transfers that are in flight. Idempotent."""
        if self._context.value:
            self._syscall(self._destroy, self._context)
            self._context.value = 0
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _hang_bell(self) -> None:
        at = self._bell_slot * _IOCB_NBYTES + _CALL_AT
        _CALL.pack_into(self._blocks, at, _POLL, 0, self._bell, _POLLIN, 0, 0)
        for _, result in self.submit([self._bell_slot]):
            raise OSError(-result, os.strerror(-result))

    def _check(self, answer: int) -> None:
        if answer < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _numbers() -> tuple[int, int, int, int] | None:
    machine = platform.machine()
    return _NUMBERS_ELSEWHERE if machine in _GENERIC else _NUMBERS.get(machine)
