"""What the bodies of all dialects have in common: how strictly they are read, and how unions are told apart."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

TAG = "<"
"""First character of a union's tags, which are no part of a parameter's path."""


MAX_UNKNOWN = 1000
"""Fields of one object beyond those that are known. Each unknown one would be an error of its own, of a microsecond."""


class Body(BaseModel):
    """Values are taken as they are: "1" is no number, 1 is no boolean. Unknown names are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MAX_UNKNOWN:
            raise PydanticCustomError("too_many_fields", "It has more fields than there are. Send those that are known")
        return value


class Loose(BaseModel):
    """Unknown names are ignored: clients send back what other servers once added to a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def text_or_parts(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def parts_or_object(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<object>"
