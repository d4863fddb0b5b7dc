"""Bad input: each gets the right status and an OpenAI-shaped error that names the thing, the limit and the remedy."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.front.conftest import MAX_BODY_BYTES
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack

SPEC = Path(__file__).resolve().parents[3].parent / "shared" / "specs" / "openai_openapi.json"
CHAT = "/v1/chat/completions"


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error inside, checked against OpenAI's schema where that is at hand."""
    body = await response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if SPEC.is_file():
        wanted = json.loads(SPEC.read_text())["components"]["schemas"]["Error"]
        assert set(wanted["required"]) <= set(error)
        assert isinstance(error["message"], str)
    return error


async def post(caller: Caller, data: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.post(caller.url + CHAT, data=io.BytesIO(data), headers=headers) as response:
        return response.status, await error_of(response)


async def still_answers(caller: Caller) -> bool:
    return (await caller.whole())[0] == 200


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no body"),
        (b"{", "ends too early"),
        (b'{"model": "quick", "messages": [}', "byte 32"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b"[1]", "an array"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"model": "quick", "messages": [], "temperature": NaN}', "byte 50"),
    ],
)
async def test_malformed_json(caller: Caller, data: bytes, words: str) -> None:
    status, error = await post(caller, data)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]
    assert await still_answers(caller)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; x=y"])
async def test_the_content_type_does_not_matter(caller: Caller, content_type: str) -> None:
    data = json.dumps(caller.body()).encode()
    headers = {"content-type": content_type}
    async with caller.session.post(caller.url + CHAT, data=data, headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": -2}, 400, "max_tokens"),
        ({"max_tokens": 10**40}, 400, "max_tokens"),
        ({"top_k": 1.5}, 400, "top_k"),
        ({"n": 33}, 400, "n"),
        ({"logprobs": 5}, 400, "logprobs"),
        ({"top_logprobs": 5}, 400, "top_logprobs"),
        ({"samplers": ["best"]}, 400, "samplers.0"),
        ({"use_beam_search": True}, 400, "use_beam_search"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_parameters(caller: Caller, change: dict[str, Any], status: int, param: str, stream: bool) -> None:
    got, error = await post(caller, json.dumps(caller.body() | {"stream": stream} | change).encode())
    assert (got, error["param"]) == (status, param)
    assert f"`{param}`" in error["message"]


async def test_an_unknown_model(caller: Caller) -> None:
    caller.model = "gpt-5"
    status, body = await caller.whole()
    error = body["error"]
    assert (status, error["type"], error["code"], error["param"]) == (
        404,
        "not_found_error",
        "model_not_found",
        "model",
    )
    assert "`gpt-5` does not exist. Use one of: " in error["message"]
    assert "quick" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_the_context(caller: Caller, stream: bool) -> None:
    status, body = await caller.whole("x" * 4000) if not stream else await _streamed(caller, "x" * 4000)
    error = body["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    counts = [int(count) for count in re.findall(r"\d+", error["message"])]
    assert error["message"].startswith("This model's maximum context length is 64 tokens, answer included.")
    assert "exceeds the context window" in error["message"]
    assert error["n_ctx"] == counts[0] == 64
    assert error["n_prompt_tokens"] == counts[1] >= 1000
    assert await still_answers(caller)


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 4000}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * 4000}, "prompt"),
        ("/v1/responses", {"input": "x" * 4000}, "input"),
    ],
)
async def test_what_is_too_long_has_the_name_that_the_route_has_for_it(
    caller: Caller, path: str, asked: dict[str, Any], param: str
) -> None:
    async with caller.session.post(caller.url + path, json={"model": caller.model} | asked) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)


