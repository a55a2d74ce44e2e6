from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from storage.backends.system import SystemCalls, move
from storage.errors import ReadError, ShortIoError, SwapFullError, WriteError
from storage.types import Op
from tests.storage.helpers import PAGE, request


class FakeFile:
    """Answers each call with the next of `answers`: an error to raise, or a limit of bytes to move."""

    def __init__(self, nbytes: int, answers: Sequence[int | OSError] = ()) -> None:
        self.data = bytearray(range(256)) * (nbytes // 256)
        self.answers = list(answers)
        self.offsets: list[int] = []

    def calls(self) -> SystemCalls:
        return SystemCalls(preadv=self.preadv, pwritev=self.pwritev)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        nbytes = self._answer(offset, len(buffer))
        buffer[:nbytes] = self.data[offset : offset + nbytes]
        return nbytes

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        (buffer,) = buffers
        nbytes = self._answer(offset, len(buffer))
        self.data[offset : offset + nbytes] = buffer[:nbytes]
        return nbytes

    def _answer(self, offset: int, nbytes: int) -> int:
        self.offsets.append(offset)
        answer = self.answers.pop(0) if self.answers else nbytes
        if isinstance(answer, OSError):
            raise answer
        return min(answer, nbytes, max(0, len(self.data) - offset))


@pytest.mark.parametrize("op", list(Op))
def test_short_transfers_are_resumed_at_a_page(op: Op) -> None:
    file = FakeFile(8 * PAGE, [PAGE, 2 * PAGE + 512, 100])
    memory = memoryview(bytearray(b"\x07") * (5 * PAGE))
    move(file.calls(), request(op, memory, offset=PAGE), 0, 5 * PAGE)
    assert file.offsets == [PAGE, 2 * PAGE, 4 * PAGE, 4 * PAGE]
    assert memory == file.data[PAGE : 6 * PAGE]


@pytest.mark.parametrize("interruption", [InterruptedError(errno.EINTR, ""), BlockingIOError(errno.EAGAIN, "")])
def test_interrupted_transfers_are_retried(interruption: OSError) -> None:
    file = FakeFile(2 * PAGE, [interruption, PAGE, interruption])
    memory = memoryview(bytearray(2 * PAGE))
    move(file.calls(), request(Op.READ, memory), 0, 2 * PAGE)
    assert memory == file.data


def test_a_device_that_is_busy_for_ever_is_an_error() -> None:
    file = FakeFile(PAGE, [BlockingIOError(errno.EAGAIN, "")] * 1000)
    with pytest.raises(ReadError) as caught:
        move(file.calls(), request(Op.READ, memoryview(bytearray(PAGE))), 0, PAGE)
    assert caught.value.errno == errno.EAGAIN


def test_a_device_that_never_gets_past_a_page_is_an_error() -> None:
    file = FakeFile(2 * PAGE, [512] * 1000)
    with pytest.raises(ShortIoError):
        move(file.calls(), request(Op.READ, memoryview(bytearray(PAGE))), 0, PAGE)


def test_the_end_of_the_file_is_an_error() -> None:
    file = FakeFile(2 * PAGE)
    with pytest.raises(ShortIoError, match="4096 bytes early") as caught:
        move(file.calls(), request(Op.READ, memoryview(bytearray(2 * PAGE)), offset=PAGE), 0, 2 * PAGE)
    assert (caught.value.offset, caught.value.nbytes, caught.value.key) == (2 * PAGE, PAGE, "key")


@pytest.mark.parametrize(
    ("op", "number", "kind"),
    [
        (Op.READ, errno.EIO, ReadError),
        (Op.WRITE, errno.EIO, WriteError),
        (Op.WRITE, errno.ENOSPC, SwapFullError),
        (Op.WRITE, errno.EDQUOT, SwapFullError),
        (Op.WRITE, errno.EFBIG, SwapFullError),
        (Op.READ, errno.EINVAL, ReadError),
    ],
)
def test_an_error_says_which_block(op: Op, number: int, kind: type[ReadError | WriteError | SwapFullError]) -> None:
    file = FakeFile(8 * PAGE, [PAGE, OSError(number, "")])
    with pytest.raises(kind) as caught:
        move(file.calls(), request(op, memoryview(bytearray(4 * PAGE)), offset=PAGE), PAGE, 3 * PAGE)
    error = caught.value
    assert (error.path, error.offset, error.nbytes) == ("file", 3 * PAGE, PAGE)
    assert (error.errno, error.key) == (number, "key")
    assert error.__cause__ is not None
