"""What other distributions bring, by the name of an entry point; nothing of theirs is imported before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from storage.errors import PluginError

BACKENDS_GROUP = "infinity.storage_backends"  # see `storage.backends.custom`


@dataclass(frozen=True, slots=True)
class Plugin:
    """An object behind an entry point, and where it is from: "name of distribution 1.0"."""

    name: str
    target: Any
    origin: str


def plugin_names(group: str) -> list[str]:
    """The names in a group of entry points, sorted."""
    return sorted(entry_points(group=group).names)


def load_plugin(group: str, name: str) -> Plugin:
    """Import what a name stands for.

    Raises:
        PluginError: nobody brings it, several distributions do, or importing it failed.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        known = ", ".join(map(repr, plugin_names(group))) or "none"
        raise PluginError(f"no installed distribution brings {name!r} ({group}); installed: {known}")
    origins = sorted({_origin(point) for point in found})
    if len(origins) > 1:
        raise PluginError(f"{name!r} ({group}) is brought by {' and by '.join(origins)}; uninstall all but one")
    (origin,) = origins
    try:
        target = found[0].load()
    except Exception as error:
        raise PluginError(
            f"{name!r} ({group}) of {origin} cannot be loaded from {found[0].value}: {type(error).__name__}: {error}. "
            f"Update or reinstall {origin.partition(' ')[0]}"
        ) from error
    return Plugin(name, target, origin)


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
