"""Checking a checkpoint as a whole: every byte, and all that is wrong with it, not only the first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.format import INDEX_FILE, FileEntry, checksum_of_file, damaged, read_index
from infinity.checkpoint.part_reader import PartFileReader, refuse_other_size
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What became of one file: its bytes, and what is wrong with it ("" if nothing)."""

    name: str
    nbytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify_checkpoint`.

    Attributes:
        problem: what is wrong with the checkpoint beside its files ("" if nothing): a tensor that is not complete.
        strangers: files in the folder that the index does not know; they do no harm.
    """

    folder: Path
    files: tuple[FileCheck, ...]
    problem: str
    strangers: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """What is wrong: of the files that are not as they were written, and of the checkpoint as a whole."""
        return [check.problem for check in self.files if check.problem] + ([self.problem] if self.problem else [])

    @property
    def is_good(self) -> bool:
        """Whether every file is as it was written."""
        return not self.problems


def verify_checkpoint(folder: Path, on_file: Callable[[str, int], None] | None = None) -> Verification:
    """Read every byte of a checkpoint and compare it with its checksums; see that every tensor is complete.

    Args:
        on_file: told every file that has been read, and its bytes.

    Raises:
        CheckpointError: there is no checkpoint, or its index is damaged, so that nothing else can be checked.
    """
    index = read_index(folder)
    checks = []
    for name, entry in index.files.items():
        problem = _problem_of(folder / name, entry)
        checks.append(FileCheck(name, entry.nbytes, problem))
        if on_file is not None:
            on_file(name, entry.nbytes)
    problem = ""
    if not any(check.problem for check in checks):
        try:
            with CheckpointReader(folder, index) as reader:
                reader.check_structure()
        except CheckpointError as error:
            problem = str(error)
    known = {*index.files, INDEX_FILE}
    strangers = tuple(sorted(path.name for path in folder.iterdir() if path.name not in known))
    return Verification(folder, tuple(checks), problem, strangers)


def _problem_of(path: Path, entry: FileEntry) -> str:
    try:
        refuse_other_size(path, entry)
        if entry.digests:
            with PartFileReader(path, entry) as file:
                file.verify()
        elif checksum_of_file(path) != entry.checksum:
            raise damaged(path, "its checksum is wrong")
    except CheckpointError as error:
        return str(error)
    return ""
