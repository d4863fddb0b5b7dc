"""Declares the prices of models and adapters: the form of all of them, and the defaults in the catalog.

Money is in the currency of the price list (`paddock prices currency`), which goes before the catalog. No worker reads a
price: a changed one starts none anew.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOST = 1e6
"""The highest price."""


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The price of a call, where the price list has none for its model or adapter."""

    per_million_prompt: Annotated[
        float,
        Meta(
            ge=0,
            le=MOST,
            description="per million prompt tokens that were computed; those of pictures and sounds are among them",
        ),
    ] = 0.0
    per_million_cached: Annotated[
        float, Meta(ge=0, le=MOST, description="per million prompt tokens that were cached")
    ] = 0.0
    per_million_completion: Annotated[float, Meta(ge=0, le=MOST, description="per million tokens of answers")] = 0.0
    per_gpu_second: Annotated[
        float,
        Meta(
            ge=0,
            le=MOST,
            description="per second from an answer's submission to its end, shared by nobody: each call pays its own",
        ),
    ] = 0.0
