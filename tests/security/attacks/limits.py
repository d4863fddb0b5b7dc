"""Attacks on what is kept for a team longer than one call."""

from __future__ import annotations

import asyncio
import io
import json
import secrets

import aiohttp

from tests.security.attack import Attack, Target


async def _leave_a_stream_behind(target: Target, session: aiohttp.ClientSession) -> None:
    """Begin a stream that outlives its connection, with as many bytes per token as there can be, and leave."""
    body = {"model": target.model, "prompt": "a", "stream": True, "n_predict": 40, "n_probs": 100, "ignore_eos": True}
    headers = {"x-resume-grace": "60"}
    async with session.post(f"{target.url}/completion", json=body, headers=headers) as response:
        await response.content.readany()


async def _resumable_streams(target: Target) -> None:
    async with target.session() as session:
        await asyncio.gather(*(_leave_a_stream_behind(target, session) for _ in range(2)), return_exceptions=True)


async def _background_responses(target: Target) -> None:
    body = {"model": target.model, "input": "a", "background": True, "max_output_tokens": 4}
    async with target.session() as session:
        await asyncio.gather(*(target.post(session, "/v1/responses", body) for _ in range(2)))


async def _saved_slots(target: Target) -> None:
    """Save whatever lies in the slots under ever new names."""
    async with target.session() as session:
        for slot in range(4):
            body = {"model": target.model, "filename": secrets.token_hex(8)}
            await asyncio.gather(*(target.post(session, f"/slots/{slot}?action=save", body) for _ in range(4)))


async def _listed_slots(target: Target) -> None:
    """Ask for the slots on many connections at once; each question went to the engine of every worker."""
    async with target.session() as session:
        asking = (_read(session, f"{target.url}/slots") for _ in range(100))
        await asyncio.gather(*asking, return_exceptions=True)


async def _read_stored(target: Target) -> None:
    """Store a long response, whose input no model could read, and ask for it again and again."""
    body = {"model": target.model, "input": "word " * 400_000, "background": True}
    headers = {"Content-Type": "application/json"}
    async with target.session() as session:
        raw = io.BytesIO(json.dumps(body).encode())
        async with session.post(f"{target.url}/v1/responses", data=raw, headers=headers) as response:
            stored = (await response.json()).get("id", "none")
        reads = [f"{target.url}/v1/responses/{stored}{rest}" for rest in ("", "/input_items")] * 8
        await asyncio.gather(*(_read(session, url) for url in reads), return_exceptions=True)


async def _read(session: aiohttp.ClientSession, url: str) -> None:
    async with session.get(url) as response:
        async for _ in response.content.iter_any():
            pass


ATTACKS = (
    Attack(
        name="resumable-streams",
        about="Streams with a grace are begun and left, each with log probabilities of 100 tokens at every step.",
        strike=_resumable_streams,
        pause_s=0.02,
    ),
    Attack(
        name="background-responses",
        about="Responses are begun in the background, more than anybody could read.",
        strike=_background_responses,
        pause_s=0.02,
    ),
    Attack(
        name="listed-slots",
        about="The slots are asked for 100 times at once; other teams' calls began as much later.",
        strike=_listed_slots,
        pause_s=0.0,
    ),
    Attack(
        name="stored-reads",
        about="A response with 2 MB of input is stored, and read 16 times at once by requests of 100 bytes.",
        strike=_read_stored,
    ),
    Attack(
        name="saved-slots",
        about="Slots are saved under ever new names, several at a time.",
        strike=_saved_slots,
        at_once=2,
    ),
)
