"""Colours by what happens, the same on a run's page and in the documentation's pictures.

Middle tones that stand out from white and from black; neighbours differ in lightness too, for readers who tell hues
apart badly.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinity.report.remedies import REMEDIES

COLOURS: Mapping[str, str] = {
    "forward": "#3d8bfd",
    "backward": "#8a63d2",
    "gather": "#8b949e",
    "gradient": "#17a2a2",
    "step": "#c2c8cf",
    "stall": "#e5484d",
    "optimizer": "#e08c1a",
    "h2d": "#5cb8ff",
    "d2h": "#b48cff",
    "read": "#2fa45c",
    "write": "#b8a215",
    "device": "#3d8bfd",
    "host": "#e08c1a",
    "nvme": "#2fa45c",
}
SERIES = (
    "#3d8bfd",
    "#e5484d",
    "#e08c1a",
    "#8a63d2",
    "#17a2a2",
    "#b8a215",
    "#d6589f",
    "#8b949e",
    "#2fa45c",
    "#a5673f",
    "#5b7083",
)
"""Of lines and parts that have no colour of their own; the first for what is no wait."""
NAMES: Mapping[str, str] = {
    "gather": "gather",
    "h2d": "upload",
    "d2h": "download",
    "optimizer": "update",
    "stall": "waiting",
    "step": "optimizer step",
}
_OTHER = "#6e7781"


def colour_of(what: str) -> str:
    """Of a category of spans, or of a tier."""
    return COLOURS.get(what, _OTHER)


def colour_of_cause(cause: str) -> str:
    """Of what is waited for: the same in every figure."""
    causes = list(REMEDIES)
    return SERIES[1 + causes.index(cause) % (len(SERIES) - 1)] if cause in causes else _OTHER


def name_of(category: str) -> str:
    """What readers call a category of spans."""
    return NAMES.get(category, category)
