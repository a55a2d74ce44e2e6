"""GPUDirect Storage is never used silently: what is missing is said, for real on a machine without it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from storage.backends import gds
from storage.backends.gds import probe_gds
from storage.backends.probe import choose_engine
from storage.errors import StorageError
from storage.store import ShardStore, StorageOptions

_HAS_GDS = probe_gds(None) is None


@pytest.mark.skipif(_HAS_GDS, reason="GPUDirect Storage works here")
def test_who_asks_for_it_without_it_is_told_what_is_missing(tmp_path: Path) -> None:
    problem = probe_gds(tmp_path)
    assert problem is not None
    if not torch.version.cuda:
        assert problem == "this build of torch has no bindings of cuFile (torch.cuda.gds)"
    with pytest.raises(StorageError, match=r"engine 'gds' was asked for, but in .*Use 'auto' or 'direct'") as caught:
        ShardStore.open([tmp_path], 1 << 20, options=StorageOptions(engine="gds", free_margin_nbytes=0))
    assert problem in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cufile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A machine that has everything; what is named is taken away by the test. The device is the CPU."""
    (tmp_path / "nvidia-fs").mkdir()
    monkeypatch.setattr(torch._C, "_gds_register_handle", len, raising=False)  # any function that is built in
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gds, "_NVIDIA_FS", tmp_path / "nvidia-fs")
    real = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *args, **more: real(*args, **more | {"device": "cpu"}))

    class File:
        """Does with a file what cuFile does."""

        def __init__(self, name: str, flags: int) -> None:
            self.path = Path(name)
            self.path.touch()

        def save_storage(self, storage: torch.UntypedStorage, offset: int) -> None:
            self.path.write_bytes(bytes(storage))

        def load_storage(self, storage: torch.UntypedStorage, offset: int) -> None:
            storage.copy_(torch.UntypedStorage(list(self.path.read_bytes())))

    monkeypatch.setattr(torch.cuda.gds, "GdsFile", File)
    return SimpleNamespace(file=File)


def test_where_it_works_the_refusal_says_what_it_cannot_do(tmp_path: Path, cufile: Any) -> None:
    folder = tmp_path / "swap"
    folder.mkdir()
    assert probe_gds(folder) is None
    with pytest.raises(StorageError, match="between drives and device memory only"):
        choose_engine(folder, "gds")
    assert list(folder.iterdir()) == []


def test_every_part_that_is_missing_has_a_line(tmp_path: Path, cufile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object) -> None:
        raise RuntimeError("cuFileHandleRegister failed: 5027\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(cufile.file, "save_storage", refuse)
        assert probe_gds(tmp_path) == "cuFile refused a file there: cuFileHandleRegister failed: 5027"
    with monkeypatch.context() as patch:
        patch.setattr(cufile.file, "load_storage", lambda *_: None)
        assert "did not come back" in str(probe_gds(tmp_path))
    monkeypatch.delattr(torch.cuda.gds, "GdsFile")
    assert "GdsFile" in str(probe_gds(tmp_path))
    monkeypatch.setattr(gds, "_NVIDIA_FS", tmp_path / "none")
    assert "nvidia-fs is not loaded" in str(probe_gds(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probe_gds(tmp_path) == "torch finds no GPU"
    monkeypatch.setattr(torch._C, "_gds_register_handle", lambda: None)
    assert "no bindings" in str(probe_gds(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["nvidia-fs"]
