"""Checkpoints that are missing, damaged or of something else; saving that fails, is killed, or would destroy."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.checkpoint import folder as folders
from infinity.checkpoint import tensor_file
from infinity.checkpoint.folder import replaced_folder
from infinity.checkpoint.format import BUFFERS_FILE, DamagedCheckpointError, checksum, checksum_of_file
from infinity.checkpoint.parts import save_buffers
from infinity.checkpoint.reader import CheckpointReader
from infinity.checkpoint.tensor_file import TensorFileReader
from storage.filesystems import FileSystem, Kind
from tests.conftest import small_config
from tests.resume import Run
from tests.zoo import Net, batch, build, loss_of

MakeEngine = Callable[..., infinity.Engine]
_REPOSITORY = Path(__file__).parents[2]
_TIGHT = {"host": {"budget": "300KiB"}}


@pytest.fixture
def run(offload: MakeEngine) -> Run:
    """Two steps of a run."""
    started = Run(lambda model: offload(model, **_TIGHT), Net)
    started.train(0, 2)
    return started


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    run.save(tmp_path / "saved")
    return tmp_path / "saved"


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def change(path: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def flip(data: bytearray, place: int = -5) -> None:
    data[place] ^= 1


def rewrite_index(folder: Path, **changes: Any) -> None:
    path = folder / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


GROUP = "group-00001.rank0.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda f: f.rename(f.with_name("moved")), "nothing is there"),
    "no index": (lambda f: _remove(f, "checkpoint.json"), "checkpoint.json is missing"),
    "cut index": (lambda f: change(f / "checkpoint.json", lambda d: d.pop()), "is damaged: it is not JSON"),
    "changed index": (lambda f: rewrite_index(f, step=7), "its checksum is wrong"),
    "foreign index": (lambda f: (f / "checkpoint.json").write_text("{}"), "does not belong to a checkpoint"),
    "version": (lambda f: rewrite_index(f, version=1), "version 1, this infinity reads version 2 and 3"),
    "no file": (lambda f: _remove(f, GROUP), f"{GROUP} is damaged: the file is missing"),
    "cut file": (lambda f: change(f / GROUP, lambda d: d.pop()), f"{GROUP} is damaged: it is truncated"),
    "empty file": (lambda f: change(f / GROUP, lambda d: d.clear()), f"{GROUP} is damaged: it is truncated: 0 "),
    "longer file": (lambda f: change(f / GROUP, lambda d: d.append(0)), f"{GROUP} is damaged: it is too long"),
    "header": (
        lambda f: change(f / GROUP, lambda d: flip(d, d.index(b'"param"') + 1)),
        "the checksum of its header is wrong",
    ),
    "header length": (lambda f: change(f / GROUP, lambda d: flip(d, 6)), f"{GROUP} is damaged: .*[Hh]eader"),
    "digests": (lambda f: change(f / GROUP, lambda d: flip(d, -5)), "the checksum of its digests is wrong"),
    "other file": (lambda f: (f / "group-00002.rank0.safetensors").rename(f / GROUP), "checksum of its digests"),
    "half renamed": (lambda f: f.rename(f.with_name(f".{f.name}.before")), "saving was interrupted; the one before is"),
    "still being made": (lambda f: f.rename(folders.made_for(f)), "nothing is there; check the path"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("")), "there is no checkpoint at"),
    "index of nothing": (lambda f: (f / "checkpoint.json").write_text(""), "is damaged: it is not JSON"),
    "no extra": (lambda f: _remove(f, "extra.pt"), "extra.pt is damaged: the file is missing"),
    "changed extra": (lambda f: change(f / "extra.pt", flip), "extra.pt is damaged: its checksum is wrong"),
}


def test_a_path_where_nothing_is_has_an_error_of_its_own(run: Run, tmp_path: Path) -> None:
    with pytest.raises(infinity.CheckpointNotFoundError, match="typo: nothing is there; check the path") as caught:
        run.load(tmp_path / "typo")
    assert isinstance(caught.value, infinity.CheckpointError) and isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("name", DAMAGES)
def test_what_cannot_be_loaded_changes_nothing(run: Run, saved: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    damage(saved)
    before = run.parameters()
    with pytest.raises(infinity.CheckpointError, match=message):
        run.load(saved)
    assert _equal(before, run.parameters())
    run.train(2, 3)


def test_a_checkpoint_of_version_2_is_read(offload: MakeEngine, tmp_path: Path) -> None:
    """It is like one of version 3 whose files have no joined tensors."""
    run = Run(lambda model: offload(model, host={"budget": "16MiB"}), Net)
    run.train(0, 2)
    run.save(tmp_path / "saved")
    losses = run.train(2, 4)
    assert b"__metadata__" not in (tmp_path / "saved" / GROUP).read_bytes()
    index = tmp_path / "saved" / "checkpoint.json"
    content = {name: value for name, value in json.loads(index.read_text()).items() if name != "checksum"}
    assert content["version"] == 3
    content["version"] = 2
    index.write_text(json.dumps({**content, "checksum": checksum(json.dumps(content, sort_keys=True).encode())}))
    run.load(tmp_path / "saved")
    assert run.train(2, 4) == losses


def test_aflipped_bit_is_noticed_and_a_good_checkpoint_heals(run: Run, saved: Path, tmp_path: Path) -> None:
    run.save(tmp_path / "good")
    losses = run.train(2, 4)
    change(saved / GROUP, lambda data: flip(data, 4096 + 400))
    with pytest.raises(infinity.CheckpointError, match=r"is damaged: bytes \d+ to \d+ of 'param' have the wrong check"):
        run.load(saved)
    with pytest.raises(infinity.IterationError, match="failed half-way"):
        run.train(2, 3)
    with pytest.raises(infinity.IterationError, match="failed half-way"):
        run.save(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
    run.engine.reset_iteration()
    run.load(tmp_path / "good")
    assert run.train(2, 4) == losses


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Net(blocks=3), r"it has 'blocks\.3\.\S+', .* and 1 more, which the model does not have"),
        (lambda: Net(blocks=5), r"it lacks 'blocks\.4\.\S+'"),
        (lambda: Net(hidden=54), r"'blocks\.0\.up\.weight' has shape \(53, 37\) there and \(54, 37\) here"),
        (lambda: Net(tied=True), r"it has 'head\.weight', which the model does not have"),
    ],
    ids=["fewer", "more", "shape", "tied"],
)
def test_another_model_is_refused(
    offload: MakeEngine, saved: Path, make: Callable[[], nn.Module], message: str
) -> None:
    other = Run(lambda model: offload(model, **_TIGHT), make)
    before = other.parameters()
    with pytest.raises(infinity.CheckpointError, match=message):
        other.load(saved)
    assert _equal(before, other.parameters())


def test_losing_optimizer_state_is_refused(offload: MakeEngine, saved: Path) -> None:
    model = Net()
    model.head.requires_grad_(False)
    with pytest.raises(infinity.CheckpointError, match=r"'head\.weight' was trained there and is frozen here"):
        offload(model).load(saved)


def test_another_optimizer_is_refused(run: Run, offload: MakeEngine, saved: Path, tmp_path: Path) -> None:
    model = Net()
    engine = offload(model)
    first, *rest = model.parameters()
    optimizer = infinity.AdamW([{"params": [first]}, {"params": rest}], lr=1e-3)
    with pytest.raises(infinity.CheckpointError, match="has 2 parameter groups, the one of the checkpoint 1"):
        engine.load(saved, optimizer=optimizer)
    untrained = offload(Net())
    untrained.save(saved)
    with pytest.raises(infinity.CheckpointError, match="saved without an optimizer"):
        engine.load(saved, optimizer=optimizer)
    with pytest.raises(infinity.ConfigError, match="not offloaded by this engine"):
        run.engine.save(saved, optimizer=optimizer)
    run.save(saved)
    rest_model = Net()
    part = infinity.offload(rest_model, small_config(tmp_path))
    only = infinity.AdamW(rest_model.blocks.parameters())
    with part, pytest.raises(infinity.CheckpointError, match="parameter group 0 of the optimizer does not hold"):
        part.load(saved, optimizer=only)


# Saving --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_replaced_whole(run: Run, saved: Path) -> None:
    (saved / "old").write_text("")
    losses = run.train(2, 3)
    run.save(saved)
    assert not (saved / "old").exists()
    assert [path.name for path in saved.parent.iterdir() if "saved" in path.name] == ["saved"]
    after = run.train(3, 4)
    run.load(saved)
    assert run.train(3, 4) == after
    assert losses != after


def test_what_is_not_a_checkpoint_is_not_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("text")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("mine", "file", "link"):
        with pytest.raises(infinity.CheckpointError, match="is not a checkpoint, so it is not replaced"):
            run.save(tmp_path / name)
    with pytest.raises(infinity.CheckpointError, match="could not be written: "):
        run.save(tmp_path / "file" / "below")
    assert (tmp_path / "mine" / "thesis").read_text() == "text"
    (tmp_path / "empty").mkdir()
    run.save(tmp_path / "empty")


def test_extra_that_cannot_be_read_back_is_refused(run: Run, saved: Path) -> None:
    before = (saved / "checkpoint.json").read_bytes()
    for extra in ({"function": lambda: None}, {"object": Path("x")}):
        with pytest.raises(infinity.CheckpointError, match="`extra` holds something"):
            run.engine.save(saved, extra=extra)
    run.optimizer.param_groups[0]["mark"] = object()
    with pytest.raises(infinity.CheckpointError, match="the optimizer's setting 'mark'"):
        run.save(saved)
    assert (saved / "checkpoint.json").read_bytes() == before


def test_the_middle_of_an_overlapped_step_is_refused(offload: MakeEngine, saved: Path) -> None:
    run = Run(lambda model: offload(model, schedule="overlapped"), Net)
    loss_of(run.model, batch(0)).backward()  # type: ignore[no-untyped-call]
    for act in (run.save, run.load):
        with pytest.raises(infinity.IterationError, match=r"in the middle of a step.*Call optimizer\.step\(\) first"):
            act(saved)
    run.optimizer.step()
    run.load(saved)


def test_gradients_that_wait_are_kept_by_saving_and_discarded_by_loading(run: Run, saved: Path) -> None:
    loss_of(run.model, batch(9)).backward()  # type: ignore[no-untyped-call]
    run.load(saved)
    losses = run.train(2, 4)
    run.load(saved)
    loss_of(run.model, batch(2)).backward()  # type: ignore[no-untyped-call]
    run.engine.save(saved.with_name("other"))
    run.optimizer.step()
    changed = run.parameters()
    run.load(saved)
    assert run.train(2, 4) == losses
    assert not _equal(changed, run.parameters())


def test_edits(run: Run, saved: Path, tmp_path: Path) -> None:
    """What is being edited is saved as it is, also after the block; nothing is loaded under a user's hands."""
    block = run.model.get_submodule("blocks.2")
    with infinity.gathered(block), torch.no_grad():
        with pytest.raises(infinity.CheckpointError, match=r"load outside a forward and outside `gathered\(\)`"):
            run.load(saved)
        block.get_parameter("up.weight").fill_(3.0)
        run.save(tmp_path / "inside")
    run.save(tmp_path / "after")
    wanted = run.parameters()
    assert bool((wanted["blocks.2.up.weight"] == 3).all())
    for name in ("inside", "after"):
        run.load(saved)
        assert not _equal(wanted, run.parameters())
        run.load(tmp_path / name)
        assert _equal(wanted, run.parameters())


