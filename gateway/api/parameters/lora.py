"""LoRA adapters of one request: llama-server's `lora`, where an adapter that is not listed is off.

llama-server's numbers are places in one server's list; the workers of a fleet may have loaded their adapters in
different orders, so here an adapter goes by its name.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.api.parameters.base import Body
from gateway.errors import InvalidRequest
from workers.protocol.requests import AdapterUse

MAX_ADAPTERS = 64
MAX_NAME_CHARS = 128
MAX_SCALE = 100


class LoraUse(Body):
    id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 1.0


class LoraBody(Body):
    lora: Annotated[list[LoraUse], Field(max_length=MAX_ADAPTERS)] | None = None


def read_lora(body: LoraBody) -> tuple[AdapterUse, ...]:
    """Raises InvalidRequest for an adapter that is named twice."""
    uses = tuple(AdapterUse(use.id, use.scale) for use in body.lora or ())
    names = [use.name for use in uses]
    for n, name in enumerate(names):
        if name in names[:n]:
            message = f"`lora.{n}.id` is {name!r}, which an entry before it has too. Send each adapter once."
            raise InvalidRequest(message, param=f"lora.{n}.id")
    return uses
