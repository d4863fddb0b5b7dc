"""The error tree: which error an answer becomes, and what it carries."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from gateway.client import (
    AnswerError,
    AsyncClient,
    AuthenticationFailed,
    BadRequest,
    Client,
    ClientError,
    ConnectionFailed,
    ContextOverflow,
    NotFound,
    NotReady,
    NotSupported,
    PermissionDenied,
    RateLimited,
    ServerError,
    Timeout,
    Unavailable,
    UnexpectedAnswer,
)
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.stack import free_port


def body(type: str, code: Any, **more: Any) -> dict[str, Any]:
    return {"error": {"message": "why", "type": type, "code": code, **more}}


CASES: list[tuple[int, dict[str, Any], type[AnswerError]]] = [
    (400, body("invalid_request_error", None, param="top_k"), BadRequest),
    (400, body("invalid_request_error", "context_length_exceeded"), ContextOverflow),
    (400, body("exceed_context_size_error", 400, n_prompt_tokens=900, n_ctx=512), ContextOverflow),
    (401, body("authentication_error", "invalid_api_key"), AuthenticationFailed),
    (403, body("permission_error", "model_not_allowed"), PermissionDenied),
    (404, body("not_found_error", "model_not_found"), NotFound),
    (405, body("invalid_request_error", "method_not_allowed"), BadRequest),
    (413, body("invalid_request_error", "request_too_large"), BadRequest),
    (429, body("rate_limit_error", "queue_full"), RateLimited),
    (500, body("server_error", 500), ServerError),
    (501, body("not_supported_error", 501), NotSupported),
    (502, body("unavailable_error", "worker_lost"), Unavailable),
    (503, body("unavailable_error", 503), Unavailable),
]


@pytest.mark.parametrize(("status", "document", "kind"), CASES)
def test_statuses(
    server: ScriptedServer, client: Client, status: int, document: dict[str, Any], kind: type[AnswerError]
) -> None:
    server.says(document, status=status, headers={"x-request-id": "req-1", "retry-after": "2"})
    with pytest.raises(AnswerError) as caught:
        client.tokenize("x")
    error = caught.value
    assert type(error) is kind
    detail = document["error"]
    assert (error.status, error.message, error.type) == (status, "why", detail["type"])
    assert error.code == (None if detail["code"] is None else str(detail["code"]))
    assert error.param == detail.get("param")
    assert (error.request_id, error.retry_after) == ("req-1", 2.0)
    assert str(error) == "why (request req-1)"
    if isinstance(error, ContextOverflow):
        assert (error.n_prompt_tokens, error.n_ctx) == (detail.get("n_prompt_tokens"), detail.get("n_ctx"))


def test_a_streaming_call_is_refused_before_its_first_item(server: ScriptedServer, client: Client) -> None:
    server.says(body("rate_limit_error", "queue_full"), status=429)
    with pytest.raises(RateLimited):
        client.complete("x", stream=True)


def test_a_refusal_that_is_no_json(server: ScriptedServer, client: Client) -> None:
    server.replies = [Reply(b"<h1>Bad\nGateway</h1>", 502), Reply(b"", 599), Reply(b'{"error": "no"}', 400)]
    with pytest.raises(Unavailable, match="HTTP status 502: <h1>Bad Gateway</h1>"):
        client.tokenize("x")
    with pytest.raises(ServerError, match=r"HTTP status 599$"):
        client.tokenize("x")
    with pytest.raises(BadRequest, match=r"^no$"):
        client.tokenize("x")


def test_an_answer_of_another_program(server: ScriptedServer, client: Client) -> None:
    server.replies = [Reply(b"<html>welcome</html>")]
    with pytest.raises(
        UnexpectedAnswer, match=r"POST /tokenize can't be read .* '<html>welcome</html>'. Check the base"
    ):
        client.tokenize("x")
    server.says({"tokens": "none"})
    with pytest.raises(UnexpectedAnswer, match="tokens"):
        client.tokenize("x")
    with pytest.raises(UnexpectedAnswer, match="instead of a stream"):
        client.complete("x", stream=True)


async def test_nobody_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as client, pytest.raises(ConnectionFailed, match=f"nothing answers at {url}"):
        client.health()
    async with AsyncClient(url) as client_of_tasks:
        with pytest.raises(ConnectionFailed, match=f"nothing answers at {url}"):
            await client_of_tasks.complete("x", stream=True)
        assert not await client_of_tasks.is_ready()


async def test_a_kept_connection_that_the_server_has_closed_is_replaced(
    server: ScriptedServer, client: Client, async_client: AsyncClient
) -> None:
    answer, hang_up = Reply(b'{"tokens": [1]}'), Reply(hangs_up=True)
    server.replies = [answer, hang_up, answer, answer, hang_up, answer]
    assert [client.tokenize("x").tokens for _ in range(2)] == [(1,), (1,)]
    assert len(server.asked) == 3
    assert [(await async_client.tokenize("x")).tokens for _ in range(2)] == [(1,), (1,)]
    assert len(server.asked) == 6


async def test_a_call_over_a_new_connection_is_not_sent_twice(
    server: ScriptedServer, client: Client, async_client: AsyncClient
) -> None:
    server.replies = [Reply(hangs_up=True)]
    with pytest.raises(ConnectionFailed, match="the connection broke"):
        client.tokenize("x")
    with pytest.raises(ConnectionFailed, match="the connection broke"):
        await async_client.complete("x", stream=True)
    assert len(server.asked) == 2


def test_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with Client(url, timeout=0.1) as client, pytest.raises(Timeout, match="/tokenize: no sign of life"):
            client.tokenize("x")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ClientError), Client(url) as client:
        client.health()


def test_authorities_from_a_file_that_is_not_there() -> None:
    with pytest.raises(ClientError, match="name a PEM file"):
        Client(verify_ssl="/nowhere.pem")


def test_health_of_a_server_that_loads(server: ScriptedServer, client: Client) -> None:
    server.says(body("unavailable_error", 503), status=503)
    health = client.health()
    assert not health.ok
    assert health.message == "why"


LOADING = Reply(b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}', 503)
NO_ROUTE = Reply(b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}', 404)
NO_KEY = Reply(b'{"error":{"code":401,"message":"Invalid API Key","type":"authentication_error"}}', 401)
OK = Reply(b'{"status":"ok"}')


@pytest.mark.parametrize("replies", [[LOADING, OK], [LOADING, NO_ROUTE, OK], [NO_KEY, LOADING, NO_KEY, OK]])
async def test_waiting_until_it_is_ready(
    server: ScriptedServer, client: Client, async_client: AsyncClient, replies: list[Reply]
) -> None:
    server.replies = [*replies]
    client.wait_until_ready(timeout=5, poll_interval=0.01)
    assert server.asked[0].path == "/ready"
    assert client.is_ready()
    server.replies = [*replies]
    await async_client.wait_until_ready(timeout=5, poll_interval=0.01)
    assert await async_client.is_ready()
    server.replies = [LOADING]
    assert not client.is_ready()
    with pytest.raises(NotReady, match=r"not ready within 0.05 s: Loading model"):
        client.wait_until_ready(timeout=0.05, poll_interval=0.01)


@pytest.mark.parametrize("key", ["pk-one\npk-two", "pk-\u2026", "pk-one\t"])
def test_a_key_that_no_header_can_hold_is_told_and_not_repeated(key: str) -> None:
    with pytest.raises(ClientError, match="api_key: it holds a line break or a letter outside of ASCII") as raised:
        Client(api_key=key)
    assert "pk-" not in raised.value.message
