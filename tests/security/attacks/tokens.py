"""Attacks by what a worker renders and tokenises, with a slot and without one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random

from tests.security.attack import Attack, Target

RUN_CHARS = 100_000
DEADLY_CHARS = 900_000
NUM_MESSAGES = 3000
LEAVES_AFTER_S = 0.3
DENSE_BYTES = (1 << 20, 3 << 20, 8_000_000)
FIRST_SIGN, LAST_SIGN = 0x12000, 0x12398


def _messages(number: int = NUM_MESSAGES) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[turn % 2], "content": f"word {turn}"} for turn in range(number - 1)] + [
        {"role": "user", "content": "last"}
    ]


async def _run_in_chat(target: Target) -> None:
    run = random.choice(("=", " ", "a", "1", "\n", "!", "\u4f60")) * RUN_CHARS
    messages = [{"role": "user", "content": run}]
    async with target.session() as session:
        await target.post(session, "/v1/chat/completions", {"model": target.model, "messages": messages})


async def _run_tokenized(target: Target) -> None:
    run = random.choice(("=", "!", "<")) * DEADLY_CHARS
    async with target.session() as session:
        await target.post(session, "/tokenize", {"model": target.model, "content": run})


async def _slow_texts_left(target: Target) -> None:
    text = random.choice(("word!", "\u4f60\u597d", "a1 ")) * 150_000
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVES_AFTER_S), target.session() as session:
            await target.post(session, "/tokenize", {"model": target.model, "content": text})


@functools.cache
def _dense_text(num_bytes: int) -> str:
    """Return cuneiform, which no vocabulary has: each character becomes several tokens, and none of it is ASCII."""
    signs = "".join(f"{chr(number)} " for number in range(FIRST_SIGN, LAST_SIGN + 1))
    return (signs * (num_bytes // len(signs.encode()) + 1)).encode()[:num_bytes].decode("utf-8", "ignore")


async def _dense_texts(target: Target) -> None:
    text = _dense_text(random.choice(DENSE_BYTES))
    path, body = random.choice(
        (
            ("/tokenize", {"content": text}),
            ("/v1/completions", {"prompt": [1, text], "max_tokens": 1}),
            ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": text, "n_predict": 1}),
        )
    )
    data = json.dumps({"model": target.model, **body}, ensure_ascii=False)
    async with target.session() as session:
        await target.post(session, path, data)


async def _many_messages_counted(target: Target) -> None:
    async with target.session() as session:
        await target.post(session, "/v1/messages/count_tokens", {"model": target.model, "messages": _messages()})


async def _many_messages_cut(target: Target) -> None:
    body = {"model": target.model, "input": _messages(), "truncation": "auto", "max_output_tokens": 1}
    async with target.session() as session:
        await target.post(session, "/v1/responses", body)


async def _template_applied(target: Target) -> None:
    async with target.session() as session:
        await target.post(session, "/apply-template", {"model": target.model, "messages": _messages()})


ATTACKS = (
    Attack(
        name="long-runs-in-chat",
        about="A message is one long line of like characters: llama.cpp's std::regex ended the worker by SIGSEGV.",
        strike=_run_in_chat,
        at_once=2,
    ),
    Attack(
        name="long-runs-tokenized",
        about="A question about a run that no stack is deep enough for: it was put to three workers, and ended each.",
        strike=_run_tokenized,
        at_once=2,
    ),
    Attack(
        name="slow-texts-left",
        about="Texts that take long to tokenise, whose callers leave at once: they were worked for all the same.",
        strike=_slow_texts_left,
        at_once=8,
    ),
    Attack(
        name="dense-texts",
        about="Texts of 8 MiB become as many tokens, which a worker converted in one call, for up to 0.4 s.",
        strike=_dense_texts,
        at_once=2,
    ),
    Attack(
        name="many-messages-counted",
        about="A crowd counts the tokens of long conversations: one process rendered them in order of arrival.",
        strike=_many_messages_counted,
        at_once=16,
    ),
    Attack(
        name="many-messages-cut",
        about="A crowd has long conversations cut to fit: each was rendered a dozen times.",
        strike=_many_messages_cut,
        at_once=8,
    ),
    Attack(
        name="templates-applied",
        about="A crowd has long conversations rendered, which takes no slot.",
        strike=_template_applied,
        at_once=16,
    ),
)
