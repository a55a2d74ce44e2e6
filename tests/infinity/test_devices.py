"""Devices copy exactly, count what they copy, keep to their budget, and order copies with compute."""

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity.config import DeviceConfig, DeviceKind, Precision
from infinity.devices.base import Device, DeviceBlock, LinkCopy, LinkDirection, LinkStats
from infinity.devices.cpu import CpuDevice, has_fast_bf16
from infinity.devices.cuda import CudaFence, TicketFence
from infinity.devices.fake import FakeDevice, host_bytes
from infinity.devices.select import describe_missing_cuda, make_device
from infinity.errors import ConfigError, DeviceOutOfMemoryError
from infinity.testing import CopyOp, FakeGpu, VirtualClock
from storage.types import Ticket

BUDGET = 16 * 1024 * 1024
PIECE = 1024 * 1024
NUMELS = [0, 1, 63, 64, 65, 1023, 1024, 4097, PIECE // 4 + 3, PIECE + 1]


def cpu(_: Path) -> Device:
    return CpuDevice(BUDGET)


def fake(folder: Path) -> Device:
    return FakeDevice(FakeGpu(folder / "gpu", BUDGET))


def slow_fake(folder: Path) -> Device:
    return FakeDevice(
        FakeGpu(folder / "gpu", BUDGET, h2d_bytes_per_s=1e6, d2h_bytes_per_s=5e5, latency_s=0.01, clock=VirtualClock())
    )


@pytest.fixture(params=[cpu, fake, slow_fake])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    make: Callable[[Path], Device] = request.param
    device = make(tmp_path)
    yield device
    device.close()
    device.close()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[FakeDevice]:
    """One second per 100 bytes up, per 50 bytes down."""
    with FakeDevice(
        FakeGpu(tmp_path / "gpu", BUDGET, h2d_bytes_per_s=100, d2h_bytes_per_s=50, clock=VirtualClock())
    ) as device:
        yield device


def random_bits(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits at all: also NaNs with payloads, infinities and denormals."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and bytes(host_bytes(a.contiguous())) == bytes(host_bytes(b.contiguous()))


def upload(device: Device, source: torch.Tensor, target: torch.Tensor, label: str = "unit") -> None:
    block = device.allocate(target.nbytes, label)
    device.make_ready(device.upload(block, source, target, label))
    device.free(block)


def download(device: Device, source: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> None:
    block = device.allocate(source.nbytes, "gradient")
    fence = device.download(block, source, target, "unit", accumulate=accumulate)
    fence.wait()
    assert fence.done
    device.free(block)


# Every device ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upload_keeps_every_bit(device: Device, numel: int, dtype: torch.dtype) -> None:
    source, target = random_bits(numel, dtype), torch.zeros(numel, dtype=dtype)
    upload(device, source, target)
    assert same_bits(target, source)


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize(("host", "on_device"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_upload_converts(device: Device, numel: int, host: torch.dtype, on_device: torch.dtype) -> None:
    source, target = values(numel, host), torch.zeros(numel, dtype=on_device)
    upload(device, source, target)
    assert same_bits(target, source.to(on_device))


@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("on_device", [torch.float32, torch.bfloat16])
def test_download(device: Device, numel: int, accumulate: bool, on_device: torch.dtype) -> None:
    source, target = values(numel, on_device), values(numel, torch.float32, seed=1)
    expected = target + source.float() if accumulate else source.float()
    download(device, source, target, accumulate=accumulate)
    assert same_bits(target, expected)


def test_downloaded_bits_are_kept(device: Device) -> None:
    source, target = random_bits(1000, torch.float32), torch.zeros(1000)
    download(device, source, target, accumulate=False)
    assert same_bits(target, source)


def test_expanded_gradient(device: Device) -> None:
    """The gradient of a sum is one element seen many times."""
    target = torch.zeros(100)
    download(device, torch.tensor([2.5]).expand(100), target, accumulate=False)
    download(device, torch.tensor([1.0]).expand(100), target, accumulate=True)
    assert torch.equal(target, torch.full((100,), 3.5))


def test_parts_of_a_block(device: Device) -> None:
    source, target, back = values(1000, torch.float32), torch.zeros(1000), torch.zeros(1000)
    block = device.allocate(target.nbytes, "unit")
    parts = [slice(0, 320), slice(320, 321), slice(321, 1000)]
    fences = [device.upload(block, source[p], target[p], "unit", offset_nbytes=4 * p.start) for p in parts]
    for fence in fences:
        device.make_ready(fence)
    for part in parts:
        fence = device.download(block, target[part], back[part], "unit", accumulate=False, offset_nbytes=4 * part.start)
        fence.wait()
    assert same_bits(target, source)
    assert same_bits(back, source)


def test_upload_is_unseen_by_autograd(device: Device) -> None:
    shard, flat = values(64, torch.float32), torch.zeros(64)
    weight = nn.Parameter(flat.view(8, 8))
    upload(device, shard, flat)
    x = torch.ones(2, 8, requires_grad=True)
    loss = (x @ weight).square().sum()
    version = flat._version
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(256)
    upload(device, shard, flat)
    loss.backward()
    assert flat._version == version
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * x.detach().T @ (x.detach() @ shard.view(8, 8)))


def test_storages_stay_resizable(device: Device) -> None:
    source, target, back = torch.ones(100), torch.zeros(100, dtype=torch.bfloat16), torch.zeros(100)
    upload(device, source, target)
    download(device, target, back, accumulate=True)
    for tensor in (source, target, back):
        tensor.untyped_storage().resize_(0)


def test_copies_in_inference_mode(device: Device) -> None:
    source, target = values(100, torch.bfloat16), torch.zeros(100)
    with torch.inference_mode():
        upload(device, source, target)
    assert torch.equal(target, source.float())
    assert not target.is_inference()


def test_traffic_counts_the_host_side(device: Device) -> None:
    upload(device, torch.ones(100, dtype=torch.bfloat16), torch.zeros(100))
    upload(device, torch.ones(10), torch.zeros(10), "state blocks.0")
    for accumulate in (False, True):
        download(device, torch.ones(50, dtype=torch.bfloat16), torch.zeros(50), accumulate=accumulate)
    assert (device.traffic.h2d_nbytes, device.traffic.d2h_nbytes) == (240, 400)
    assert device.traffic.by_kind(LinkDirection.H2D) == {"param": 200, "state": 40}
    assert device.traffic.by_kind(LinkDirection.D2H) == {"grad": 400}


def test_every_copy_is_told_with_its_times(device: Device) -> None:
    told: list[LinkCopy] = []
    device.traffic.watch(told.append)
    begun_s = time.perf_counter()
    upload(device, values(300, torch.bfloat16), torch.zeros(300), label="blocks.0")
    for accumulate in (False, True):
        download(device, values(200, torch.float32), torch.zeros(200), accumulate=accumulate)
    assert [(copy.direction, copy.nbytes) for copy in told] == [
        (LinkDirection.H2D, 600),
        (LinkDirection.D2H, 800),
        (LinkDirection.D2H, 800),
    ]
    assert told[0].label == "blocks.0"
    for copy in told:
        assert begun_s <= copy.start_s <= copy.end_s


def test_budget_is_a_ceiling(device: Device) -> None:
    half = device.allocate(BUDGET // 2, "blocks.0")
    quarter = device.allocate(BUDGET // 4, "head")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        device.allocate(BUDGET // 4 + 1, "blocks.1")
    for fact in (
        "blocks.1 needs",
        f"of {BUDGET} are in use",
        "blocks.0 8 MiB, head 4 MiB",
        "device budget of",
        "16 MiB",
    ):
        assert fact in str(caught.value)
    for block in (half, quarter, half):
        device.free(block)
    assert device.budget.used_nbytes == 0
    device.free(device.allocate(BUDGET, "all"))


@pytest.mark.parametrize(
    ("on_device", "on_host", "offset", "what"),
    [
        (torch.zeros(4), torch.zeros(5), 0, r"between shapes \(5,\) and \(4,\)"),
        (torch.zeros(2, 2), torch.zeros(2, 2), 0, "between shapes"),
        (torch.zeros(4), torch.zeros(8)[::2], 0, "must be contiguous host memory"),
        (torch.zeros(4), torch.zeros(4, device="meta"), 0, "must be contiguous host memory"),
        (torch.zeros(4), torch.zeros(4), 4, r"16 bytes at 4 do not fit in .*blocks.3, 16 bytes"),
        (torch.zeros(4), torch.zeros(4), -4, "do not fit"),
    ],
)
def test_impossible_copies_are_refused(
    device: Device, on_device: torch.Tensor, on_host: torch.Tensor, offset: int, what: str
) -> None:
    block = device.allocate(16, "blocks.3")
    with pytest.raises(ValueError, match=f"label: .*{what}"):
        device.upload(block, on_host, on_device, "label", offset_nbytes=offset)
    with pytest.raises(ValueError, match=f"label: .*{what}"):
        device.download(block, on_device, on_host, "label", accumulate=False, offset_nbytes=offset)


def test_released_memory_is_an_error_not_a_crash(device: Device) -> None:
    block, released = device.allocate(400, "unit"), torch.zeros(100)
    released.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="is released"):
        device.upload(block, torch.zeros(100), released, "unit")
    with pytest.raises(ValueError, match="is released"):
        device.download(block, torch.zeros(100), released, "unit", accumulate=True)


def test_nothing_to_pin_without_cuda(device: Device) -> None:
    assert device.host_register() is None


def test_fp32_computes_in_fp32(device: Device) -> None:
    assert device.compute_dtype(Precision.FP32) is torch.float32
    assert device.torch_device == torch.device("cpu")


class OffloadedStack:
    """Three linear layers of which at most one is on the device; gradients go to host memory."""

    def __init__(self, device: Device, shards: list[torch.Tensor]) -> None:
        self.device, self.shards = device, shards
        self.flats = [torch.empty(64) for _ in shards]
        self.weights = [nn.Parameter(flat.view(8, 8)) for flat in self.flats]
        self.gradients = [torch.zeros(64) for _ in shards]
        self.blocks: list[DeviceBlock | None] = [None] * len(shards)
        for flat in self.flats:
            flat.untyped_storage().resize_(0)

    def gather(self, index: int) -> None:
        flat = self.flats[index]
        self.blocks[index] = block = self.device.allocate(flat.nbytes, f"layer {index}")
        flat.untyped_storage().resize_(flat.nbytes)
        self.device.make_ready(self.device.upload(block, self.shards[index], flat, f"layer {index}"))

    def release(self, index: int) -> None:
        block = self.blocks[index]
        assert block is not None
        self.flats[index].untyped_storage().resize_(0)
        self.device.free(block)

    def harvest(self, index: int) -> None:
        grad = self.weights[index].grad
        assert grad is not None
        block = self.device.allocate(grad.nbytes, f"gradient {index}")
        self.device.download(block, grad.view(-1), self.gradients[index], f"layer {index}", accumulate=True).wait()
        self.device.free(block)
        self.weights[index].grad = None


def test_model_trains_through_the_device(device: Device) -> None:
    shards = [values(64, torch.float32, seed) for seed in range(3)]
    plain = [nn.Parameter(shard.view(8, 8).clone()) for shard in shards]
    stack = OffloadedStack(device, shards)
    for seed in range(2):
        x = values(16, torch.float32, seed).view(2, 8)
        expected, y = x, x
        outputs = []
        for index, weight in enumerate(stack.weights):
            stack.gather(index)
            y = torch.tanh(y @ weight)
            outputs.append(y)
            stack.release(index)
            expected = torch.tanh(expected @ plain[index])
        expected.sum().backward()
        gradient = torch.ones_like(y)
        for index in reversed(range(3)):
            stack.gather(index)
            previous = outputs[index - 1] if index else None
            wanted = [stack.weights[index], *([previous] if previous is not None else [])]
            grads = torch.autograd.grad(outputs[index], wanted, gradient)
            stack.weights[index].grad, gradient = grads[0], grads[-1]
            stack.release(index)
            stack.harvest(index)
    for weight, gradient in zip(plain, stack.gradients, strict=True):
        assert weight.grad is not None
        assert same_bits(gradient, weight.grad.view(-1))
    assert device.budget.used_nbytes == 0


# The CPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16", "bf16"])
def test_fast_bf16_from_what_torch_reports(name: str) -> None:
    assert has_fast_bf16({name: True, "avx2": True})
    assert not has_fast_bf16({name: False, "avx512_f": True})


def test_fast_bf16_from_the_kernel_where_torch_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    (tmp_path / "new").write_text("model name : X\nflags\t\t: fpu avx512f avx512_bf16\n")
    (tmp_path / "old").write_text("model name : avx512_bf16-less\nflags\t\t: fpu avx2\n")
    assert has_fast_bf16(cpuinfo=tmp_path / "new")
    assert not has_fast_bf16(cpuinfo=tmp_path / "old")
    assert not has_fast_bf16(cpuinfo=tmp_path / "absent")


def test_cpu_computes_in_bf16_where_that_is_fast() -> None:
    expected = torch.bfloat16 if has_fast_bf16() else torch.float32
    assert CpuDevice(BUDGET).compute_dtype(Precision.BF16) is expected


# The fake ----------------------------------------------------------------------------------------------------------


def test_bytes_pass_through_the_file(tmp_path: Path) -> None:
    with FakeDevice(FakeGpu(tmp_path / "gpu", BUDGET)) as device:
        source, gradient, target = values(1000, torch.bfloat16), values(1000, torch.float32), torch.zeros(1000)
        block = device.allocate(4000, "blocks.0")
        fence = device.upload(block, source, torch.zeros(1000), "param blocks.0")
        assert (tmp_path / "gpu").read_bytes()[:2000] == bytes(host_bytes(source))
        device.make_ready(fence)
        device.download(block, gradient, target, "grad blocks.0", accumulate=False)
        assert (tmp_path / "gpu").read_bytes()[:4000] == bytes(host_bytes(gradient))
        device.free(block)
        log = [(entry.op, entry.label, entry.nbytes) for entry in device.gpu.log]
    assert log == [
        (CopyOp.ALLOCATE, "blocks.0", 4000),
        (CopyOp.UPLOAD, "param blocks.0", 2000),
        (CopyOp.DOWNLOAD, "grad blocks.0", 4000),
        (CopyOp.FREE, "blocks.0", 4000),
    ]
    assert list(tmp_path.iterdir()) == []


def test_fake_computes_in_fp32_everywhere(slow: FakeDevice) -> None:
    assert slow.compute_dtype(Precision.BF16) is torch.float32


def test_fake_budget_counts_pages(slow: FakeDevice) -> None:
    block = slow.allocate(1, "unit")
    assert slow.budget.used_nbytes == slow.gpu.used_nbytes == 4096
    slow.free(block)
    assert slow.budget.used_nbytes == slow.gpu.used_nbytes == 0


def test_target_is_filled_when_the_copy_is_over(slow: FakeDevice) -> None:
    source, target = torch.ones(25), torch.zeros(25)
    fence = slow.upload(slow.allocate(100, "unit"), source, target, "unit")
    source.zero_()  # the bytes have left; only the end of the copy is still to come
    assert not fence.done
    assert torch.equal(target, torch.zeros(25))
    slow.make_ready(fence)
    assert fence.done
    assert slow.gpu.clock.now_s() == 1.0
    assert torch.equal(target, torch.ones(25))
    target.zero_()
    fence.wait()
    slow.make_ready(fence)
    assert torch.equal(target, torch.zeros(25))


def test_copies_overlap_compute_and_each_other(slow: FakeDevice) -> None:
    blocks = [slow.allocate(100, f"unit{i}") for i in range(3)]
    first = slow.upload(blocks[0], torch.ones(25), torch.zeros(25), "first")
    second = slow.upload(blocks[1], torch.ones(25), torch.zeros(25), "second")
    down = slow.download(blocks[2], torch.ones(25), torch.zeros(25), "down", accumulate=False)
    slow.gpu.clock.sleep(1.5)
    assert (first.done, second.done, down.done) == (True, False, False)
    down.wait()
    assert slow.gpu.clock.now_s() == 2.0
    assert second.done


def test_wait_is_bounded(slow: FakeDevice) -> None:
    fence = slow.upload(slow.allocate(100, "unit"), torch.ones(25), torch.zeros(25), "blocks.7")
    with pytest.raises(TimeoutError, match=r"blocks.7 is not over after 0.5 s"):
        fence.wait(timeout_s=0.5)
    assert slow.gpu.clock.now_s() == 0.5
    fence.wait(timeout_s=0.5)


def test_release_during_upload_is_an_error_not_a_crash(slow: FakeDevice) -> None:
    target = torch.zeros(25)
    fence = slow.upload(slow.allocate(100, "unit"), torch.ones(25), target, "blocks.7")
    target.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"blocks.7 was released while it was being uploaded"):
        slow.make_ready(fence)


def test_dropped_tensors_live_until_their_copy_is_over(slow: FakeDevice) -> None:
    flat = torch.zeros(50)
    fence = slow.upload(slow.allocate(100, "unit"), torch.ones(25), flat[25:], "unit")
    gc.collect()
    slow.make_ready(fence)
    assert torch.equal(flat, torch.cat([torch.zeros(25), torch.ones(25)]))


def test_blocks_of_other_devices_are_refused(slow: FakeDevice) -> None:
    block = CpuDevice(BUDGET).allocate(100, "unit")
    with pytest.raises(TypeError, match="another device"):
        slow.upload(block, torch.ones(25), torch.zeros(25), "unit")


# Choosing ----------------------------------------------------------------------------------------------------------


def test_cpu_by_name() -> None:
    device = make_device(DeviceConfig(kind="cpu"), 12345)
    assert device.kind is DeviceKind.CPU
    assert device.budget.limit_nbytes == 12345


def test_auto_without_cuda_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert make_device(DeviceConfig(), BUDGET).kind is DeviceKind.CPU


def test_missing_cuda_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match=rf"device.kind = 'cuda': torch {torch.__version__[:4]}.*allowed here: 'auto'"
    ):
        make_device(DeviceConfig(kind="cuda"), BUDGET)


def test_unusable_cuda_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "0 visible, CUDA_VISIBLE_DEVICES = '7'" in describe_missing_cuda()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert describe_missing_cuda().endswith("was built without CUDA")


def test_fake_with_its_settings(tmp_path: Path) -> None:
    config = DeviceConfig(
        kind="fake", path=tmp_path / "gpu", h2d_bytes_per_s="1MB", d2h_bytes_per_s="2MB", latency_s=0.0
    )
    device = make_device(config, 64 * 1024)
    assert isinstance(device, FakeDevice)
    assert (tmp_path / "gpu").stat().st_size == device.budget.limit_nbytes == 64 * 1024
    entry = device.gpu.start_upload(device.allocate(1000, "unit").region, memoryview(bytes(1000)))
    assert entry.end_s - entry.start_s == pytest.approx(0.001)
    device.close()


def test_fake_without_a_path_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device = make_device(DeviceConfig(kind="fake"), BUDGET)
    upload(device, torch.ones(10), torch.zeros(10))
    assert list(tmp_path.iterdir()) == []
    device.close()


def test_fake_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("precious")
    with pytest.raises(ConfigError, match=r"device.path = .*data.*never overwrites"):
        make_device(DeviceConfig(kind="fake", path=tmp_path / "data"), BUDGET)
    assert (tmp_path / "data").read_text() == "precious"


# Parts that need no device -----------------------------------------------------------------------------------------


def test_link_stats_by_kind() -> None:
    stats = LinkStats()
    stats.add(LinkDirection.H2D, "blocks.0", 10)
    stats.add(LinkDirection.H2D, "state blocks.0", 20)
    stats.add(LinkDirection.D2H, "blocks.0", 40)
    assert (stats.h2d_nbytes, stats.d2h_nbytes) == (30, 40)
    assert stats.by_kind(LinkDirection.H2D) == {"param": 10, "state": 20}


class StuckEvent:
    """An event that passes at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks >= 3


def test_cuda_fence_with_a_timeout_polls() -> None:
    event = StuckEvent()
    CudaFence(event, "unit").wait(timeout_s=60)  # type: ignore[arg-type]
    assert event.looks == 3
    with pytest.raises(TimeoutError, match="copy of unit"):
        CudaFence(StuckEvent(), "unit").wait(timeout_s=0)  # type: ignore[arg-type]


def test_ticket_fence_raises_what_the_worker_met() -> None:
    ticket = Ticket("unit")
    fence = TicketFence(ticket)
    assert not fence.done
    with pytest.raises(TimeoutError, match="copy of unit"):
        fence.wait(timeout_s=0)
    ticket.set_exception(RuntimeError("an illegal memory access"))
    assert fence.done
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fence.wait()
