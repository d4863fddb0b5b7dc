"""Reads the strings that end an answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import text_or_parts
from gateway.errors import InvalidRequest

MAX_STOPS = 128
MAX_STOP_CHARS = 512
MAX_ALL_STOP_CHARS = 8192
"""Most characters of all stop strings together: a worker makes a tree of them."""

Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


def read_stop(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    for n, text in enumerate(stops):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            path = name if isinstance(stop, str) else f"{name}.{n}"
            message = f"`{path}` has {len(text)} characters. A stop string has 1 to {MAX_STOP_CHARS}."
            raise InvalidRequest(message, param=path)
    if (num_chars := sum(map(len, stops))) > MAX_ALL_STOP_CHARS:
        message = (
            f"`{name}` has {num_chars} characters in all. All stop strings together have at most {MAX_ALL_STOP_CHARS}."
        )
        raise InvalidRequest(message, param=name)
    return tuple(stops)
