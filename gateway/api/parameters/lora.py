"""Reads the LoRA adapters of one request: llama-server's `lora`, where an adapter that is not listed is off.

An adapter goes by its name or, as in llama-server, by its number in the list of its model's adapters (`GET
/lora-adapters`): `gateway.catalog.adapters` finds what a number stands for.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body
from gateway.errors import InvalidRequest
from workers.protocol.requests import AdapterUse

MAX_ADAPTERS = 64
MAX_NAME_CHARS = 128
MAX_NUMBER = 65_535
MAX_SCALE = 16


def _id_kind(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<number>"


class LoraUse(Body):
    id: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), Tag("<name>")]
        | Annotated[int, Field(ge=0, le=MAX_NUMBER), Tag("<number>")],
        Discriminator(_id_kind),
    ]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 1.0


class LoraBody(Body):
    lora: Annotated[list[LoraUse], Field(max_length=MAX_ADAPTERS, fail_fast=True)] | None = None


def read_lora(body: LoraBody) -> tuple[AdapterUse, ...]:
    """Return the adapters. Raises InvalidRequest for one that is named twice."""
    uses = tuple(AdapterUse(str(use.id), use.scale) for use in body.lora or ())
    names = [use.name for use in uses]
    for n, name in enumerate(names):
        if name in names[:n]:
            message = f"`lora.{n}.id` is {name!r}, which an entry before it has too. Send each adapter once."
            raise InvalidRequest(message, param=f"lora.{n}.id")
    return uses
