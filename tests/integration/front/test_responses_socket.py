"""The Responses API over WebSocket, through real gateways and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from openai import AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from accounts.protocol.records import AccessRecord, digest, seal_record
from gateway.api.http.websocket_protocol import MAX_FRAGMENTS
from tests.integration.front.conftest import MAX_BODY_BYTES, NARROW_KEY
from tests.integration.front.test_lifecycle import QUICKLY_S, one_more
from tests.integration.front.test_trouble import GONE_S, busy
from tests.support.openai_schema import check
from tests.support.socket_caller import SocketCaller, connected
from tests.support.stack import Process, Stack
from tests.support.waiting import until
from workers.protocol import keys
from workers.protocol.exits import Exit

EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


@pytest.fixture
async def caller(stack: Stack, gateway: Process) -> AsyncIterator[SocketCaller]:
    async with connected(gateway.url, stack.key, "quick") as asking:
        yield asking


async def test_the_events_are_those_of_the_stream(caller: SocketCaller, stack: Stack, gateway: Process) -> None:
    await caller.ask(input="hi")
    events = await caller.rest()
    for event in events:
        check("ResponsesServerEvent", event)
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key) as client:
        stream = await client.responses.create(model="quick", input="hi", stream=True)
        assert [event["type"] for event in events] == [event.type async for event in stream]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == EIGHT


async def test_a_conversation_that_is_stored_nowhere(caller: SocketCaller, stack: Stack, gateway: Process) -> None:
    first = await caller.answer(input="hi", store=False)
    second = await caller.answer(input="and", store=False, previous_response_id=first["id"])
    third = await caller.answer(input="more", store=False, previous_response_id=second["id"])
    tokens = [response["usage"]["input_tokens"] for response in (first, second, third)]
    assert tokens[0] + 8 < tokens[1]
    assert tokens[1] + 8 < tokens[2]
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    again = await caller.answer(input=[item, {"role": "user", "content": "?"}], store=False)
    async with connected(gateway.url, stack.key, "quick") as other:
        for response in (third, again):
            status, error = await other.refusal(input="x", previous_response_id=response["id"])
            assert (status, error["code"]) == (400, "previous_response_not_found")
            assert error["param"] == "previous_response_id"
        assert text_of(await other.answer(input="hi")) == EIGHT


async def test_a_stored_response_is_one_for_everybody(caller: SocketCaller, stack: Stack, gateway: Process) -> None:
    first = await caller.answer(input="hi")
    async with AsyncOpenAI(base_url=f"{stack.gateways[1].url}/v1", api_key=stack.key) as client:
        found = await client.responses.retrieve(first["id"])
        second = await client.responses.create(model="quick", input="and", previous_response_id=found.id)
        await caller.answer(input="more", previous_response_id=second.id)
        await client.responses.delete(second.id)
    status, error = await caller.refusal(input="more", previous_response_id=second.id)
    assert (status, error["code"]) == (400, "previous_response_not_found")
    async with connected(gateway.url, NARROW_KEY, "quick") as stranger:
        assert (await stranger.refusal(input="x", previous_response_id=first["id"]))[0] == 400


async def test_warming_up(caller: SocketCaller) -> None:
    warm = await caller.answer(generate=False, instructions="Be brief.", store=False)
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    warm = await caller.answer(generate=False, input="a long prompt", store=False)
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    alone = await caller.answer(input="go", store=False)
    response = await caller.answer(input="go", previous_response_id=warm["id"], store=False)
    assert text_of(response) == EIGHT
    assert response["usage"]["input_tokens"] > alone["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ('{"type": "response.create", ', None, "not valid JSON"),
        (b"\x00\x01", None, "as text"),
        ("[]", None, "a JSON object"),
        ('{"input": "hi"}', "type", "`response.create`"),
        ('{"type": "response.steer"}', "type", "`response.create`"),
        ('{"type": "response.create", "input": "hi", "stream_id": ""}', "stream_id", "1 to 256"),
        ('{"type": "response.create", "input": "hi", "generate": 0}', "generate", "true or false"),
        ('{"type": "response.create", "input": "hi", "background": true}', "background", "POST /v1/responses"),
        ('{"type": "response.create", "input": "hi", "use_beam_search": true}', "use_beam_search", "token by token"),
        ('{"type": "response.create"}', "input", "missing"),
    ],
)
async def test_what_is_refused_leaves_the_connection_open(
    caller: SocketCaller, message: str | bytes, param: str | None, words: str
) -> None:
    await caller.connection.send(message)
    event = await caller.event()
    check("ResponsesServerEvent", event)
    assert (event["status"], event["error"]["param"]) == (400, param)
    assert words in event["error"]["message"]
    assert text_of(await caller.answer(input="hi", stream=True, background=False)) == EIGHT


async def test_requests_of_one_lane_wait_for_each_other(caller: SocketCaller) -> None:
    for number in range(3):
        await caller.ask(input="hi", metadata={"n": str(number)})
    ends = [(await caller.rest())[-1]["response"]["metadata"]["n"] for _ in range(3)]
    assert ends == ["0", "1", "2"]


async def test_lanes_run_beside_each_other(caller: SocketCaller, stack: Stack) -> None:
    await caller.ask(model="slow", input="hi", stream_id="a", max_output_tokens=400, store=False)
    created = await caller.until("response.created")
    assert created["stream_id"] == "a"
    await caller.ask(input="hi", stream_id="b", store=False)
    while (event := await caller.event()).get("stream_id") != "b" or event["type"] != "response.completed":
        check("ResponsesServerEvent", event)
    assert stack.leases("slow") == 1
    # A lane goes on from what another said.
    await caller.ask(input="more", stream_id="c", store=False, previous_response_id=event["response"]["id"])
    while event.get("stream_id") != "c":
        event = await caller.event()
    assert event["type"] == "response.created"


async def test_too_much_at_once(stack: Stack) -> None:
    with one_more(stack, max_queue=16, queue_timeout_s=20) as process:
        async with connected(process.url, stack.key, "slow") as caller:
            for number in range(17):
                await caller.ask(input="hi", stream_id=f"lane-{number}")
            refused = await caller.until("error")
            assert (refused["stream_id"], refused["error"]["code"]) == ("lane-16", "websocket_stream_limit_reached")


async def test_a_connection_that_closes_ends_its_responses(stack: Stack, gateway: Process) -> None:
    async with connected(gateway.url, stack.key, "slow", headers={"x-request-id": "leaves"}) as caller:
        for lane in ("a", "b"):
            await caller.ask(input="hi", stream_id=lane, store=False)
            await caller.until("response.created")
        await until(lambda: stack.leases("slow") == 2, 2.0, "both run")
        await caller.ask(input="waits", stream_id="b")
    await until(lambda: stack.leases("slow") == 0, GONE_S, "both leases are given back")
    await until(lambda: busy(stack, "slow") == 0, 2.0, "the worker has stopped both answers")
    found = r'"leaves.[12]", "method": "WEBSOCKET".*"client_gone"'
    await until(lambda: len(re.findall(found, gateway.text())) == 2, 2.0, "the log says so")


async def test_a_client_that_does_not_read(stack: Stack, gateway: Process) -> None:
    """Its bounded buffer fills, and nobody else notices."""
    before = gateway.text().count('"client_too_slow"')
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, (host, int(port)))
        await loop.sock_sendall(slow, handshake(f"Authorization: Bearer {stack.key}"))
        await loop.sock_recv(slow, 100)
        body = json.dumps({"type": "response.create", "model": "flood", "input": "x", "store": False}).encode()
        await loop.sock_sendall(slow, b"\x81" + bytes([0x80 | len(body)]) + b"\0\0\0\0" + body)
        await until(lambda: stack.leases("flood") == 1, 2.0, "the response is under way")
        await until(lambda: stack.leases("flood") == 0, 20.0, "the slow reader is cut off")
        await until(lambda: gateway.text().count('"client_too_slow"') > before, 5.0, "the log says why")
    await until(lambda: busy(stack, "flood") == 0, 2.0, "the worker has stopped")


async def test_an_answer_that_fails(stack: Stack, gateway: Process) -> None:
    async with connected(gateway.url, stack.key, "failing") as caller:
        await caller.ask(input="hi")
        events = await caller.rest()
        assert events[-1]["type"] == "response.failed"
        check("ResponsesServerEvent", events[-1])
        assert text_of(await caller.answer(model="quick", input="hi")) == EIGHT


async def test_no_slot_in_time(stack: Stack, gateway: Process) -> None:
    async with connected(gateway.url, stack.key, "slow") as caller:
        for lane in ("a", "b", "c"):
            await caller.ask(input="hi", stream_id=lane, store=False)
        refused = await caller.until("error")
        check("ResponsesServerEvent", refused)
        assert (refused["status"], refused["error"]["code"]) == (503, "queue_timeout")


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/v1/responses", {}, 401, "invalid_api_key"),
        ("/v1/responses", {"Authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ("/v1/responses", {"x-api-key": "KEY", "x-slo-ttft-ms": "no"}, 400, None),
        ("/v1/chat/completions", {"x-api-key": "KEY"}, 404, "unknown_route"),
    ],
)
async def test_a_handshake_that_is_refused(
    stack: Stack, gateway: Process, path: str, headers: dict[str, str], status: int, code: str | None
) -> None:
    headers = {name: value.replace("KEY", stack.key) for name, value in headers.items()}
    with pytest.raises(InvalidStatus) as caught:
        async with connect(gateway.url.replace("http", "ws") + path, additional_headers=headers):
            pass
    answer = caught.value.response
    assert (answer.status_code, json.loads(answer.body)["error"]["code"]) == (status, code)
    await until(lambda: answer.headers["x-request-id"] in gateway.text(), 2.0, "it has its line")


def handshake(*headers: str, method: str = "GET") -> bytes:
    head = [f"{method} /v1/responses HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"]
    head += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", *headers]
    return ("\r\n".join(head) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (handshake(*(f"x-{n}: a" for n in range(200))), 400),
        (handshake(*(f"x-{n}: a" for n in range(300))), 431),
        (handshake("x-long: " + "a" * 20_000), 400),
        (handshake().replace(b"/v1/responses", b"/v1/" + b"a" * 20_000), 400),
        (handshake().replace(b"Sec-WebSocket-Key", b"x-key"), 400),
        (handshake().replace(b"Version: 13", b"Version: 12"), 400),
        (handshake("Content-Length: 0", method="POST"), 401),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + handshake(), 401),
    ],
)
def test_a_handshake_that_is_none_is_answered(gateway: Process, request_: bytes, status: int) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(request_)
        assert raw.recv(4096).startswith(b"HTTP/1.1 %d " % status)
    assert "Traceback" not in gateway.text()


async def test_frames_that_nobody_may_send(stack: Stack, gateway: Process) -> None:
    for frame in (
        b"\xff" * 20,
        b"\x81\x01x",
        b"\x80\x80\0\0\0\0",
        b"\x81\x82\0\0\0\0\xff\xfe",
        b"\x01\x80\0\0\0\0" + b"\x00\x80\0\0\0\0" * (MAX_FRAGMENTS + 9),
        b"\x81\xff" + struct.pack("!Q", 1 << 40) + b"\0\0\0\0",
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(handshake(f"x-api-key: {stack.key}"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frame)
        async with asyncio.timeout(5):
            told = await reader.read()
        while told[:1] == b"\x89":  # a ping, where the machine is slow
            told = told[2 + told[1] :]
        assert told[:1] == b"\x88", frame
        writer.close()
    assert "Traceback" not in gateway.text()
    async with connected(gateway.url, stack.key, "quick") as caller:
        assert text_of(await caller.answer(input="hi")) == EIGHT


async def test_a_key_that_is_withdrawn(stack: Stack, gateway: Process) -> None:
    """Its record is written without a version, as an earlier version of Paddock does."""
    key, name = "pk-guest-0123456789", "guest"
    record = seal_record(AccessRecord(name=name, team="guests", sha256=digest(key)), stack.gateway_secret)
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        client.hset(keys.ACCESS_KEYS, name, record)
        async with asyncio.timeout(10), contextlib.AsyncExitStack() as held:
            while True:
                try:
                    caller = await held.enter_async_context(connected(gateway.url, key, "quick"))
                except InvalidStatus:
                    await asyncio.sleep(0.1)
                else:
                    break
            assert text_of(await caller.answer(input="hi")) == EIGHT
            client.hdel(keys.ACCESS_KEYS, name)
            await caller.ask(input="hi")
            while (last := (await caller.rest())[-1])["type"] != "error":
                await asyncio.sleep(0.1)
                await caller.ask(input="hi")
            assert (last["status"], last["error"]["code"]) == (401, "invalid_api_key")


async def test_pings_to_a_client_that_answers_none(stack: Stack, gateway: Process) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(handshake(f"x-api-key: {stack.key}"))
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(5):
        for _ in range(4):
            assert (await reader.readexactly(6))[:2] == b"\x89\x04"
    writer.close()


async def test_a_message_has_the_bound_of_a_body(stack: Stack, gateway: Process) -> None:
    async with connected(gateway.url, stack.key, "quick") as caller:
        assert (await caller.refusal(input="hi", conversation="x" * (MAX_BODY_BYTES - 200)))[0] == 400
        with pytest.raises(ConnectionClosed) as caught:
            await caller.answer(input="x" * MAX_BODY_BYTES)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009


async def test_one_line_and_one_place_in_the_metrics_per_response(stack: Stack, gateway: Process) -> None:
    async with connected(gateway.url, stack.key, "quick", headers={"x-request-id": "mine"}) as caller:
        assert caller.connection.response is not None
        assert caller.connection.response.headers["x-request-id"] == "mine"
        await caller.answer(input="hi")
        await caller.refusal(model="nobody", input="hi")
    await until(lambda: '"request_id": "mine",' in gateway.text(), 2.0, "the connection has its line")
    lines = [json.loads(line) for line in gateway.text().splitlines() if re.search(r'"request_id": "mine[.\d]*"', line)]
    told = [(line["request_id"], line["status"], line["outcome"]) for line in lines]
    assert told == [("mine.1", 200, "ok"), ("mine.2", 404, "model_not_found"), ("mine", 101, "ok")]
    assert lines[0]["completion_tokens"] == 8


@pytest.mark.serial
async def test_age_and_idleness(stack: Stack) -> None:
    with one_more(stack, socket_idle_s=0.4, socket_life_s=1.0) as process:
        async with connected(process.url, stack.key, "slow") as caller:
            began = time.monotonic()
            with pytest.raises(ConnectionClosed, match=r"no request for 0\.4 s"):
                await caller.event()
            assert 0.3 < time.monotonic() - began < 0.9
        async with connected(process.url, stack.key, "slow") as caller:
            began = time.monotonic()
            await caller.ask(input="hi", max_output_tokens=70, store=False)
            await caller.until("response.incomplete")
            assert time.monotonic() - began > 1.2
            last = await caller.event()
            assert (last["status"], last["error"]["code"]) == (400, "websocket_connection_limit_reached")
            with pytest.raises(ConnectionClosed, match="limit"):
                await caller.event()


async def test_a_gateway_that_stops_lets_responses_finish(stack: Stack) -> None:
    with one_more(stack, drain_s=10) as process:
        async with (
            connected(process.url, stack.key, "slow") as caller,
            connected(process.url, stack.key, "slow") as idle,
        ):
            await caller.ask(input="hi", max_output_tokens=60)
            await caller.until("response.output_text.delta")
            await caller.ask(input="too late")
            process.signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed, match="stopping") as caught:
                await idle.event()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1012
            with pytest.raises(InvalidStatus) as refused:
                async with connected(process.url, stack.key, "slow"):
                    pass
            assert refused.value.response.status_code == 503
            assert (await caller.until("response.incomplete"))["response"]["usage"]["output_tokens"] == 60
            assert (await caller.event())["error"]["code"] == "stopping"
            with pytest.raises(ConnectionClosed, match="stopping"):
                await caller.event()
        assert process.popen.wait(QUICKLY_S) == Exit.OK
    assert "Traceback" not in process.text()


async def test_a_response_that_outlasts_the_drain(stack: Stack) -> None:
    with one_more(stack, drain_s=0.2) as process:
        async with connected(process.url, stack.key, "slow") as caller:
            await caller.ask(input="hi")
            await caller.until("response.output_text.delta")
            process.signal(signal.SIGTERM)
            failed = await caller.until("response.failed")
            assert "stopped" in failed["response"]["error"]["message"]
            with pytest.raises(ConnectionClosed, match="stopping"):
                await caller.event()
        assert process.popen.wait(QUICKLY_S) == Exit.DRAIN_CUT
    assert stack.leases("slow") == 0


async def test_many_messages_in_one_read_wait_as_bytes(stack: Stack, gateway: Process) -> None:
    """They are answered in turn, all of them; what is behind the first is parsed when it is taken."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(handshake(f"x-api-key: {stack.key}"))
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\x82\0\0\0\0[]" * 3000)
        answers = b""
        async with asyncio.timeout(20):
            while answers.count(b"a JSON object") < 3000:
                answers += await reader.read(1 << 16)
    finally:
        writer.transport.abort()
