"""No word of a prompt or an answer, and no key, in any log line or trace, whatever is asked and however it fails: at
debug level, in every process. But where an operator has asked for prompts, they are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.api.routes import ROUTES
from tests.integration.tracing.conftest import ANSWERED
from tests.support.otlp_sink import OtlpSink
from tests.support.stack import Stack

ASKED = "asked-canary-51c0"
KEY = "pk-canary-0123456789abcdef"

QUESTION = [{"role": "user", "content": f"{ASKED} why?"}, {"role": "assistant", "content": ASKED}]
FUNCTION = {"name": "look", "description": ASKED, "parameters": {"type": "object", "properties": {ASKED: {}}}}
FITTING: dict[str, Any] = {
    "messages": [*QUESTION, {"role": "user", "content": [{"type": "text", "text": ASKED}]}],
    "system": ASKED,
    "prompt": f"{ASKED} once",
    "input": f"{ASKED} in",
    "instructions": ASKED,
    "content": ASKED,
    "query": ASKED,
    "documents": [ASKED, f"two {ASKED}"],
    "input_prefix": ASKED,
    "input_suffix": ASKED,
    "stop": [ASKED],
    "max_tokens": 4,
}
WRONG: tuple[dict[str, Any], ...] = (
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": {"type": ASKED}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": ASKED, "pattern": f"({ASKED}"}}}},
    {"response_format": {"type": "json_object", "schema": {"$ref": f"#/{ASKED}"}}},
    {"grammar": f"root ::= {ASKED}"},
    {"chat_template_kwargs": {ASKED: ASKED}, "chat_template": "{{" + ASKED},
    {"logit_bias": {ASKED: ASKED}},
    {"temperature": ASKED, "seed": ASKED},
    {"messages": [{"role": ASKED, "content": {"type": ASKED}}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{ASKED}"}}]}]},
    {"messages": [{"role": "user", "content": ASKED * 2000}]},
    {"prompt": ASKED * 4000, "input": ASKED * 4000},
    {"tokens": [ASKED], "input": [[ASKED]], "documents": {ASKED: 1}},
    {"messages": [{"role": "user", "content": f"\ud800 {ASKED}"}]},
    {"n": 3, "stream": True, "logprobs": True},
    {"stream": True, "metadata": {ASKED: ASKED}, "user": ASKED},
)
MODELS = ("quick", "demo", "failing", "vectors")
NOT_ASKED = {"drain", "sign_in"}
"""What ends the gateway, and what takes its key from its body: tests/integration/front/test_console_session.py."""
POSTED = {
    row.name: row.path for row in ROUTES if row.method == "POST" and "{" not in row.path and row.name not in NOT_ASKED
}
"""One path of each app."""


def bodies() -> Iterator[bytes]:
    for model in MODELS:
        yield json.dumps({**FITTING, "model": model}).encode()
    for wrong in WRONG:
        yield json.dumps({**FITTING, "model": "demo", **wrong}).encode()
    yield f'{{"messages": [{{"role": "user", "content": "{ASKED}"'.encode()
    yield f'["{ASKED}"]'.encode()
    yield ASKED.encode() + b"\xff\xfe"


def post(url: str, body: bytes, headers: dict[str, str], source: str = "127.0.0.1") -> int:
    """Return the status of the answer to a call that comes from the address `source`."""
    to = urlsplit(url)
    with contextlib.closing(HTTPConnection(to.netloc, timeout=30, source_address=(source, 0))) as connection:
        connection.request("POST", to.path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        response.read()
        return response.status


async def talk(stack: Stack) -> None:
    """Over a WebSocket, in order and out of it."""
    url = stack.gateways[0].url.replace("http", "ws", 1) + "/v1/responses"
    with pytest.raises(InvalidStatus):
        await connect(url, additional_headers={"Authorization": f"Bearer {KEY}"})
    for message in (
        json.dumps({"type": "response.create", "model": "quick", "input": ASKED}),
        json.dumps({"type": ASKED, "input": ASKED}),
        f'{{"{ASKED}"',
        ASKED.encode(),
    ):
        async with connect(url, additional_headers={"Authorization": f"Bearer {stack.key}"}) as socket:
            await socket.send(message)
            try:
                while json.loads(await socket.recv())["type"] not in ("response.completed", "error"):
                    pass
            except ConnectionClosed:
                continue


async def test_no_prompt_no_answer_and_no_key_is_in_any_line_or_trace(stack: Stack, sink: OtlpSink) -> None:
    url, right = stack.gateways[0].url, {"authorization": f"Bearer {stack.key}"}
    statuses = set()
    for number, path in enumerate(POSTED.values(), 1):
        for body in bodies():
            statuses.add(await asyncio.to_thread(post, url + path, body, right))
        for wrong in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"Basic {KEY}"}):
            source = f"127.0.1.{number}"  # answers to one address that fails often are delayed
            assert await asyncio.to_thread(post, url + path, b"{}", wrong, source) == 401
    await talk(stack)
    assert {200, 400} <= statuses
    await asyncio.sleep(0.3)
    processes = [process for process in stack.processes if process is not stack.gateways[1]]
    told = {process.name: process.text() for process in processes} | {"traces": repr(sink.spans)}
    lines = told["gateway-0"].count('"request"')
    assert lines > len(POSTED) * 10
    assert '"call"' in told["demo-a"]
    for name, text in told.items():
        for secret in (ASKED, ANSWERED, KEY, stack.key, stack.secret):
            assert secret not in text, (name, text[max(0, text.find(secret) - 600) :][:700])


async def test_who_asks_for_prompts_has_them_at_the_gateway_only(stack: Stack, sink: OtlpSink) -> None:
    asked = "asked-openly-93d2"
    body = json.dumps({"model": "quick", "messages": [{"role": "user", "content": asked}]}).encode()
    gateway = stack.gateways[1]
    headers = {"authorization": f"Bearer {stack.key}", "x-request-id": "openly"}
    assert await asyncio.to_thread(post, f"{gateway.url}/v1/chat/completions", body, headers) == 200
    lines = [json.loads(line) for line in gateway.text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["message"] == "prompt" and line["request_id"] == "openly"]
    assert line["prompt"] == f'[{{"role":"user","content":"{asked}"}}]'
    assert ANSWERED in line["answer"]
    assert any(line["level"] == "WARNING" and "log_prompts" in line["message"] for line in lines)
    assert stack.key not in gateway.text()
    for process in stack.processes:
        if process is not gateway:
            assert asked not in process.text(), process.name
    assert asked not in repr(sink.spans)
