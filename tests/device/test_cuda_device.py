"""Copies on CUDA: exact, behind compute, ordered by events, with nothing freed too early. Needs a CUDA device."""

import mmap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from infinity.config import DeviceConfig, DeviceKind, Precision
from infinity.devices.base import Fence
from infinity.devices.cuda import CudaDevice
from infinity.devices.select import describe_missing_cuda, make_device
from infinity.errors import DeviceOutOfMemoryError

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason=f"no CUDA: {'' if torch.cuda.is_available() else describe_missing_cuda()}"
    ),
]

MIB = 1024 * 1024
BUDGET = 2048 * MIB
NUMELS = [0, 1, 63, 4097, 4 * MIB + 3, 9 * MIB + 1]  # below and above the landing and staging pieces
DTYPES = [torch.float32, torch.bfloat16]
LONG_CYCLES = 200_000_000  # about 0.1 s of a kernel that does nothing


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(BUDGET)
    yield device
    device.close()
    device.close()
    assert all(thread.name != "infinity-d2h-add" for thread in threading.enumerate())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.numel() else tensor


def pageable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def upload(device: CudaDevice, source: torch.Tensor, target: torch.Tensor) -> Fence:
    block = device.allocate(target.nbytes, "unit")
    fence = device.upload(block, source, target, "unit")
    device.make_ready(fence)
    device.free(block)
    return fence


def download(device: CudaDevice, source: torch.Tensor, target: torch.Tensor, *, accumulate: bool = False) -> Fence:
    block = device.allocate(source.nbytes, "gradient")
    fence = device.download(block, source, target, "unit", accumulate=accumulate)
    device.free(block)
    return fence


@pytest.mark.parametrize("memory", [pinned, pageable])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("host", DTYPES)
@pytest.mark.parametrize("on_device", DTYPES)
def test_upload(
    device: CudaDevice,
    memory: Callable[[torch.Tensor], torch.Tensor],
    numel: int,
    host: torch.dtype,
    on_device: torch.dtype,
) -> None:
    source, target = memory(values(numel, host)), torch.zeros(numel, dtype=on_device, device="cuda")
    upload(device, source, target)
    assert torch.equal(target.cpu(), source.to(on_device))
    assert device.traffic.h2d_nbytes == source.nbytes


