"""The counters for Prometheus: a file for the node exporter's textfile collector, or a server on this machine.

Names follow Prometheus' rules: `nvme/read_bytes` becomes `infinity_nvme_read_bytes_total`, seconds are spelled out, and
what exists once per drive or cause carries a label. Needs the extra `metrics` (prometheus-client).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


class _Collector:
    """The newest row, as Prometheus' metrics. `row` is replaced whole by the thread that logs."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.row: Mapping[str, float] = {}
        self._labels = dict(labels)

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for key, value in self.row.items():
            name, labels = _name_of(key)
            labels |= self._labels
            is_gauge = not _ENGINE.match(key) or bool(_GAUGES.search(key))
            if name not in families:
                family = GaugeMetricFamily if is_gauge else CounterMetricFamily
                families[name] = family(name, f"{key} of engine.metrics()", labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        return families.values()


def _name_of(key: str) -> tuple[str, dict[str, str]]:
    """Prometheus' name for a counter, and the labels that tell apart what is counted several times."""
    labels: dict[str, str] = {}
    if match := _DRIVE.match(key):
        labels["drive"], key = match[1], f"drive/{match[2]}"
    elif match := _STALL.match(key):
        labels["cause"], key = match[1], f"stall_{match[2]}"
    key = re.sub(r"_per_s$", "_per_second", key)
    key = re.sub(r"_s$", "_seconds", key)
    return "infinity_" + re.sub(r"[^a-zA-Z0-9_]", "_", key), labels


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

        self._collector.row = {"step": step, **values}
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
        self._collector.row = {"step": step, **values}

    def close(self) -> None:
        """Serve no more, and give the port back. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=10)
