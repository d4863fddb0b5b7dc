"""Probes the server before a run: whether it answers, takes the key, and how its model counts tokens."""

from __future__ import annotations

import asyncio
import time
from random import Random

import msgspec
from msgspec import Struct

from gateway.bench.asks import Ask
from gateway.bench.connection import Connections, Target
from gateway.bench.driver import Caller, Form
from gateway.bench.options import BenchUnusable
from gateway.bench.reading import Reading
from gateway.bench.tape import Tape
from gateway.bench.words import Words

TIMEOUT_S = 120.0
"""Seconds for one probe: the model may have to be loaded."""
LONG, SHORT = 160, 40
"""Words of two prompts: the difference of their tokens does not include what a template adds."""


async def calibrate(there: Target, form: Form, caller: Caller, words: Words) -> None:
    """Ask the server for the tokens of two prompts, and set `words` by them. Raises BenchUnusable."""
    connections = Connections(there)
    try:
        counts = [await _tokens(connections, there, form, caller, words, count) for count in (SHORT, LONG)]
    finally:
        connections.close()
    if counts[1] > counts[0]:
        words.calibrated(LONG - SHORT, counts[1] - counts[0])


async def _tokens(connections: Connections, there: Target, form: Form, caller: Caller, words: Words, count: int) -> int:
    """Return the tokens of a prompt of `count` words; 0 where the server does not tell."""
    tape = Tape(time.perf_counter())
    reading = Reading(tape)
    text = words.text(round(count * words.tokens_per_word), Random(count))
    request = there.request(form.body(Ask([{"role": "user", "content": text}], 2)), caller.key)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await connections.exchange(request, reading)
    except TimeoutError:
        raise BenchUnusable(f"{there.origin} gave no answer within {TIMEOUT_S:g} s; is a model loaded?") from None
    except OSError as error:
        raise BenchUnusable(
            f"nothing answers at {there.origin} ({error}); start one with `paddock up`, or name another with --url"
        ) from None
    if tape.error in ("", "empty"):
        return tape.prompt_tokens
    detail = caller.covered(tape.detail)
    kind = KeyRefused if tape.error in ("http_401", "http_403") else BenchUnusable
    raise kind(f"{there.origin}: {_said(tape.error, detail)}")


class KeyRefused(BenchUnusable):
    """The server does not know the key."""


class _Message(Struct):
    message: str


class _Refusal(Struct):
    error: _Message


def _said(kind: str, detail: str) -> str:
    try:
        return f"{msgspec.json.decode(detail, type=_Refusal).error.message} ({kind})"
    except msgspec.MsgspecError:
        return f"{kind}: {detail}"
