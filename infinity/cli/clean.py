"""`infinity clean`: removes swap folders whose owner is dead, and saves that nobody finishes. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from infinity.checkpoint.folder import Unfinished, remove_unfinished
from infinity.cli.console import make_console
from infinity.cli.files import check_files, write_json
from infinity.errors import ConfigError
from infinity.sizes import format_nbytes
from infinity.swap_directories import TEMPORARY_PREFIX, folders_of_ranks
from storage.cleanup import FoundFolder, find_run_folders, remove_dead
from storage.resumable import FoundRun, find_durable, remove_durable


def clean(directory: Path, report_path: Path | None, *, resumable: bool = False) -> None:
    """Remove the folders of dead owners in `directory`, and say what was removed and what was left alone.

    These are swap folders, and what killed processes were saving, checkpoints or exports, into the same folder.

    Args:
        resumable: also runs with durable steps, from which a process could go on.

    Raises:
        ConfigError: `directory` is not a folder, or the report cannot be written.
        OSError: a folder cannot be removed.
    """
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory}: this {what}; give the folder that --nvme was given")
    check_files(json=report_path)
    of_ranks = folders_of_ranks(directory)
    found, removed = _clean_all([directory, *of_ranks, *_temporary_folders(directory)])
    gone = {folder.path for folder in removed}
    left = [folder for folder in found if folder.path not in gone]
    runs = [run for place in (directory, *of_ranks) for run in find_durable(place)]
    runs_removed = [r for place in (directory, *of_ranks) for r in remove_durable(place, with_resumable=resumable)]
    emptied = {folder.path.parent for folder in (*removed, *(run.folder for run in runs_removed))}
    for place in emptied.intersection(of_ranks):
        if not any(place.iterdir()):
            place.rmdir()
    gone = {run.folder.path for run in runs_removed}
    runs_left = [run for run in runs if run.folder.path not in gone]
    saves = remove_unfinished(directory)
    console = make_console()
    if not found and not runs and not saves:
        console.print(f"{directory}: no swap folders and no unfinished saves", soft_wrap=True)
    else:
        table = _table(directory, removed, left)
        _add_runs(table, directory, runs_removed, runs_left)
        _add_saves(table, saves)
        console.print(table)
    saves_json = {is_left: [_save_json(s) for s in saves if bool(s.why_left) is is_left] for is_left in (False, True)}
    report = {
        "removed": [_to_json(f) for f in removed] + [_run_json(run) for run in runs_removed] + saves_json[False],
        "left": [_to_json(f) for f in left] + [_run_json(run) for run in runs_left] + saves_json[True],
    }
    write_json(report_path, report)


def _temporary_folders(directory: Path) -> list[Path]:
    """Folders that runs without `--nvme` made here for their swap folders."""
    return [path for path in sorted(directory.glob(f"{TEMPORARY_PREFIX}*")) if path.is_dir() and not path.is_symlink()]


def _clean_all(directories: list[Path]) -> tuple[list[FoundFolder], list[FoundFolder]]:
    """What was found and what of it was removed. A temporary folder goes with its last swap folder."""
    found: list[FoundFolder] = []
    removed: list[FoundFolder] = []
    for directory in directories:
        found += find_run_folders(directory)
        gone = remove_dead(directory)
        removed += gone
        if gone and directory.name.startswith(TEMPORARY_PREFIX) and not any(directory.iterdir()):
            directory.rmdir()
    return found, removed


def _table(directory: Path, removed: list[FoundFolder], left: list[FoundFolder]) -> Table:
    table = Table("folder", "owner", "bytes", "what happened", box=box.SIMPLE, pad_edge=False)
    for folder in removed:
        table.add_row(*_cells(directory, folder), "removed: its owner is dead")
    for folder in left:
        why = "left: its owner is running" if folder.is_alive else "left: it does not say who owns it"
        table.add_row(*_cells(directory, folder), why)
    return table


def _add_runs(table: Table, directory: Path, removed: list[FoundRun], left: list[FoundRun]) -> None:
    for run in removed:
        table.add_row(*_cells(directory, run.folder), f"removed: {_state_of(run)}")
    for run in left:
        if run.folder.is_alive:
            why = "left: its owner is running"
        else:
            why = f"left: {_state_of(run)}; continue it with `infinity train --resume`, or remove it with --resumable"
        table.add_row(*_cells(directory, run.folder), why)


def _add_saves(table: Table, saves: list[Unfinished]) -> None:
    for save in saves:
        what = "removed: nobody finishes this save" if save.why_left is None else f"left: {save.why_left}"
        table.add_row(save.path.name, "unknown", format_nbytes(save.nbytes), what)


def _cells(directory: Path, folder: FoundFolder) -> tuple[str, str, str]:
    return str(folder.path.relative_to(directory)), _owner(folder), format_nbytes(folder.nbytes)


def _state_of(run: FoundRun) -> str:
    if run.step is None:
        return "part of a run whose manifest is not here"
    return f"run at step {run.step}" if run.is_resumable else "nothing was committed in it"


def _run_json(run: FoundRun) -> dict[str, Any]:
    return _to_json(run.folder) | {"step": run.step}


def _save_json(save: Unfinished) -> dict[str, Any]:
    is_left = save.why_left is not None
    return _to_json(FoundFolder(save.path, None, is_left, save.nbytes)) | {"saving": True}


def _owner(folder: FoundFolder) -> str:
    return "unknown" if folder.pid is None else f"process {folder.pid}"


def _to_json(folder: FoundFolder) -> dict[str, Any]:
    return {"path": str(folder.path), "pid": folder.pid, "is_alive": folder.is_alive, "bytes": folder.nbytes}
