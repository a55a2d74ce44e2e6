"""Public helpers for tests without a GPU or a disk: a file-backed fake GPU, a simulated store, virtual time."""

from infinity.testing.clock import Clock, RealClock, VirtualClock, VirtualDeadlockError, VirtualTimeLoop, run_virtual
from infinity.testing.fake_gpu import CopyOp, FakeGpu, LogEntry
from infinity.testing.fake_pages import FakeRegion
from infinity.testing.simulated_store import SimulatedStore, SimulatedTransfer

__all__ = [
    "Clock",
    "CopyOp",
    "FakeGpu",
    "FakeRegion",
    "LogEntry",
    "RealClock",
    "SimulatedStore",
    "SimulatedTransfer",
    "VirtualClock",
    "VirtualDeadlockError",
    "VirtualTimeLoop",
    "run_virtual",
]
