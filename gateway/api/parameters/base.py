"""Holds the base classes of all bodies (strictness, synonyms of fields, tags of unions), and translates errors.

An error names the parameter by its path, what was sent and what to send.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.api.intake.decoding import let_loop_run
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.telemetry.request_log import Ignored

TAG = "<"
"""First character of the tags of unions. pydantic puts tags into the paths of errors; `translate_error` drops them."""


MAX_UNKNOWN = 1000
"""Maximum unknown fields of one object. If it has more, one error stands for all, as each error takes a microsecond."""


@dataclass(frozen=True, slots=True)
class Also:
    """Holds a parameter's synonyms, the names that other programs' clients use for it: `Annotated[..., Also("a")]`."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@cache
def synonyms_of(kind: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """Return parameter -> its synonyms, for the parameters of a body that have some."""
    of_fields = {
        field.alias or name: tuple(other for also in field.metadata if isinstance(also, Also) for other in also.names)
        for name, field in kind.model_fields.items()
    }
    return {name: others for name, others in of_fields.items() if others}


@cache
def names_of(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of a body's fields, as callers send them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class Body(BaseModel):
    """A request's body whose values are not converted: "1" is not accepted as a number, nor 1 as a boolean.

    Unknown fields are errors. But if the context of the validation is an `Ignored` with `refuses` false, they are left
    out, and noted in that `Ignored`."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > len(cls.model_fields) + MAX_UNKNOWN:
            raise PydanticCustomError("too_many_fields", "It has more fields than there are. Send those that are known")
        ignored, names = info.context, names_of(cls)
        if not isinstance(ignored, Ignored) or ignored.refuses or value.keys() <= names:
            return value
        for name in value:
            if name not in names:
                ignored.note_unknown(name)
        return {name: value[name] for name in value if name in names}


class Loose(BaseModel):
    """An object whose unknown fields are ignored: clients send back fields that other servers added to a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Entry(Loose):
    """The base of objects of which a body can have thousands, each with hundreds of parts.

    pydantic validates a whole body in one call (on a thread if it is large) and does not release the GIL: 28,000 tool
    calls blocked every stream for 90 ms. The validator below, called for each object, pauses so that other threads run.
    """

    @model_validator(mode="before")
    @classmethod
    def _let_others_run(cls, value: Any) -> Any:
        let_loop_run()
        return value


def text_or_parts(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def parts_or_object(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<object>"


SHOWN_CHARS = 40
MAX_PATH_CHARS = 160

# pydantic's messages name types of Python; callers write JSON.
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


def translate_error(error: ValidationError) -> InvalidRequest:
    """Return the error for the first problem. Its message counts the others, except for an unknown parameter."""
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


def nesting_error() -> InvalidRequest:
    """Return the error for a body whose validation raised RecursionError."""
    return InvalidRequest("The body is nested too deeply. Send a flatter JSON object.")


def quote(value: Any) -> str:
    """Return a value as an error message shows it: at most SHOWN_CHARS characters; of an array or object, the size."""
    if isinstance(value, dict | list | array):
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
        return f"is {quote(value)}. Send {bound} {_number(limits[limit])}."
    if fault in _KINDS:
        return f"is {quote(value)}. Send {_KINDS[fault]}."
    if fault == "literal_error":
        return f"is {quote(value)}. Send {limits['expected']}."
    if fault == "string_pattern_mismatch":
        return f"is {quote(value)}. Send a string that matches the pattern {limits['pattern']}."
    return f"is {quote(value)}. {detail['msg']}."


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"
