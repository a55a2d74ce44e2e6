"""GPUDirect Storage through `torch.cuda.gds`: whether it works in a folder, and what it can not do.

torch's bindings of cuFile move bytes between a file and a storage on a CUDA device, and nothing else. The contract of a
backend is about host memory: that is where shards wait, get their checksums and are updated by the CPU. So there is no
backend to make of them: serving host memory would mean a copy to the device and back over the same link. Who asks for
it by name is told so, after it has been tried whether it works at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

from storage.errors import StorageError

_NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_ROUND_TRIP_NBYTES = 1 << 20


def probe_gds(folder: Path | None) -> str | None:
    """Why GPUDirect Storage does not work in a folder of ours, or None when it does.

    Real bytes go from a device to a file there and back. Without a folder only the machine is looked at.
    """
    try:
        import torch
    except Exception as error:  # a broken installation raises all kinds
        return f"torch cannot be imported: {error}"
    # Builds without cuFile have functions of Python in their place, which raise.
    if not isinstance(getattr(torch._C, "_gds_register_handle", None), BuiltinFunctionType):
        return "this build of torch has no bindings of cuFile (torch.cuda.gds)"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not _NVIDIA_FS.exists():
        return "the kernel module nvidia-fs is not loaded, so cuFile would copy through host memory"
    make_file: Callable[..., Any] | None = getattr(torch.cuda.gds, "GdsFile", None)
    if make_file is None:
        return f"torch {torch.__version__} has no torch.cuda.gds.GdsFile"
    return None if folder is None else _try_round_trip(make_file, folder / "probe-gds")


def _try_round_trip(make_file: Callable[..., Any], path: Path) -> str | None:
    import torch

    written = torch.arange(_ROUND_TRIP_NBYTES // 8, dtype=torch.int64, device="cuda")
    read = torch.zeros_like(written)
    try:
        file = make_file(str(path), os.O_CREAT | os.O_RDWR)
        file.save_storage(written.untyped_storage(), 0)
        file.load_storage(read.untyped_storage(), 0)
        torch.cuda.synchronize()
    except (OSError, RuntimeError) as error:
        return f"cuFile refused a file there: {str(error).partition(chr(10))[0]}"
    finally:
        path.unlink(missing_ok=True)
    return None if torch.equal(written, read) else "bytes written through cuFile did not come back"


def gds_refusal(folder: Path) -> StorageError:
    """The error for a store that was asked to use it."""
    problem = probe_gds(folder)
    if problem is None:
        problem = (
            "it works, but torch.cuda.gds moves bytes between drives and device memory only, and shards pass through "
            "host memory, where they are checked and updated"
        )
    return StorageError(f"engine 'gds' was asked for, but in {folder} {problem}. Use 'auto' or 'direct'")
