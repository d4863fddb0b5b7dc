"""Streams that go on without their connection: cut anywhere, at this gateway or another, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import aiohttp
import pytest

from accounts.protocol.records import digest
from tests.integration.front.conftest import NARROW, NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack
from tests.support.waiting import until

EVENT = re.compile(rb"id: ([0-9a-f]+):(\d+)\n((?:event: .*\n)?data: .*)\n\n")


class Follower:
    """A client that keeps what it has understood: whole events only, as an SSE reader does."""

    def __init__(self, caller: Caller, body: dict[str, Any], grace: str = "5") -> None:
        self.caller = caller
        self.raw = json.dumps(body).encode()
        self.grace = grace
        self.events: list[bytes] = []
        self.numbers: list[int] = []
        self.last_id = ""
        self.status = 0
        self.error: dict[str, Any] | None = None

    async def read(self, gateway: Process, cut_after: int | None = None) -> bool:
        """Reads from a gateway, up to so many bytes; whether the response ended by itself."""
        headers = {"x-resume-grace": self.grace, "content-type": "application/json"}
        if self.last_id:
            headers["last-event-id"] = self.last_id
        url = f"{gateway.url}/v1/chat/completions"
        response = await self.caller.session.post(url, data=self.raw, headers=headers)
        try:
            self.status = response.status
            if response.status != 200:
                self.error = (await response.json())["error"]
                return True
            buffer = b""
            num_bytes = 0
            async for chunk in response.content.iter_any():
                taken = chunk if cut_after is None else chunk[: cut_after - num_bytes]
                num_bytes += len(taken)
                buffer = self._understand(buffer + taken)
                if num_bytes == cut_after:
                    return False
            return True
        finally:
            response.close()

    @property
    def text(self) -> str:
        documents = [json.loads(event[6:]) for event in self.events if event != b"data: [DONE]"]
        return "".join(d["choices"][0]["delta"].get("content") or "" for d in documents if d["choices"])

    def _understand(self, buffer: bytes) -> bytes:
        *blocks, rest = buffer.split(b"\n\n")
        for block in blocks:
            lines = [line for line in block.split(b"\n") if not line.startswith(b":")]
            if lines:
                match = EVENT.fullmatch(b"\n".join(lines) + b"\n\n")
                assert match, block
                self.events.append(match[3])
                self.numbers.append(int(match[2]))
                self.last_id = f"{match[1].decode()}:{match[2].decode()}"
        return rest


def body(model: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story."}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "stream": True}


def story(tokens: int) -> str:
    return "".join(f"t{n} " for n in range(tokens))


async def test_a_stream_that_is_not_cut_has_numbered_events(caller: Caller, gateway: Process) -> None:
    follower = Follower(caller, body("quick", 5))
    assert await follower.read(gateway)
    assert follower.text == story(5)
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    assert follower.events[-1] == b"data: [DONE]"


async def test_streams_that_do_not_ask_have_no_ids(caller: Caller) -> None:
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body("quick", 3)) as response:
        assert b"id: " not in await response.read()


@pytest.mark.parametrize("seed", range(6))
async def test_cut_at_random_bytes_and_resumed_anywhere(caller: Caller, stack: Stack, seed: int) -> None:
    chance = random.Random(seed)
    follower = Follower(caller, body("slow", 60))
    cuts = 0
    while not await follower.read(chance.choice(stack.gateways[:2]), chance.choice([1, 7, 90, 400, 1500, 4000])):
        assert follower.status == 200
        cuts += bool(follower.last_id)
        if not follower.last_id:
            follower = Follower(caller, body("slow", 60))
    assert follower.error is None
    assert cuts
    assert follower.text == story(60)
    assert follower.numbers == list(range(1, len(follower.numbers) + 1))
    await until(lambda: stack.leases("slow") == 0, 8.0, "every slot is given back")


async def test_resumed_after_its_end(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("quick", 8))
    assert not await follower.read(stack.gateways[0], 700)
    await until(lambda: stack.leases("quick") == 0, 2.0, "the answer has ended")
    await asyncio.sleep(0.1)
    assert await follower.read(stack.gateways[1])
    assert follower.text == story(8)
    assert follower.events[-1] == b"data: [DONE]"
    seen = len(follower.events)
    assert await follower.read(stack.gateways[0])
    assert (follower.status, len(follower.events)) == (200, seen)


async def test_when_the_grace_runs_out_the_slot_is_free_and_the_stream_gone(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("slow", 500), grace="1")
    assert not await follower.read(stack.gateways[0], 600)
    await asyncio.sleep(0.5)
    assert stack.leases("slow") == 1
    await until(lambda: stack.leases("slow") == 0, 1.5, "the call is given up")
    await asyncio.sleep(0.2)
    for gateway in stack.gateways[:2]:
        assert await follower.read(gateway)
        assert follower.error is not None
        assert (follower.status, follower.error["code"]) == (404, "stream_gone")


async def test_a_reader_elsewhere_keeps_the_stream_alive(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("slow", 150), grace="1")
    assert not await follower.read(stack.gateways[0], 300)
    assert await follower.read(stack.gateways[1])
    assert follower.text == story(150)


async def test_only_the_same_request_of_the_same_team_goes_on(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("quick", 8))
    await follower.read(stack.gateways[0], 700)
    async with calling(stack.gateways[0].url, NARROW_KEY, "quick") as stranger:
        other = Follower(stranger, body("quick", 8))
        other.last_id = follower.last_id
        for gateway in stack.gateways[:2]:
            await other.read(gateway)
            assert other.error is not None
            assert other.error["code"] == "stream_gone"
    changed = Follower(caller, body("quick", 7))
    changed.last_id = follower.last_id
    await changed.read(stack.gateways[1])
    assert changed.status == 400


@pytest.mark.parametrize("grace", ["0", "61", "soon", "-1", "1e1"])
async def test_a_grace_that_can_not_be_had(caller: Caller, gateway: Process, grace: str) -> None:
    follower = Follower(caller, body("quick", 3), grace=grace)
    await follower.read(gateway)
    assert follower.status == 400
    assert follower.error is not None
    assert follower.error["param"] == "x-resume-grace"


async def test_an_id_that_never_was(caller: Caller, gateway: Process) -> None:
    for last_id in ("nonsense", "abc:1", "../x:1"):
        follower = Follower(caller, body("quick", 3))
        follower.last_id = last_id
        await follower.read(gateway)
        assert follower.status == 404


async def test_an_error_before_the_first_token_has_its_status(caller: Caller, gateway: Process) -> None:
    follower = Follower(caller, body("quick", 3) | {"messages": [{"role": "user", "content": "x" * 4000}]})
    await follower.read(gateway)
    assert follower.status == 400
    assert follower.error is not None
    assert follower.error["code"] == "context_length_exceeded"


async def test_a_failure_in_the_stream_can_be_read_again(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("failing", 20))
    await follower.read(stack.gateways[0], 500)
    await asyncio.sleep(0.2)
    assert await follower.read(stack.gateways[1])
    assert b'"error"' in follower.events[-2]
    assert follower.events[-1] == b"data: [DONE]"


async def test_what_is_made_without_a_client_is_counted_and_logged_once(caller: Caller, stack: Stack) -> None:
    follower = Follower(caller, body("slow", 40))
    request_id = "made-alone"
    headers = {"x-resume-grace": "5", "x-request-id": request_id, "content-type": "application/json"}
    url = f"{stack.gateways[0].url}/v1/chat/completions"
    response = await caller.session.post(url, data=follower.raw, headers=headers)
    await response.content.readany()
    response.close()
    lines: list[dict[str, Any]] = []

    def logged() -> bool:
        lines[:] = [json.loads(line) for line in stack.gateways[0].text().splitlines() if request_id in line]
        return bool(lines)

    await until(logged, 4.0, "the answer is logged when it ends")
    assert len(lines) == 1
    assert (lines[0]["outcome"], lines[0]["status"], lines[0]["completion_tokens"]) == ("ok", 200, 40)
    assert isinstance(response, aiohttp.ClientResponse)


async def test_one_stream_too_many_of_a_team(stack: Stack) -> None:
    """Refused as a stream and in the background; answers that end with their connection and other teams are not."""
    key = "pk-gold-0123456789"
    own = {"name": "gold", "team": "gold", "sha256": digest(key)}
    gateway = stack.gateway(resume_streams_per_team=1, api_keys=json.dumps([NARROW, own]))
    try:
        async with (
            calling(gateway.url, key, "slow") as caller,
            calling(gateway.url, NARROW_KEY, "quick") as other,
        ):
            first = Follower(caller, body("slow", 400))
            assert not await first.read(gateway, 300)
            again = Follower(caller, body("quick", 5))
            await again.read(gateway)
            assert (again.status, again.error and again.error["code"]) == (429, "too_many_streams")
            asked = {"model": "quick", "input": "a", "background": True}
            async with caller.session.post(f"{gateway.url}/v1/responses", json=asked) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (429, "too_many_streams")
                assert int(response.headers["retry-after"]) >= 1
            async with caller.session.post(f"{gateway.url}/v1/chat/completions", json=body("quick", 3)) as response:
                assert response.status == 200
            elsewhere = Follower(other, body("quick", 5))
            assert await elsewhere.read(gateway)
            assert elsewhere.text == story(5)
            assert await first.read(gateway)
            assert first.error is None
    finally:
        gateway.stop()
        stack.gateways.remove(gateway)
