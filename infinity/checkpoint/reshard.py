"""Writing a checkpoint anew in files of another size: those of many ranks and groups become a few.

Loading never needs it, because every number of ranks reads every checkpoint; moving and keeping many files may.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from infinity.checkpoint.format import BUFFERS_FILE
from infinity.checkpoint.parts import saved_buffers
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.writer import DEFAULT_FILE_NBYTES, NewParameter, NewRest, NewTensor, write_checkpoint
from infinity.errors import CheckpointError


def reshard_checkpoint(
    source: Path,
    target: Path,
    *,
    file_nbytes: int = DEFAULT_FILE_NBYTES,
    on_file: Callable[[str, int], None] | None = None,
) -> None:
    """Write the same state to another folder, in files of at most `file_nbytes` bytes of tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or `target` is it, is something else, or cannot be written.
    """
    if source.resolve() == target.resolve():
        raise CheckpointError(f"{target} is the checkpoint that is read; give another folder")
    with CheckpointReader(source) as checkpoint:
        checkpoint.check_structure()
        index = checkpoint.index
        small = {
            name: (source / name).read_bytes()
            for name, entry in index.files.items()
            if not entry.digests and name != BUFFERS_FILE
        }
        rest = NewRest(
            index.step, index.precision, index.optimizer, index.rng, saved_buffers(source), small, index.aliases
        )
        parameters = [_parameter(checkpoint, name) for name in index.parameters]
        write_checkpoint(target, parameters, rest, file_nbytes=file_nbytes, on_file=on_file)


def _parameter(checkpoint: CheckpointReader, name: str) -> NewParameter:
    entry = checkpoint.entry(name)
    tensors = {
        kind: NewTensor(checkpoint.dtype(name, kind), partial(checkpoint.read, name, kind)) for kind in entry.tensors
    }
    return NewParameter(name, entry.shape, entry.trains, entry.step, tensors)