@pytest.mark.parametrize("memory", [pinned, pageable])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("on_device", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_download(
    device: CudaDevice,
    memory: Callable[[torch.Tensor], torch.Tensor],
    numel: int,
    on_device: torch.dtype,
    accumulate: bool,
) -> None:
    source, target = values(numel, on_device), memory(values(numel, torch.float32, seed=1))
    expected = target + source.float() if accumulate else source.float()
    fence = download(device, source.cuda(), target, accumulate=accumulate)
    fence.wait()
    assert fence.done
    assert torch.equal(target, expected)
    assert device.traffic.d2h_nbytes == target.nbytes


def test_upload_keeps_every_bit(device: CudaDevice) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    target = torch.zeros(1 << 16, dtype=torch.bfloat16, device="cuda")
    upload(device, bits.view(torch.bfloat16), target)
    assert torch.equal(target.view(torch.int16).cpu(), bits)


def test_accumulations_run_in_order_after_the_overwrite(device: CudaDevice) -> None:
    target = torch.empty(5 * MIB).pin_memory()
    parts = [values(5 * MIB, torch.float32, seed) for seed in range(4)]
    fences = [download(device, part.cuda(), target, accumulate=bool(n)) for n, part in enumerate(parts)]
    fences[-1].wait(timeout_s=30)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert all(fence.done for fence in fences)
    assert torch.equal(target, expected)


def test_expanded_gradient(device: CudaDevice) -> None:
    target = torch.zeros(1000).pin_memory()
    for accumulate in (False, True):
        download(device, torch.tensor([1.5], device="cuda").expand(1000), target, accumulate=accumulate).wait()
    assert torch.equal(target, torch.full((1000,), 3.0))


def test_upload_waits_for_kernels_that_still_read_the_reused_block(device: CudaDevice) -> None:
    """The classic race: a block is freed while its last kernel is queued, and the next upload lands in it."""
    numel = 16 * MIB
    ones, twos = torch.ones(numel).pin_memory(), torch.full((numel,), 2.0).pin_memory()
    flat, total = torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")
    upload(device, ones, flat)
    torch.cuda._sleep(LONG_CYCLES)
    total += flat
    address = flat.data_ptr()
    flat.untyped_storage().resize_(0)
    again = torch.empty(numel, device="cuda")
    assert again.data_ptr() == address, "the allocator gave other memory: the test shows nothing"
    upload(device, twos, again)
    total += again
    assert torch.equal(total.cpu(), torch.full((numel,), 3.0))


def test_upload_does_not_hold_the_host(device: CudaDevice) -> None:
    source, target = torch.ones(MIB).pin_memory(), torch.zeros(MIB, device="cuda")
    torch.cuda._sleep(LONG_CYCLES)
    fence = upload(device, source, target)
    assert not fence.done
    with pytest.raises(TimeoutError, match="copy of unit"):
        fence.wait(timeout_s=0)
    fence.wait()
    assert fence.done


def test_download_sees_queued_compute_and_keeps_its_source(device: CudaDevice) -> None:
    source, target = torch.zeros(4 * MIB, device="cuda"), torch.zeros(4 * MIB).pin_memory()
    torch.cuda._sleep(LONG_CYCLES)
    source += 7
    fence = download(device, source, target)
    del source
    overwriting = [torch.full((4 * MIB,), -1.0, device="cuda") for _ in range(4)]
    fence.wait()
    assert torch.equal(target, torch.full((4 * MIB,), 7.0))
    del overwriting


def test_references_end_with_the_copy(device: CudaDevice) -> None:
    before = torch.cuda.memory_allocated()
    for accumulate in (False, True):
        source, target = torch.ones(4 * MIB, device="cuda"), torch.zeros(4 * MIB).pin_memory()
        fence = download(device, source, target, accumulate=accumulate)
        del source
        fence.wait()
    device.free(device.allocate(1, "anything"))
    device.close()
    assert torch.cuda.memory_allocated() == before


def test_landing_memory_is_bounded(device: CudaDevice) -> None:
    before = torch.cuda.memory_allocated()
    source, target = torch.ones(32 * MIB, dtype=torch.bfloat16), torch.empty(32 * MIB, device="cuda")
    upload(device, source, target).wait()
    download(device, target.bfloat16(), torch.zeros(32 * MIB)).wait()
    device.free(device.allocate(1, "anything"))
    del target
    assert torch.cuda.memory_allocated() - before <= device.overhead_nbytes


def test_upload_is_unseen_by_autograd_and_works_in_its_thread(device: CudaDevice) -> None:
    shard = values(64, torch.float32).pin_memory()
    flat = torch.zeros(64, device="cuda")
    weight = nn.Parameter(flat.view(8, 8))
    upload(device, shard, flat)
    x = torch.ones(2, 8, device="cuda", requires_grad=True)
    y = x @ weight
    version = flat._version
    flat.untyped_storage().resize_(0)
    threads = []

    def gather(_: torch.Tensor) -> None:
        threads.append(threading.current_thread())
        flat.untyped_storage().resize_(256)
        upload(device, shard, flat)

    y.register_hook(gather)
    y.sum().backward()
    assert flat._version == version
    assert threads[0] is not threading.main_thread()
    assert x.grad is not None
    assert torch.allclose(x.grad.cpu(), shard.view(8, 8).sum(1).expand(2, 8))


def test_registered_memory_is_pinned(device: CudaDevice) -> None:
    register = device.host_register()
    assert register is not None
    area = mmap.mmap(-1, 4 * MIB)
    tensor = torch.frombuffer(memoryview(area), dtype=torch.float32)
    unregister = register(tensor.data_ptr(), 4 * MIB)
    assert tensor.is_pinned()
    target = torch.zeros(MIB, device="cuda")
    tensor.fill_(3.0)
    upload(device, tensor, target).wait()
    assert torch.equal(target.cpu(), tensor)
    unregister()
    assert not tensor.is_pinned()


def test_failed_registration_is_explained_and_leaves_no_error_behind(device: CudaDevice) -> None:
    register = device.host_register()
    assert register is not None
    with pytest.raises(RuntimeError, match=r"cannot pin 4 MiB of host memory: .*host.pin = false"):
        register(0, 4 * MIB)
    assert torch.ones(10, device="cuda").sum().item() == 10


def test_budget_is_a_ceiling(device: CudaDevice) -> None:
    block = device.allocate(BUDGET - 1, "blocks.0")
    with pytest.raises(DeviceOutOfMemoryError, match=r"blocks.1 needs 2 bytes"):
        device.allocate(2, "blocks.1")
    device.free(block)
    device.free(block)
    assert device.budget.used_nbytes == 0


def test_auto_chooses_cuda() -> None:
    device = make_device(DeviceConfig(), BUDGET)
    try:
        assert device.kind is DeviceKind.CUDA
        assert device.torch_device == torch.device("cuda", torch.cuda.current_device())
        assert device.compute_dtype(Precision.FP32) is torch.float32
        has_bf16 = torch.cuda.get_device_capability() >= (8, 0)
        assert device.compute_dtype(Precision.BF16) is (torch.bfloat16 if has_bf16 else torch.float32)
    finally:
        device.close()
