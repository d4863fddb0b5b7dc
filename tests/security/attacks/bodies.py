"""Attacks by the body of one request."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from functools import partial

from tests.security.attack import Attack, Target
from tests.support.large_bodies import LARGE_BODIES, LargeBody
from tests.support.sent_media import PNG


async def _nested_parts(target: Target) -> None:
    body = b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}"
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", body)


async def _pieces(target: Target) -> None:
    body = b'{"with_pieces":true,"content":"' + b"a b " * (2 << 20) + b'"}'
    async with target.session() as session:
        await target.post(session, "/tokenize", body[: (8 << 20) - 2] + b'"}')


async def _long_chain(target: Target) -> None:
    """Store responses that follow each other, then go on from all of them with a few bytes."""
    previous = None
    async with target.session() as session:
        for text in ["x" * (6 << 20)] * 4 + ["and then?"] * 8:
            # In the background, a response is stored before anybody finds its prompt too long.
            body = {"model": target.model, "input": text, "background": True}
            body |= {"previous_response_id": previous, "max_output_tokens": 1}
            headers = {"Content-Type": "application/json"}
            async with session.post(
                f"{target.url}/v1/responses", data=io.BytesIO(json.dumps(body).encode()), headers=headers
            ) as response:
                previous = (await response.json()).get("id", previous)
            await asyncio.sleep(0.1)  # until it has failed, it can't be gone on from


async def _waiting_prompts(target: Target) -> None:
    """Send forty calls that wait for a slot: half with prompts that fit, half with as many tokens as a body holds."""
    fitting = _prompts(target, tokens=400, prompts=100)
    longest = _prompts(target, tokens=30_000, prompts=17)
    async with target.session() as session, asyncio.TaskGroup() as tasks:
        for body in (fitting, longest) * 20:
            tasks.create_task(target.post(session, "/v1/completions", body))


async def _short_bodies(target: Target) -> None:
    """Send five hundred calls that wait for a slot, each with arrays in 15 KiB, too few for its body to be checked."""
    arrays = ",".join(["[]"] * 5000)
    tool = f'{{"type":"function","function":{{"name":"a","parameters":{{"a":[{arrays}]}}}}}}'
    message = '{"role":"user","content":"a"}'
    body = f'{{"model":"{target.model}","max_tokens":400,"ignore_eos":true,"messages":[{message}],"tools":[{tool}]}}'
    async with target.session() as session, asyncio.TaskGroup() as tasks:
        for _ in range(500):
            tasks.create_task(target.post(session, "/v1/chat/completions", body))


def _prompts(target: Target, *, tokens: int, prompts: int) -> bytes:
    prompt = ",".join(str(100 + number % 600) for number in range(tokens))
    text = ",".join([f"[{prompt}]"] * prompts)
    return f'{{"model":"{target.model}","max_tokens":400,"ignore_eos":true,"prompt":[{text}]}}'.encode()


async def _large(large: LargeBody, target: Target) -> None:
    async with target.session() as session:
        await target.post(session, large.path, large.of())


async def _pictures(target: Target) -> None:
    """Send 27 MiB of pictures to a model, in as many parts as one request may have and one more."""
    data = base64.b64encode(PNG + bytes(range(256)) * 2400).decode()
    part = f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{data}"}}}}'
    body = f'{{"model":"{target.model}","messages":[{{"role":"user","content":[{",".join([part] * 33)}]}}]}}'
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", body)


async def _broken_files(target: Target) -> None:
    """Send what begins as files do and goes on otherwise, as often as goes into a body."""
    piece = '{"url":"' + "QUJD" * 1200 + '!","data":"A"},'
    body = f'{{"model":"{target.model}","prompt":[{piece * 1600}1]}}'
    async with target.session() as session:
        await target.post(session, "/completion", body)


ATTACKS = (
    Attack(
        name="nested-parts",
        about="A message's content is nested hundreds of arrays deep.",
        strike=_nested_parts,
        at_once=4,
    ),
    Attack(
        name="long-chain",
        about="Responses of 6 MiB follow each other; a request of 100 bytes goes on from all of them.",
        strike=_long_chain,
        at_once=2,
        short_s=2.5,
    ),
    Attack(
        name="waiting-prompts",
        about="Calls with many prompts of tokens each wait for slots: forty of the longest held 1.8 GiB.",
        strike=_waiting_prompts,
    ),
    Attack(
        name="short-bodies",
        about="Calls with bodies of 15 KiB of arrays wait for slots: they counted for a fifth of what they take.",
        strike=_short_bodies,
    ),
    Attack(
        name="pieces-of-tokens",
        about="The tokens of 8 MiB of text, each with its piece: 1.1 GiB in the gateway, 0.8 in the worker.",
        strike=_pieces,
        at_once=2,
    ),
    Attack(
        name="large-pictures",
        about="27 MiB of pictures, one more than a request may have: searched and decoded in calls of up to 40 ms.",
        strike=_pictures,
        at_once=2,
    ),
    Attack(
        name="broken-files",
        about="8 MiB of what begins as files do: cut out, put back, and read twice.",
        strike=_broken_files,
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
