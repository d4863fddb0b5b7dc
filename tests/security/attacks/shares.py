"""Attacks that hold more of a worker than a share: answers without end, urgent crowds, callers who do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

from tests.security.attack import Attack, Target

NUM_ANSWERS = 4
CROWD = 60
UNREAD_S = 10.0


def _chat(target: Target, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Tell me a story that never ends."}]
    return {"model": target.model, "messages": messages, **more}


async def _answers_without_end(target: Target) -> None:
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", _chat(target, n=NUM_ANSWERS, ignore_eos=True))


async def _shifted_answers_without_end(target: Target) -> None:
    """They go on beyond the context, sixteen times its length."""
    body = _chat(target, n=NUM_ANSWERS, ignore_eos=True, context_shift=True)
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", body)


async def _urgent_crowd(target: Target) -> None:
    body = _chat(target, priority=-100, max_tokens=16)
    async with target.session() as session:
        await asyncio.gather(*(target.post(session, "/v1/chat/completions", body) for _ in range(CROWD)))


async def _unread_answers(target: Target) -> None:
    """Ask for much text per token on a connection whose answer is never read."""
    url = urlsplit(target.url)
    body = json.dumps(_chat(target, stream=True, ignore_eos=True, logprobs=True, top_logprobs=20))
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {url.netloc}",
        f"Authorization: Bearer {target.attacker_key}",
    ]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", body]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (url.hostname, url.port))
        await loop.sock_sendall(connection, "\r\n".join(lines).encode())
        await asyncio.sleep(UNREAD_S)


ATTACKS = (
    Attack(
        name="answers-without-end",
        about="One request asks for as many answers as a worker has slots, each as long as it can be; others got 503.",
        strike=_answers_without_end,
        at_once=2,
    ),
    Attack(
        name="shifted-answers-without-end",
        about="The same, and the answers go on beyond the model's context.",
        strike=_shifted_answers_without_end,
    ),
    Attack(
        name="urgent-crowd",
        about="Sixty callers say that they are the most urgent of all; others got no slot for as long as they asked.",
        strike=_urgent_crowd,
    ),
    Attack(
        name="unread-answers",
        about="Eight callers don't read their streams; slots of answers that were made long ago stayed taken.",
        strike=_unread_answers,
        at_once=8,
    ),
)
