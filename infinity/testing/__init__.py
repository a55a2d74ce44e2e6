"""Public helpers for tests without a GPU: a file-backed fake GPU, clocks, an asyncio loop with virtual time."""

from infinity.testing.clock import Clock, RealClock, VirtualClock, VirtualDeadlockError, VirtualTimeLoop, run_virtual
from infinity.testing.fake_gpu import CopyOp, FakeGpu, FakeRegion, LogEntry

__all__ = [
    "Clock",
    "CopyOp",
    "FakeGpu",
    "FakeRegion",
    "LogEntry",
    "RealClock",
    "VirtualClock",
    "VirtualDeadlockError",
    "VirtualTimeLoop",
    "run_virtual",
]
