"""What is wrong with settings, in words: every field at fault, its value, and what is allowed."""

from collections.abc import Mapping
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """The message for a ConfigError: one line, or one for each field."""
    lines = [_explain_one(model, details) for details in error.errors(include_url=False)]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} settings are wrong:" + "".join(f"\n  {line}" for line in lines)


def _explain_one(model: type[BaseModel], details: ErrorDetails) -> str:
    where, value = details["loc"], details["input"]
    name = ".".join(str(part) for part in where)
    if details["type"] == "extra_forbidden":
        return f"{name} = {value!r}: unknown setting; {_nearest(model, where)}"
    cause = details.get("ctx", {}).get("error")
    reason = str(cause) if cause is not None else details["msg"]
    if isinstance(value, Mapping | BaseModel):  # a check over several fields names them itself
        return f"{name}: {reason}" if name else reason
    return f"{name} = {value!r}: {reason}"


def _nearest(model: type[BaseModel], where: tuple[int | str, ...]) -> str:
    owner = model
    for part in where[:-1]:
        annotation = owner.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            owner = annotation
    names = list(owner.model_fields)
    near = get_close_matches(str(where[-1]), names, n=1)
    if (inner := _of_section(owner, str(where[-1]))) is not None:
        return f"did you mean {inner}? allowed: {', '.join(names)}"
    return (f"did you mean {near[0]!r}? " if near else "") + f"allowed: {', '.join(names)}"


def _of_section(owner: type[BaseModel], name: str) -> str | None:
    """How a setting of a section is written whose name was joined to that of its section: `host_budget`."""
    for section, field in owner.model_fields.items():
        inner = name.removeprefix(f"{section}_")
        annotation = field.annotation
        if inner != name and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            near = get_close_matches(inner, list(annotation.model_fields), n=1)
            if near:
                return f"{section}={{{near[0]!r}: ...}}"
    return None
