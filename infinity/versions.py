"""Which version of this program runs. Imports no torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import infinity


def infinity_version() -> str:
    """Version of the installed package, or of the checkout."""
    try:
        return version("infinity-offload")
    except PackageNotFoundError:
        return infinity.__version__
