"""Looking at what other threads run, which Python does under a lock."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import faulthandler, gc, threading
import torch
from infinity import occupancy

faulthandler.dump_traceback_later(40, exit=True)
is_over = False


def begin_threads():
    while not is_over:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


beginner = threading.Thread(target=begin_threads, daemon=True)
beginner.start()
none_of_these = frozenset({0})  # made here: the next thing that is allocated after the garbage is a frame
gc.set_threshold(1, 1, 1)
for _ in range(2000):
    gc.disable()
    for _ in range(20):
        tensor = torch.ones(1 << 12)
        tensor.own = [tensor]
    del tensor
    gc.enable()
    assert not occupancy._is_called(beginner.ident, none_of_these, beyond=0)
assert gc.isenabled()
is_over = True
"""


def test_tensors_that_are_garbage_do_not_stop_it_for_good() -> None:
    """A collection in that moment frees tensors, which lets a thread run that wants the same lock to begin another."""
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
