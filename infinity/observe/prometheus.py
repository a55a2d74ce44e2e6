"""The counters for Prometheus: a file for the node exporter's textfile collector, or a server on this machine.

Names follow Prometheus' rules: `nvme/read_bytes` becomes `infinity_nvme_read_bytes_total`, seconds are spelled out, and
what exists once per drive or cause carries a label. Needs the extra `metrics` (prometheus-client).

[Note: one name for two] Two values may come to one name: `loss/a` and `loss_a`, or one that a loop passes in and a
counter. The counter keeps the name, else the value that came first. The other one gets a name that no other value has,
by Prometheus' own rule for writing any text as a name ("values escaping"): `U__infinity__loss_2f_a`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError
from storage.paths import StrPath

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_ENGINE = re.compile(r"^(nvme|link|ranks|stall|readahead|order|optimizer)/")  # what else is there, loops pass in
_GAUGES = re.compile(r"held|capacity|file_bytes|per_s$|per_block$")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = ("drive", "cause")
_DRIVE = re.compile(r"^nvme/drive(\d+)/(.+)$")
_STALL = re.compile(r"^stall/(.+)_(s|count)$")


@dataclass(frozen=True, slots=True)
class _Series:
    """What Prometheus calls a value, and the labels that tell apart what is counted several times."""

    name: str
    labels: tuple[tuple[str, str], ...]
    is_gauge: bool

    @property
    def family(self) -> tuple[str, tuple[str, ...], bool]:
        """What it shares with the others of its name."""
        return self.name, tuple(label for label, _ in self.labels), self.is_gauge

    @property
    def claimed(self) -> tuple[str, ...]:
        """The names that no other family may have."""
        return (self.name,) if self.is_gauge else (self.name, f"{self.name}_total")


class _Names:
    """Gives every value its series, and no two the same. See [Note: one name for two]."""

    def __init__(self) -> None:
        self._known: dict[str, _Series] = {}
        self._families: dict[str, tuple[str, tuple[str, ...], bool]] = {}  # by claimed name
        self._given: set[_Series] = set()

    def of(self, keys: Iterable[str]) -> dict[str, _Series]:
        """Of the values of a row."""
        new = [key for key in keys if key not in self._known]
        for key in sorted(new, key=lambda key: _ENGINE.match(key) is None):  # counters first
            wanted = _series_of(key)
            is_free = all(self._families.get(name, wanted.family) == wanted.family for name in wanted.claimed)
            series = wanted if is_free and wanted not in self._given else _Series(_escaped(key), (), wanted.is_gauge)
            self._known[key] = series
            self._given.add(series)
            self._families.update(dict.fromkeys(series.claimed, series.family))
        return {key: self._known[key] for key in keys}


class _Collector:
    """The newest row, as Prometheus' metrics. The thread that logs replaces it whole; others read it."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = {name: str(value) for name, value in labels.items()}
        self._names = _Names()
        self._row: list[tuple[str, _Series, float]] = []

    def show(self, values: Mapping[str, float]) -> None:
        """From now on; what is no number is left out."""
        numbers = {key: number for key, value in values.items() if (number := _number(value)) is not None}
        named = self._names.of(list(numbers))
        self._row = [(key, named[key], value) for key, value in numbers.items()]

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for key, series, value in self._row:
            labels = dict(series.labels) | self._labels
            if series.name not in families:
                family = GaugeMetricFamily if series.is_gauge else CounterMetricFamily
                families[series.name] = family(series.name, f"{key} of engine.metrics()", labels=list(labels))
            families[series.name].add_metric(list(labels.values()), value)
        return families.values()


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last one of a tensor with several
        return None


def _series_of(key: str) -> _Series:
    """By the rules, whoever else has it."""
    is_gauge = not _ENGINE.match(key) or bool(_GAUGES.search(key))
    labels: tuple[tuple[str, str], ...] = ()
    if match := _DRIVE.match(key):
        labels, key = (("drive", match[1]),), f"drive/{match[2]}"
    elif match := _STALL.match(key):
        labels, key = (("cause", match[1]),), f"stall_{match[2]}"
    key = re.sub(r"_per_s$", "_per_second", key)
    key = re.sub(r"_s$", "_seconds", key)
    name = "infinity_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
    return _Series(name if is_gauge else name.removesuffix("_total"), labels, is_gauge)


def _escaped(key: str) -> str:
    def one(character: str) -> str:
        if character == "_":
            return "__"
        return character if character.isascii() and character.isalnum() else f"_{ord(character):x}_"

    return "U__" + "".join(map(one, f"infinity_{key}"))


def _registry(labels: Mapping[str, str]) -> tuple[CollectorRegistry, _Collector]:
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ConfigError("metrics for Prometheus need a package: pip install prometheus-client") from error
    for name in labels:
        if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
            raise ConfigError(
                f"label {name!r}: allowed: letters, digits and underscores, not starting with a digit; "
                f"{' and '.join(_OWN_LABELS)} are taken by the counters"
            )
    collector = _Collector(labels)
    registry = CollectorRegistry()
    registry.register(collector)
    return registry, collector


class PrometheusFile:
    """A `.prom` file with the newest row, replaced whole, as the node exporter's textfile collector wants it.

    Args:
        path: inside the collector's directory.
        labels: added to every value, for example `{"rank": "0"}`.

    Raises:
        ConfigError: prometheus-client is not installed, the directory is not there, or a label cannot be one.
    """

    def __init__(self, path: StrPath, labels: Mapping[str, str] | None = None) -> None:
        self._path = Path(path)
        if not self._path.parent.is_dir():
            raise ConfigError(f"{path}: cannot be written: {self._path.parent} is no directory")
        self._registry, self._collector = _registry(labels or {})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the file by the values of a step, in one move."""
        from prometheus_client import write_to_textfile

        self._collector.show({"step": step, **values})
        write_to_textfile(str(self._path), self._registry)

    def close(self) -> None:
        """Nothing: the file stays, and is closed already."""


class PrometheusServer:
    """Serves the newest row at http://127.0.0.1:PORT/metrics. Only this machine can ask; `close` ends its thread.

    Args:
        port: 0 takes a free one, see `port`.
        labels: added to every value.

    Raises:
        ConfigError: prometheus-client is not installed, the port is taken, or a label cannot be one.
    """

    def __init__(self, port: int = 0, labels: Mapping[str, str] | None = None) -> None:
        registry, self._collector = _registry(labels or {})
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"port {port} on 127.0.0.1: {why}; choose another, or 0") from error
        self.port: int = self._server.server_port

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of a step from now on."""
        self._collector.show({"step": step, **values})

    def close(self) -> None:
        """Serve no more, and give the port back. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=10)
