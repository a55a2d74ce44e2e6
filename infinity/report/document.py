"""What every page has in common: one HTML file that needs no network, with plotly's figures in the reader's colours."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from infinity.errors import ConfigError
from infinity.report.assets import SCRIPT, STYLE

KEYS = (
    "Figures: drag to move, click and wheel to zoom, double-click for all of it; with the keyboard Tab to one, then "
    "← → + −, 0 for all of it, Esc to leave."
)
_CONFIG: dict[str, Any] = {"responsive": True, "displayModeBar": False, "scrollZoom": True}
_HEIGHT_PX = 320


def graph_objects() -> Any:
    """plotly's module of figures.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError("figures need plotly: pip install plotly") from error
    return go


class Document:
    """A page that is put together from top to bottom. Text is HTML already, titles are not."""

    def __init__(self, title: str) -> None:
        graph_objects()
        self._title = title
        self._parts: list[str] = []
        self._figures: dict[str, Any] = {}

    def add(self, html: str) -> None:
        """A part of the body."""
        self._parts.append(html)

    def add_figure(self, name: str, title: str, figure: Any, before: str = "") -> None:
        """A figure of plotly under its title, drawn by the page's script.

        Args:
            name: of its heading; the figure's is `figure-NAME`.
            before: between title and figure.
        """
        height_px = figure.layout.height or _HEIGHT_PX
        drawn: dict[str, Any] = json.loads(figure.to_json()) | {"config": _CONFIG}
        drawn["layout"].pop("template", None)  # the look is the page's
        drawn["layout"].pop("height", None)  # the element's
        self._figures[f"figure-{name}"] = drawn
        self.add_section(
            name,
            title,
            f'{before}<figure id="figure-{name}" style="height:{height_px}px" tabindex="0" role="group" '
            f'aria-label="{escape(title)}"></figure>',
        )

    def add_section(self, name: str, title: str, html: str) -> None:
        """A part with a title that links lead to."""
        self.add(f'<h2 id="{name}">{escape(title)}</h2>{html}')

    def to_html(self) -> str:
        """The whole file."""
        from plotly.offline import get_plotlyjs

        data = json.dumps(self._figures).replace("<", "\\u003c")  # nothing in it ends the script
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(self._title)} · Infinity</title><link rel="icon" href="data:,"><style>{STYLE}</style>'
            "</head><body>\n"
            + "\n".join(self._parts)
            + f'\n<script type="application/json" id="figures">{data}</script>\n<script>{get_plotlyjs()}</script>\n'
            f"<script>{SCRIPT}</script>\n</body></html>\n"
        )
