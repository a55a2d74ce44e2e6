"""What the fields of settings take: validators that say what is allowed, and the kinds of numbers.

What other distributions bring is looked up by name only; nothing of theirs is imported before it is used.
"""

import os
from collections.abc import Callable
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from infinity.choices import IoEngine
from storage.paths import StrPath
from storage.plugins import BACKENDS_GROUP, plugin_names

POLICIES_GROUP = "infinity.wrap_policies"
Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
_E = TypeVar("_E", bound=StrEnum)


def choice(kind: type[_E]) -> Callable[[object], _E]:
    """Validator for a member of `kind` or its exact text."""
    names = [member.value for member in kind]
    allowed = ", ".join(map(repr, names))

    def validate(value: object) -> _E:
        if isinstance(value, str):
            if value in names:
                return kind(value)
            if near := get_close_matches(value, names, n=1):
                raise ValueError(f"did you mean {near[0]!r}? allowed: {allowed}")
        raise ValueError(f"allowed: {allowed}")

    return validate


def path(value: object) -> object:
    """Text as a `Path`; "~" is the user's home."""
    return _expanded(value) if isinstance(value, str | os.PathLike) else value


def _expanded(given: StrPath) -> Path:
    try:
        return Path(given).expanduser()
    except (RuntimeError, TypeError) as error:  # nobody's home; a path of bytes
        raise ValueError(f"{given}: {error}; write it out") from None


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and value != ""


def paths(value: object) -> object:
    """One path or a list of paths, as a tuple of distinct `Path`s, "~" being the user's home; `None` stays."""
    if value is None:
        return None
    items = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(items, list | tuple) or not items or not all(_is_path(i) for i in items):
        raise ValueError("allowed: a directory or a list of at least one, or leave it out for a temporary directory")
    found = tuple(map(_expanded, items))
    if len(set(found)) < len(found):
        raise ValueError("a directory is listed twice; allowed: distinct directories, one per drive")
    return found


def unit_classes(value: object) -> object:
    """Module classes or their names, as a tuple; one alone is taken as a list of one."""
    items = [value] if isinstance(value, str | type) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str | type) and i != "" for i in items):
        raise ValueError('allowed: module classes or their names, such as ["LlamaDecoderLayer"]')
    return tuple(items)


def stage(value: object) -> object:
    """One of the stages, as an integer."""
    if type(value) is not int or value not in (1, 2, 3):  # True and 1.0 equal 1
        raise ValueError("allowed: 1, 2, 3")
    return value


def policy_alone(value: object) -> object:
    """The name of a policy stands for a section with nothing else in it."""
    return {"policy": value} if isinstance(value, str) else value


def engine(value: object) -> object:
    """An engine of ours as `IoEngine`, that of another distribution as its name."""
    try:
        return choice(IoEngine)(value)
    except ValueError as error:
        brought = plugin_names(BACKENDS_GROUP)
        if value in brought:
            return value
        raise ValueError(f"{error}{_installed(value, brought, BACKENDS_GROUP)}") from None


def wrap_policy(value: object) -> object:
    """A function, or the name of one that another distribution brings."""
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    brought = plugin_names(POLICIES_GROUP)
    if value in brought:
        return value
    allowed = "allowed: a function that takes the model and gives the modules to be units, or its name"
    raise ValueError(f"{allowed}{_installed(value, brought, POLICIES_GROUP)}")


def _installed(value: object, brought: list[str], group: str) -> str:
    """What else could have been meant."""
    near = get_close_matches(value, brought, n=1) if isinstance(value, str) else []
    names = ", ".join(map(repr, brought)) or "none"
    return f"; installed ({group}): {names}" + (f"; did you mean {near[0]!r}?" if near else "")
