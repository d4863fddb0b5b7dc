"""Attacks by the body of one request."""

from __future__ import annotations

from tests.security.attack import Attack, Target


async def _nested_parts(target: Target) -> None:
    body = b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}"
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", body)


ATTACKS = (
    Attack(
        name="nested-parts",
        about="A message's content is nested hundreds of arrays deep.",
        strike=_nested_parts,
        at_once=4,
    ),
)
