"""How often a command looks for garbage."""

from __future__ import annotations

import gc

import pytest

from infinity.cli.garbage import seldom_collected


def test_garbage_is_looked_for_seldom_and_afterwards_as_before() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="what went wrong"), seldom_collected():
        assert gc.isenabled()
        assert gc.get_threshold()[0] >= 100 * before[0]
        raise ValueError("what went wrong")
    assert gc.get_threshold() == before