# The folder ------------------------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from pathlib import Path
from infinity.checkpoint.folder import replaced_folder
with replaced_folder(Path(sys.argv[1]), lambda there: True) as made:
    (made / "content").write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _write(path: Path, text: str) -> None:
    with replaced_folder(path, lambda there: (there / "content").exists()) as made:
        assert not list(made.iterdir())
        (made / "content").write_text(text)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_killed_process_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    path = tmp_path / "deep" / "folder"
    _write(path, "old")
    command = [sys.executable, "-c", _KILLED, str(path)]
    assert subprocess.run(command, cwd=_REPOSITORY, timeout=200, check=False).returncode == -9
    assert (path / "content").read_text() == "old"
    assert (tmp_path / "deep" / ".folder.infinity-saving").exists()
    _write(path, "newer")
    assert (path / "content").read_text() == "newer"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_killed_process_was_making_is_removed_by_the_next_save_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints of a series have names of their own, so nobody saves to that of the killed one again."""
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "step1")]
    assert subprocess.run(command, cwd=_REPOSITORY, timeout=200, check=False).returncode == -9
    left = tmp_path / ".step1.infinity-saving"
    assert left.is_dir()
    others = [tmp_path / name for name in ("others.infinity-saving", ".others.saving", ".link.infinity-saving")]
    others[0].mkdir()
    others[1].mkdir()  # of another program
    others[2].symlink_to(others[0])
    model = build(Net)
    with infinity.offload(model, small_config(tmp_path)) as engine:
        engine.save(tmp_path / "step2")
    assert not left.exists()
    assert set(tmp_path.iterdir()) == {tmp_path / "step2", *others}
    assert [message for message in caplog.messages if str(left) in message]


_HOLDING = """
import sys
from pathlib import Path
from infinity.checkpoint.folder import replaced_folder
with replaced_folder(Path(sys.argv[1]), lambda there: True) as made:
    (made / "content").write_text("of another process")
    print("making", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_is_making_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDING, str(tmp_path / "step1")]
    with subprocess.Popen(command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "making\n"
        _write(tmp_path / "step2", "mine")
        assert (tmp_path / ".step1.infinity-saving" / "content").is_file()
        other.stdin.close()
        assert other.wait(timeout=200) == 0
    found = {path.name: (path / "content").read_text() for path in tmp_path.iterdir()}
    assert found == {"step1": "of another process", "step2": "mine"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_who_saves_to_the_same_path_as_soon_as_it_is_there_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_exchange: bool
) -> None:
    path, synced = tmp_path / "step1", folders.sync_folder
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)

    def begin_another(folder: Path) -> None:
        synced(folder)
        if folder == tmp_path and not folders.made_for(path).exists():
            folders.made_for(path).mkdir()

    monkeypatch.setattr(folders, "sync_folder", begin_another)
    _write(path, "first")
    assert folders.made_for(path).is_dir()
    folders.made_for(path).rmdir()
    _write(path, "second")
    assert folders.made_for(path).is_dir() is not can_exchange  # where the names were exchanged it was never free
    assert (path / "content").read_text() == "second"