async def _streamed(caller: Caller, prompt: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.post(caller.url + CHAT, json=caller.body(prompt, stream=True)) as response:
        return response.status, await response.json()


async def test_a_50_mb_body_with_its_length_declared(caller: Caller) -> None:
    began = time.monotonic()
    status, error = await post(caller, b'{"x": "' + b"y" * 50_000_000 + b'"}')
    assert (status, error["code"]) == (413, "request_too_large")
    assert str(32 << 20) in error["message"], "pictures may be among it"
    assert "50000009" in error["message"]
    assert time.monotonic() - began < 5
    assert await still_answers(caller)


async def test_a_50_mb_body_in_chunks(caller: Caller) -> None:
    async def pieces() -> Any:
        for _ in range(50):
            yield b"y" * 1_000_000

    async with caller.session.post(caller.url + CHAT, data=pieces()) as response:
        error = await error_of(response)
    assert (response.status, error["code"]) == (413, "request_too_large")
    assert str(MAX_BODY_BYTES) in error["message"]
    assert await still_answers(caller)


async def test_a_refused_body_is_answered_before_it_is_sent(gateway: Process, stack: Stack) -> None:
    """The refusal comes on the strength of the headers alone."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {stack.key}\r\nContent-Length: 50000000\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(2):
        assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_body_at_the_limit_is_read(caller: Caller) -> None:
    body = json.dumps(caller.body()).encode()
    padded = io.BytesIO(body + b" " * (MAX_BODY_BYTES - len(body)))
    async with caller.session.post(caller.url + CHAT, data=padded) as response:
        assert response.status == 200
    status, _ = await post(caller, body + b" " * (MAX_BODY_BYTES - len(body) + 1))
    assert status == 413


@pytest.mark.parametrize(
    ("headers", "words"),
    [({}, "no API key"), ({"authorization": "Bearer pk-wrong"}, "not known"), ({"x-api-key": "pk-wrong"}, "not known")],
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/quick")])
async def test_a_missing_or_wrong_key(
    gateway: Process, headers: dict[str, str], words: str, method: str, path: str
) -> None:
    async with aiohttp.ClientSession() as session, session.request(method, gateway.url + path, headers=headers) as got:
        error = await error_of(got)
    assert (got.status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert got.headers["www-authenticate"] == "Bearer"
    assert words in error["message"]
    assert "pk-wrong" not in error["message"]


async def test_the_other_header_for_keys(gateway: Process, stack: Stack) -> None:
    async with (
        aiohttp.ClientSession(headers={"x-api-key": stack.key}) as session,
        session.get(f"{gateway.url}/v1/models") as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/completions/", "/v1/nothing", "/v2/models", "//", "/%00"])
async def test_an_unknown_route(caller: Caller, path: str) -> None:
    async with caller.session.get(caller.url + path) as response:
        error = await error_of(response)
    assert (response.status, error["type"], error["code"]) == (404, "not_found_error", "unknown_route")
    assert "`GET /openapi.json`" in error["message"]


async def test_a_route_without_its_version_is_guessed(caller: Caller) -> None:
    async with caller.session.post(f"{caller.url}/messages") as response:
        assert "Did you mean /v1/messages?" in (await error_of(response))["message"]


@pytest.mark.parametrize(("method", "path", "right"), [("GET", CHAT, "POST"), ("DELETE", "/v1/models/quick", "GET")])
async def test_a_wrong_method(caller: Caller, method: str, path: str, right: str) -> None:
    async with caller.session.request(method, caller.url + path) as response:
        error = await error_of(response)
    assert (response.status, error["code"]) == (405, "method_not_allowed")
    assert error["message"].endswith(f"Use {right}.")
    assert response.headers["allow"] == right


async def test_nothing_is_left_behind(caller: Caller, stack: Stack, gateway: Process) -> None:
    """After all of the above no slot is leased and nothing was taken for a crash."""
    async with calling(gateway.url, stack.key, "quick") as other:
        assert await still_answers(other)
    await asyncio.sleep(0.05)
    assert stack.leases("quick") == 0
    assert "Traceback" not in gateway.text()
