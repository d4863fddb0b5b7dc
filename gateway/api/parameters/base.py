"""Base classes of all bodies: how strictly they are read, other names of fields, how unions are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gateway.api.intake.decoding import let_loop_run
from gateway.telemetry.ignored import Ignored

TAG = "<"
"""First character of a union's tags, which are no part of a parameter's path."""


MAX_UNKNOWN = 1000
"""Most fields of one object that are not known. Each would be an error of its own, which takes a microsecond."""


@dataclass(frozen=True, slots=True)
class Also:
    """Other names of a body's own parameter, by which other programs' clients send it: `Annotated[..., Also("a")]`."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


@cache
def synonyms_of(kind: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """Return a body's parameters that have other names, with these."""
    of_fields = {
        field.alias or name: tuple(other for also in field.metadata if isinstance(also, Also) for other in also.names)
        for name, field in kind.model_fields.items()
    }
    return {name: others for name, others in of_fields.items() if others}


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names that a caller may send in such an object."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class Body(BaseModel):
    """A body whose values are taken as they are: "1" is no number, 1 is no boolean.

    Unknown names are noted in the `Ignored` that the validation has as its context, and left out. They are errors where
    that refuses them, and where the validation has none.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > len(cls.model_fields) + MAX_UNKNOWN:
            raise PydanticCustomError("too_many_fields", "It has more fields than there are. Send those that are known")
        ignored, names = info.context, _names_of(cls)
        if not isinstance(ignored, Ignored) or ignored.refuses or value.keys() <= names:
            return value
        for name in value:
            if name not in names:
                ignored.note_unknown(name)
        return {name: value[name] for name in value if name in names}


class Loose(BaseModel):
    """An object whose unknown names are ignored: clients send back what other servers once added to a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Entry(Loose):
    """An object of which a body may have thousands, each with hundreds of parts.

    All of a body is validated in one call, on a thread if there is much in it, and that call does not release the GIL:
    28,000 tool calls held up every stream for 90 ms. Python code within it lets other threads run in between.
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
