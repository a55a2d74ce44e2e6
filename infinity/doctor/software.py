"""Checks of kernel, Python, torch, GPU and compiler cache."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from infinity.doctor.check import Check, Status
from infinity.optim.kernel_threads import usable_cores
from infinity.swap_directories import default_directory
from storage.backends.gds import probe_gds
from storage.filesystems import find_file_system

_TELLS_ALIGNMENT = (6, 1)  # statx with STATX_DIOALIGN


def check_system() -> Check:
    """Kernel and Python."""
    release = platform.release()
    found = f"{platform.system()} {release} {platform.machine()}, Python {platform.python_version()}"
    data = {"system": platform.system(), "release": release, "python": platform.python_version()}
    if sys.platform != "linux":
        fix = 'engine = "buffered" in the nvme section of --config; direct I/O needs Linux'
        return Check("system", Status.WARNING, f"{found}: drives are used through the page cache", fix, data=data)
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < _TELLS_ALIGNMENT:
        found += "; before 6.1 the kernel does not tell the alignment of direct I/O, so it is tried"
    return Check("system", Status.OK, found, data=data)


def check_temporary_directory() -> Check:
    """Where swap files go without --nvme; often that is memory."""
    usual, used = Path(tempfile.gettempdir()), default_directory()
    file_system = find_file_system(usual)
    kind = file_system.name
    data = {"temporary": str(usual), "file_system": kind, "used": str(used)}
    if not file_system.is_memory:
        return Check("default directory", Status.OK, f"{used} ({kind or 'unknown'})", data=data)
    fix = "infinity train --nvme DIR    # or export TMPDIR=/var/tmp"
    if used != usual:
        found = f"{usual} is {kind}, which is memory; without --nvme swap files go to {used}"
        return Check("default directory", Status.OK, found, data=data)
    found = f"{usual} is {kind}, which is memory: swapping there gains nothing"
    return Check("default directory", Status.WARNING, found, fix, data=data)


def check_torch() -> Check:
    """Whether torch can be imported, and its version."""
    try:
        import torch
    except Exception as error:  # a broken installation raises all kinds
        return Check("torch", Status.FAILURE, f"cannot be imported: {error}", "pip install --force-reinstall torch")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    found = f"{torch.__version__} ({build}), {torch.get_num_threads()} threads"
    return Check("torch", Status.OK, found, data={"version": torch.__version__, "cuda": torch.version.cuda})


def check_processor() -> Check:
    """Whether the CPU multiplies bf16 itself; without, bf16 runs compute in fp32."""
    from infinity.devices.cpu import has_fast_bf16

    is_fast = has_fast_bf16()
    found = "bf16 products in hardware" if is_fast else "no bf16 products: --precision bf16 computes in fp32 on the CPU"
    cores = usable_cores()
    return Check("processor", Status.OK if is_fast else Status.NOTE, f"{cores} cores, {found}", data={"bf16": is_fast})


def check_cuda() -> Check:
    """The GPUs that torch finds."""
    import torch

    from infinity.devices.select import describe_missing_cuda

    if not torch.cuda.is_available():
        is_built = torch.version.cuda is not None
        fix = "nvidia-smi    # says what the driver sees; CUDA_VISIBLE_DEVICES may hide devices" if is_built else ""
        found = f"none: {describe_missing_cuda()}; computing on the CPU"
        return Check("CUDA", Status.NOTE, found, fix, data={"devices": []})
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return Check("CUDA", Status.OK, ", ".join(names), data={"devices": names})


def check_gds() -> Check:
    """GPUDirect Storage: what is missing for it. Nothing depends on it, see `storage.backends.gds`."""
    problem = probe_gds(None)
    has_library = ctypes.util.find_library("cufile") is not None
    data = {"problem": problem, "libcufile": has_library}
    if problem is not None:
        return Check("GPUDirect Storage", Status.NOTE, f"not available: {problem}; nothing needs it", data=data)
    return Check("GPUDirect Storage", Status.NOTE, "available, and not used: shards pass host memory", data=data)


def check_numba_cache() -> Check:
    """Whether the compiled optimizer kernel can be kept; else every start compiles it again."""
    places = numba_cache_places()
    place = next((place for place in places if _is_writable(place)), None)
    if place is not None:
        return Check("kernel cache", Status.OK, f"{place} is writable", data={"path": str(place)})
    found = f"none of {', '.join(map(str, places))} is writable: each start compiles the bf16 kernel for about a second"
    fix = "export NUMBA_CACHE_DIR=/var/tmp/numba    # any directory you can write to"
    return Check("kernel cache", Status.WARNING, found, fix, data={"path": None})


def numba_cache_places() -> list[Path]:
    """Where numba tries to keep compiled code, first choice first."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    import infinity.optim

    beside_source = Path(next(iter(infinity.optim.__path__))) / "__pycache__"
    return [beside_source, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"]


def _is_writable(place: Path) -> bool:
    """Whether a file can be made there, or the directory itself could be."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False
