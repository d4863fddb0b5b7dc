"""Parameters that nothing is done with: answered and told in a header, or refused where the operator says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.caller import Caller, calling
from tests.support.scrape import Scrape
from tests.support.stack import Process, Stack

HEADER = "x-paddock-ignored"
HARMLESS: dict[str, Any] = {
    "store": True,
    "verbosity": "low",
    "tfs_z": 0.5,
    "chat_id": "c-1",
    "raw": True,
    "surprise": 1,
}
NAMES = "store, verbosity, tfs_z, chat_id, raw, surprise"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/completion": {"prompt": "hi"},
    "/v1/chat/completions/input_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
"""Routes, with what each needs."""
POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": ("vectors", {"input": "x"}),
    "/embedding": ("vectors", {"content": "x"}),
    "/v1/rerank": ("ranks", {"query": "q", "documents": ["x"]}),
}

QUESTIONS: dict[str, dict[str, Any]] = {
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.fixture(scope="module")
def strict(stack: Stack) -> Iterator[Process]:
    """A gateway that refuses them."""
    process = stack.gateway(unknown_parameters="refuse")
    yield process
    process.stop()
    stack.gateways.remove(process)


@pytest.fixture
async def strict_caller(stack: Stack, strict: Process) -> AsyncIterator[Caller]:
    async with calling(strict.url, stack.key, "quick") as asking:
        yield asking


async def posted(caller: Caller, path: str, body: dict[str, Any]) -> tuple[int, str | None, str]:
    """Return the status, the header and the body."""
    data = json.dumps({"model": caller.model, **body}).encode()
    async with caller.session.post(caller.url + path, data=data) as response:
        return response.status, response.headers.get(HEADER), await response.text()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_unknown_parameters_are_answered_and_told(caller: Caller, path: str, stream: bool) -> None:
    status, told, text = await posted(caller, path, ROUTES[path] | {"surprise": 1, "stream": stream})
    assert (status, told) == (200, "surprise"), text
    status, told, text = await posted(caller, path, ROUTES[path] | {"stream": stream})
    assert (status, told) == (200, None), text


@pytest.mark.parametrize("path", POOLED)
async def test_pooled_work_does_the_same(caller: Caller, path: str) -> None:
    caller.model, body = POOLED[path]
    status, told, text = await posted(caller, path, body | {"surprise": 1})
    assert (status, told) == (200, "surprise"), text


@pytest.mark.parametrize("path", QUESTIONS)
async def test_questions_about_texts_do_the_same(caller: Caller, strict_caller: Caller, path: str) -> None:
    status, told, text = await posted(caller, path, QUESTIONS[path] | {"surprise": 1})
    assert (status, told) == (200, "surprise"), text
    status, told, text = await posted(caller, path, QUESTIONS[path])
    assert (status, told) == (200, None), text
    status, _, text = await posted(strict_caller, path, QUESTIONS[path] | {"surprise": 1})
    assert status in (400, 501), text
    assert "`surprise` is not a parameter" in text


async def test_a_chat_with_what_has_no_effect(caller: Caller) -> None:
    path = "/v1/chat/completions"
    status, told, text = await posted(caller, path, ROUTES[path] | HARMLESS)
    assert (status, told) == (200, NAMES), text


@pytest.mark.parametrize("path", ROUTES)
async def test_what_programs_send_for_themselves_is_let_through(
    caller: Caller, strict_caller: Caller, path: str
) -> None:
    """No gateway refuses a chat's name in the program, or Ollama's word for a prompt without a template."""
    body = ROUTES[path] | {"chat_id": "c-1", "raw": True}
    for one in (caller, strict_caller):
        status, told, text = await posted(one, path, body)
        assert (status, told) == (200, "chat_id, raw"), text


async def test_what_llama_cpps_web_ui_sends(caller: Caller) -> None:
    """Source: tools/ui/src/lib/services/chat.service.ts of llama.cpp, every setting given."""
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "return_progress": True,
        "sse_ping_interval": 1,
        "stream": True,
        "reasoning_format": "auto",
        "chat_template_kwargs": {"enable_thinking": True},
        "thinking_budget_tokens": 512,
        "reasoning_control": True,
        "temperature": 0.8,
        "max_tokens": -1,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "typ_p": 1,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "dry_multiplier": 0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        "backend_sampling": False,
        "timings_per_token": True,
    }
    status, told, text = await posted(caller, "/v1/chat/completions", body)
    assert (status, told) == (200, "sse_ping_interval, reasoning_control, backend_sampling"), text


async def test_a_header_can_not_be_injected(caller: Caller) -> None:
    body = {"x\r\nset-cookie: a=b": 1, "\u0000\u20ac": 1, **{f"n{n}": 1 for n in range(40)}}
    path = "/v1/chat/completions"
    status, told, _ = await posted(caller, path, ROUTES[path] | body)
    assert status == 200
    assert told is not None
    assert told.startswith("x??set-cookie??a?b, ??, n0, ")
    assert told.endswith(", ...")
    assert len(told) < 1000


async def test_the_metric_has_no_text_of_callers(caller: Caller) -> None:
    async def count(parameter: str) -> float:
        async with caller.session.get(f"{caller.url}/metrics") as response:
            return Scrape(await response.text()).sum("paddock_parameters_ignored_total", parameter=parameter)

    before = [await count(name) for name in ("unknown", "tfs_z", "odd-one-7c1")]
    path = "/v1/chat/completions"
    assert (await posted(caller, path, ROUTES[path] | {"odd-one-7c1": 1, "another": 2, "tfs_z": 1}))[0] == 200
    await asyncio.sleep(0.05)
    after = [await count(name) for name in ("unknown", "tfs_z", "odd-one-7c1")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 0]


@pytest.mark.parametrize("path", ROUTES)
async def test_an_operator_may_refuse_them(strict_caller: Caller, path: str) -> None:
    status, told, text = await posted(strict_caller, path, ROUTES[path] | {"surprise": 1})
    assert (status, told) == (501 if path == "/completion" else 400, None)
    assert "`surprise`" in text
    status, _, text = await posted(strict_caller, path, ROUTES[path])
    assert status == 200, text


async def test_sdks_see_the_errors_that_they_know(stack: Stack, strict: Process) -> None:
    async with openai.AsyncOpenAI(api_key=stack.key, base_url=f"{strict.url}/v1", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="quick", messages=messages, verbosity="low")
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "verbosity")
    async with anthropic.AsyncAnthropic(api_key=stack.key, base_url=strict.url, max_retries=0) as claude:
        with pytest.raises(anthropic.BadRequestError, match="surprise"):
            await claude.messages.create(model="quick", max_tokens=3, messages=messages, extra_body={"surprise": 1})
