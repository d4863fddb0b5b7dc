"""End users: whom trusted keys name in headers and bodies of each dialect, and nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from accounts.protocol.records import AccessRecord, digest
from gateway.access.control import KEY, AccessControl
from gateway.access.keys import Keys
from gateway.api.anthropic.request import read_messages_request
from gateway.api.openai.pooled import EmbeddingsDialect
from gateway.api.openai.requests import read_chat, read_completion
from gateway.api.responses.request import read_draft
from gateway.telemetry.end_user import MAX_CHARS
from gateway.telemetry.request_log import Ignored, RequestLog

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES: Mapping[str, tuple[Callable[[bytes, Ignored], object], dict[str, Any]]] = {
    "chat": (read_chat, CHAT),
    "completion": (read_completion, {"model": "m", "prompt": "hi"}),
    "messages": (read_messages_request, {**CHAT, "max_tokens": 5}),
    "responses": (read_draft, {"model": "m", "input": "hi"}),
}
RECORDS = (
    AccessRecord(name="platform", sha256=digest("pk-platform"), names_end_users=True),
    AccessRecord(name="user", sha256=digest("pk-user")),
)


async def log_of(key: str, **headers: str) -> RequestLog:
    """Return the log of a request with this key and these headers, before its body is read."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request_log = RequestLog("r", "POST", "/v1/chat/completions")
    scope = {"method": "POST", "path": request_log.path, "headers": [(b"x-api-key", key.encode()), *named]}
    await AccessControl(Keys(RECORDS)).identify(scope, request_log, KEY)
    return request_log


def read(dialect: str, request_log: RequestLog, more: dict[str, Any]) -> None:
    reader, body = BODIES[dialect]
    reader(json.dumps({**body, **more}).encode(), request_log.ignored)


@pytest.mark.parametrize("dialect", BODIES)
async def test_a_trusted_key_names_the_end_user_in_the_body(dialect: str) -> None:
    field = {"metadata": {"user_id": "ada"}} if dialect == "messages" else {"user": "ada"}
    request_log = await log_of("pk-platform")
    read(dialect, request_log, field)
    assert request_log.end_user == "ada"
    assert request_log.ignored.header == ""


async def test_one_name_goes_before_another() -> None:
    request_log = await log_of("pk-platform")
    read("chat", request_log, {"user": "program", "safety_identifier": "ada", "metadata": {"user_id": "x"}})
    assert request_log.end_user == "ada"
    headers = {"x_openwebui_user_id": "7", "x_openwebui_user_email": "ada@example.com"}
    request_log = await log_of("pk-platform", **headers)
    read("chat", request_log, {"user": "program"})
    assert request_log.end_user == "ada@example.com"
    request_log = await log_of("pk-platform", **headers, x_litellm_end_user_id="ada")
    assert request_log.end_user == "ada"


@pytest.mark.parametrize("dialect", BODIES)
async def test_other_keys_name_nobody(dialect: str) -> None:
    field = {"metadata": {"user_id": "ada"}} if dialect == "messages" else {"user": "ada"}
    request_log = await log_of("pk-user", x_litellm_end_user_id="ada")
    read(dialect, request_log, field)
    assert request_log.end_user == ""
    if dialect != "responses":  # which tells its callers what they sent as `user`
        assert request_log.ignored.header == next(iter(field))


@pytest.mark.parametrize("value", ["a" * 5000, "ada\r\nx: y", "  ada ", "\u202eada", 7, None, {"user_id": 3}, ["ada"]])
async def test_names_are_bounded(value: object) -> None:
    request_log = await log_of("pk-platform")
    dialect = EmbeddingsDialect()
    body = json.dumps({"model": "m", "input": "hi", "user": value}).encode()
    dialect.read(body, {"paddock.request_log": request_log, "headers": []})
    assert len(request_log.end_user) <= MAX_CHARS
    assert request_log.end_user.isprintable()
    assert request_log.end_user.strip() == request_log.end_user
    if not isinstance(value, str):
        assert request_log.end_user == ""


async def test_requests_on_one_websocket_name_different_people() -> None:
    request_log = await log_of("pk-platform", x_openwebui_user_id="7")
    first = RequestLog("r.1", "WEBSOCKET", "/v1/responses", ignored=request_log.ignored.another())
    assert first.end_user == "7"
    request_log = await log_of("pk-platform")
    logs = [RequestLog("r", "WEBSOCKET", "/", ignored=request_log.ignored.another()) for _ in range(2)]
    read("responses", logs[0], {"user": "ada"})
    assert [log.end_user for log in logs] == ["ada", ""]
