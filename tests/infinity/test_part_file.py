"""Files of shards: parts are written whole, in pieces of any size, and never over one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.checkpoint.part_file import PartFileWriter
from infinity.checkpoint.part_reader import PartFileReader
from storage.checksums import BLOCK_NBYTES
from tests.storage.helpers import pattern

_NBYTES = 2 * BLOCK_NBYTES + 4096


def writer_of(path: Path) -> PartFileWriter:
    return PartFileWriter(path, {"a": (torch.uint8, (_NBYTES,)), "b": (torch.uint8, (4096,))})


@pytest.mark.parametrize("piece_nbytes", [1000, BLOCK_NBYTES - 1, BLOCK_NBYTES, BLOCK_NBYTES + 1, _NBYTES])
def test_a_part_in_pieces_is_the_part_as_a_whole(tmp_path: Path, piece_nbytes: int) -> None:
    content, other = memoryview(pattern(_NBYTES, 1).tobytes()), memoryview(pattern(4096, 2).tobytes())
    files = []
    for name, size in (("whole", _NBYTES), ("pieces", piece_nbytes)):
        writer = writer_of(tmp_path / name)
        writer.write("b", other)
        with writer.appending("a") as append:
            for start in range(0, _NBYTES, size):
                append(content[start : start + size])
        entry = writer.finish()
        with PartFileReader(tmp_path / name, entry) as reader:
            assert reader.verify() == _NBYTES + 4096
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]


def test_a_part_of_another_size_is_refused_and_harms_no_other(tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "file")
    writer.write("b", memoryview(b"b" * 4096))
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(ValueError, match=f"a has {_NBYTES} bytes, given were {_NBYTES + 1}"):
        writer.write("a", memoryview(bytes(_NBYTES + 1)))
    with pytest.raises(ValueError, match=f"a has {_NBYTES} bytes, given were 7"):
        writer.write("a", memoryview(bytes(7)))
    assert (tmp_path / "file").read_bytes()[-4096:] == before[-4096:] == b"b" * 4096