def test_nothing_is_removed_where_other_machines_may_be_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".step1.infinity-saving"
    left.mkdir()
    monkeypatch.setattr(folders, "find_file_system", lambda path: FileSystem("nfs4", Kind.NETWORK))
    _write(tmp_path / "step2", "mine")
    assert left.is_dir()


def test_saves_beside_each_other_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each looks at what the others are making, at every moment of it."""

    def save(name: str) -> None:
        for number in range(40):
            _write(tmp_path / name, f"{name} {number}")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save, name) for name in "abcd"]:
            done.result()
    assert {path.name: (path / "content").read_text() for path in tmp_path.iterdir()} == {n: f"{n} 39" for n in "abcd"}


def test_a_failure_inside_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    _write(path, "old")
    with (
        pytest.raises(infinity.CheckpointError, match="No space left on device; the one that was there before"),
        replaced_folder(path, lambda there: True) as made,
    ):
        (made / "content").write_text("new")
        raise OSError(28, "No space left on device")
    with pytest.raises(KeyboardInterrupt), replaced_folder(path, lambda there: True):
        raise KeyboardInterrupt
    assert (path / "content").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_there_before_is_removed_later_if_not_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exchange, a process killed between the two renames leaves the old folder under its other name."""
    path = tmp_path / "folder"
    _write(path, "old")
    path.rename(folders.before_of(path))
    _write(path, "new")
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    renamed = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if source.name.endswith(".infinity-saving"):
            raise OSError(errno.EIO, "Input/output error")
        return renamed(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(infinity.CheckpointError, match="Input/output error; the one that was there before"):
        _write(path, "newer")
    assert (path / "content").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_new_folders_are_on_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a folder is there only if every folder above it was synced."""
    synced = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    _write(tmp_path / "runs" / "first" / "saved", "new")
    assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "first")} <= set(synced)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks no folder that is open for reading only, and only those can be opened."""

    def refuse(*unused: object) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    for text in ("old", "new"):
        _write(tmp_path / "folder", text)
    assert (tmp_path / "folder" / "content").read_text() == "new"


def test_nobody_takes_over_what_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exchange the old folder has the name of the new one: another process would fill it meanwhile."""
    path = tmp_path / "folder"
    _write(path, "old")
    remove, refused = folders.shutil.rmtree, []

    def remove_slowly(folder: Path, **given: Any) -> None:
        if (folder / "content").exists() and not refused:
            refused.append((folder / "content").read_text())
            with pytest.raises(infinity.CheckpointError, match="another process is saving to"):
                _write(path, "of another process")
        remove(folder, **given)

    monkeypatch.setattr(folders.shutil, "rmtree", remove_slowly)
    _write(path, "new")
    assert refused == ["old"]
    assert (path / "content").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_two_cannot_save_to_one_place(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with replaced_folder(path, lambda there: True) as made:
        (made / "content").write_text("first")
        with pytest.raises(infinity.CheckpointError, match="another process is saving to"):
            _write(path, "second")
    assert (path / "content").read_text() == "first"


def test_an_interrupted_exchange_is_pointed_out(run: Run, saved: Path) -> None:
    saved.rename(saved.with_name(".saved.before"))
    with pytest.raises(infinity.CheckpointError, match=r"the one before is at .*\.saved\.before: use it"):
        run.load(saved)
    run.load(saved.with_name(".saved.before"))


def test_a_durable_run_is_no_checkpoint_and_is_pointed_out(tmp_path: Path) -> None:
    infinity.offload(Net(), small_config(tmp_path, durability="step")).close()
    for folder in (tmp_path, tmp_path / "versioned-rank0"):
        with pytest.raises(infinity.CheckpointError, match=r"a run with durability='step' lies there\..*resume=True"):
            CheckpointReader(folder)


def test_what_the_drive_does_not_give_counts_as_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that of a series the checkpoint before is tried."""
    with pytest.raises(DamagedCheckpointError, match="cannot be read: Is a directory"):
        checksum_of_file(tmp_path)
    save_buffers({"table": torch.arange(5)}, tmp_path)

    def fail(*unused: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with TensorFileReader(tmp_path / BUFFERS_FILE) as file:
        monkeypatch.setattr(tensor_file, "read_some", fail)
        with pytest.raises(DamagedCheckpointError, match=r"cannot be read at offset \d+: Input/output error"):
            file.read("table", 0, torch.empty(5, dtype=torch.int64))


def test_a_closed_engine_neither_saves_nor_loads(tmp_path: Path) -> None:
    engine = infinity.offload(Net(), small_config(tmp_path))
    engine.close()
    for act in (engine.save, engine.load):
        with pytest.raises(infinity.InfinityError, match="closed"):
            act(tmp_path / "saved")


def test_elements_and_tensors_that_there_are_not(saved: Path) -> None:
    with CheckpointReader(saved) as checkpoint:
        name, entry = next(iter(checkpoint.index.parameters.items()))
        numel = math.prod(entry.shape)
        whole = torch.empty(numel)
        checkpoint.read(name, "parameter", 0, whole)
        for start in (-1, 1, numel):
            stop = start + numel
            message = f"elements {start} to {stop} of 'parameter' of {name!r} were asked for, which has {numel} of them"
            with pytest.raises(infinity.CheckpointError, match=re.escape(message)):
                checkpoint.read(name, "parameter", start, whole)
        with pytest.raises(infinity.CheckpointError, match=r"no 'exp_avg_cubed' of '.*'; it has parameter"):
            checkpoint.read(name, "exp_avg_cubed", 0, whole)
