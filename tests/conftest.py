"""Fixtures for every test, and a check after each that the engine left nothing behind."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from storage.drives import WrapBackend
from tests.covering import fast_places
from tests.leaks import LeakCheck, check_empty

MOST_PROCESSES = 8
_CHECKED = ("infinity", "parity", "mechanics", "faults", "memory")

MakeEngine = Callable[..., infinity.Engine]


def pytest_configure() -> None:
    """One thread of torch, here and in the processes that tests start.

    The models are small, and threads that wait for each other after every operation take five times the processor time,
    and much longer than that where other processes want the processors too.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """As many processes as processors, but none beside this one for a few named files: starting takes as long as they.

    More than eight would want more memory than they save time: each holds torch and what the tests hold.
    """
    few = all(Path(argument.split("::")[0]).suffix == ".py" for argument in config.args)
    return 0 if few else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Which places of a test's settings are slow: those that are not needed for every pair of values, or every value.

    With the marker `pairs`, which all tests of parity have, or `somewhere`.
    """
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        places = [item for item in group if hasattr(item, "callspec") and item.get_closest_marker("slow") is None]
        if not places:
            continue
        is_somewhere = places[0].get_closest_marker("somewhere") is not None
        if is_somewhere or places[0].get_closest_marker("pairs") or _part_of(places[0].path) == "parity":
            settings = [place.callspec.params for place in places]  # type: ignore[attr-defined]
            for number in set(range(len(places))) - fast_places(settings, somewhere=is_somewhere):
                places[number].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was loaded until now stays: looking for garbage in it takes longer than many tests that have to."""
    gc.collect()
    gc.freeze()


def _part_of(path: Path) -> str | None:
    """The directory of `tests` that a file is in."""
    here = Path(__file__).parent
    return path.relative_to(here).parts[0] if path.is_relative_to(here) else None


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, file descriptor or swap folder survives a test of the engine."""
    if _part_of(request.node.path) not in _CHECKED:
        yield
        return
    before = LeakCheck.take()
    yield
    before.check(_folders_of(request))


def _folders_of(request: pytest.FixtureRequest) -> list[Path]:
    return [request.node.funcargs["tmp_path"]] if "tmp_path" in request.node.funcargs else []


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the user's drives were measured at must not decide what tests do, nor tests write there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Ctrl-C reaches the processes that tests start, also where the tests themselves run in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[MakeEngine]:
    """`infinity.offload` with small budgets and swap files in `tmp_path`; engines are closed and must be empty then."""
    engines: list[infinity.Engine] = []

    def make(
        model: nn.Module,
        *,
        init_fn: Any = None,
        weights: Path | None = None,
        strict: bool = True,
        wrap_backend: WrapBackend | None = None,
        **settings: Any,
    ) -> infinity.Engine:
        config = small_config(tmp_path, **settings)
        engine = infinity.offload(
            model, config, weights=weights, strict=strict, init_fn=init_fn, wrap_backend=wrap_backend
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
        check_empty(engine)


def small_config(folder: Path, **settings: Any) -> infinity.Config:
    """Settings for the models of `tests.zoo`: everything streams, nothing waits for long."""
    chosen: dict[str, Any] = {
        "precision": "fp32",
        "device": {"kind": "cpu", "budget": "8MiB"},
        "host": {"budget": "600KiB"},
        "resident_threshold": "1KiB",
        "optimizer_threads": 1,
    }
    nvme = {"paths": [folder], "io_timeout_s": 60.0, "threads": 2} | settings.pop("nvme", {})
    return infinity.Config(**(chosen | settings), nvme=nvme)
