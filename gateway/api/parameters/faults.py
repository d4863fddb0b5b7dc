"""Words what is wrong with a value of a body: the parameter by its path, what was sent, what to send."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.api.parameters.base import TAG
from gateway.errors import InvalidRequest, UnsupportedParameter

SHOWN_CHARS = 40
MAX_PATH_CHARS = 160

# pydantic speaks of Python's types; callers write JSON.
_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "an array",
    "model_type": "an object",
    "string_type": "a string",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LENGTHS = {
    "string_too_long": ("max_length", "characters", "at most"),
    "string_too_short": ("min_length", "characters", "at least"),
    "too_long": ("max_length", "items", "at most"),
    "too_short": ("min_length", "items", "at least"),
}
_WORDS: dict[bool | None, str] = {True: "true", False: "false", None: "null"}


def translated(error: ValidationError) -> InvalidRequest:
    """Return an error that tells the first thing that is wrong, and how many more there are."""
    details = error.errors(include_url=False)
    first = details[0]
    steps = (str(step)[:MAX_PATH_CHARS] for step in first["loc"])
    path = ".".join(step for step in steps if not step.startswith(TAG))[:MAX_PATH_CHARS]
    more = f" ({len(details) - 1} more problems)" if len(details) > 1 else ""
    if first["type"] == "extra_forbidden":
        return UnsupportedParameter(f"`{path}` is not a parameter that Paddock knows. Leave it out.", param=path)
    if first["type"] == "missing":
        return InvalidRequest(f"`{path}` is missing. Send it.{more}", param=path)
    return InvalidRequest(f"`{path}` {_problem(first)}{more}", param=path)


def too_nested() -> InvalidRequest:
    """Return the error for a RecursionError while a body is checked."""
    return InvalidRequest("The body is nested too deeply. Send a flatter JSON object.")


def shown(value: Any) -> str:
    """Return a value for an error message: short, and never more than the caller sent in one place."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'an array'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    if isinstance(value, str):
        value = value[: SHOWN_CHARS + 1]  # otherwise megabytes would be written out for forty characters
    text = _WORDS.get(value, repr(value)) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _problem(detail: ErrorDetails) -> str:
    fault, value, limits = detail["type"], detail["input"], detail.get("ctx", {})
    if fault in _LENGTHS:
        limit, things, bound = _LENGTHS[fault]
        return f"has {len(value)} {things}. Send {bound} {limits[limit]}."
    if fault in _BOUNDS:
        limit, bound = _BOUNDS[fault]
        return f"is {shown(value)}. Send {bound} {_number(limits[limit])}."
    if fault in _KINDS:
        return f"is {shown(value)}. Send {_KINDS[fault]}."
    if fault == "literal_error":
        return f"is {shown(value)}. Send {limits['expected']}."
    if fault == "string_pattern_mismatch":
        return f"is {shown(value)}. Send a string that matches the pattern {limits['pattern']}."
    return f"is {shown(value)}. {detail['msg']}."


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
