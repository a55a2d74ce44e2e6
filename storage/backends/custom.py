"""Backends of other distributions, by the name that `nvme.engine` is given.

A distribution brings one with an entry point of the group `infinity.storage_backends`; in its `pyproject.toml`:

    [project.entry-points."infinity.storage_backends"]
    mine = "my_package:MyBackend"

What it names is a class (or a function with an attribute `opens_direct`) that keeps `BackendFactory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.backends.base import Backend
from storage.errors import PluginError
from storage.plugins import BACKENDS_GROUP, load_plugin

_OWED = ("name", "progress", "opens_direct", "cost", "submit", "promote", "in_flight", "close")


class BackendFactory(Protocol):
    """Makes the backend of one drive.

    Attributes:
        opens_direct: whether the files that the backend is given have to be opened with O_DIRECT.
    """

    opens_direct: bool

    def __call__(
        self, *, threads: int, block_nbytes: int, eio_retries: int, write_memory_nbytes: int | None
    ) -> Backend:
        """A backend.

        Args:
            threads: how many blocks are to be at the drive at a time.
            block_nbytes: bytes of a block, a multiple of 4096.
            eio_retries: how often a block is to be tried again after EIO.
            write_memory_nbytes: memory that writes may hold, by which they can be paced; None if that is not known.
        """


@dataclass(frozen=True, slots=True)
class CustomEngine:
    """Stands where `storage.backends.probe.Engine` does. `value` is its name."""

    value: str
    opens_direct: bool
    origin: str
    _factory: BackendFactory

    def make(self, *, threads: int, block_nbytes: int, eio_retries: int, write_memory_nbytes: int | None) -> Backend:
        """The backend of a drive.

        Raises:
            PluginError: making it failed, or what was made is no backend.
        """
        try:
            backend = self._factory(
                threads=threads,
                block_nbytes=block_nbytes,
                eio_retries=eio_retries,
                write_memory_nbytes=write_memory_nbytes,
            )
        except Exception as error:
            raise PluginError(
                f"engine {self.value!r} of {self.origin} could not be made: {type(error).__name__}: {error}"
            ) from error
        lacking = [name for name in _OWED if not hasattr(backend, name)]
        if lacking:
            raise PluginError(
                f"engine {self.value!r} of {self.origin} is no backend: {type(backend).__name__} lacks "
                f"{', '.join(lacking)} (see storage/backends/base.py)"
            )
        return backend


def load_engine(name: str) -> CustomEngine:
    """The engine that a distribution brings under a name.

    Raises:
        PluginError: nobody brings it, or it cannot be used.
    """
    plugin = load_plugin(BACKENDS_GROUP, name)
    opens_direct = getattr(plugin.target, "opens_direct", None)
    if not callable(plugin.target) or not isinstance(opens_direct, bool):
        raise PluginError(
            f"engine {name!r} of {plugin.origin} has to be a class or a function with an attribute opens_direct, True "
            f"or False; it is {plugin.target!r}"
        )
    return CustomEngine(name, opens_direct, plugin.origin, plugin.target)
