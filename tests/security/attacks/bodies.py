"""Attacks by the body of one request."""

from __future__ import annotations

from functools import partial

from tests.security.attack import Attack, Target
from tests.support.large_bodies import LARGE_BODIES, LargeBody


async def _nested_parts(target: Target) -> None:
    body = b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}"
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", body)


async def _pieces(target: Target) -> None:
    body = b'{"with_pieces":true,"content":"' + b"a b " * (2 << 20) + b'"}'
    async with target.session() as session:
        await target.post(session, "/tokenize", body[: (8 << 20) - 2] + b'"}')


async def _large(large: LargeBody, target: Target) -> None:
    async with target.session() as session:
        await target.post(session, large.path, large.of())


ATTACKS = (
    Attack(
        name="nested-parts",
        about="A message's content is nested hundreds of arrays deep.",
        strike=_nested_parts,
        at_once=4,
    ),
    Attack(
        name="pieces-of-tokens",
        about="The tokens of 8 MiB of text, each with its piece: 1.1 GiB in the gateway, 0.8 in the worker.",
        strike=_pieces,
        at_once=2,
    ),
    *(
        Attack(
            name=f"large-{large.name}",
            about=f"8 MiB to {large.path}, of which each piece was an object, and each wrong one an error.",
            strike=partial(_large, large),
            at_once=4,
        )
        for large in LARGE_BODIES
    ),
)
