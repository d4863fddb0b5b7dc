"""What callers of the Responses API do: over HTTP, in the background, over a WebSocket."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.soak.deeds import WEATHER
from benchmarks.soak.fleet import TOY
from benchmarks.soak.visitor import Refused, Visitor, events, is_last
from tests.support.socket_caller import SocketCaller, connected

PATH = "/v1/responses"
GONE = (400, 404, 503)
"""A response whose Redis was away, or whose time is over."""
ENDED = ("completed", "failed", "incomplete", "cancelled")


def body(visitor: Visitor, **more: Any) -> dict[str, Any]:
    return {"model": TOY, "input": visitor.text(), "max_output_tokens": visitor.tokens(), **more}


async def stored(visitor: Visitor) -> None:
    """A conversation of a few turns; what it is made of is looked at, and sometimes deleted."""
    answer = await visitor.post(PATH, body(visitor))
    for _ in range(visitor.chance.randrange(3)):
        answer = await visitor.post(PATH, body(visitor, previous_response_id=answer["id"]), allowed=GONE) or answer
    await visitor.ask("GET", f"{PATH}/{answer['id']}", allowed=GONE)
    await visitor.ask("GET", f"{PATH}/{answer['id']}/input_items", allowed=GONE)
    await visitor.post(f"{PATH}/input_tokens", body(visitor))
    if visitor.chance.random() < 0.4:
        await visitor.ask("DELETE", f"{PATH}/{answer['id']}", allowed=GONE)


async def streamed(visitor: Visitor) -> None:
    tools = [{"type": "function", **WEATHER}]
    await visitor.stream(PATH, body(visitor, stream=True, store=visitor.chance.random() < 0.5, tools=tools))


async def background(visitor: Visitor) -> None:
    """Looked up until it has ended, cancelled, or forgotten by its caller."""
    answer = await visitor.post(PATH, body(visitor, background=True, max_output_tokens=80))
    path, what = f"{PATH}/{answer['id']}", visitor.chance.choice(["wait", "cancel", "leave"])
    if what == "cancel":
        await visitor.pause(0.2)
        await visitor.post(f"{path}/cancel", {}, allowed=GONE)
    if what == "wait":
        for _ in range(40):
            found = await visitor.ask("GET", path, allowed=GONE)
            if found is None or found["status"] in ENDED:
                return
            await asyncio.sleep(0.25)


async def followed(visitor: Visitor) -> None:
    """A stream in the background: begun, left, and taken up at the other gateway."""
    response_id = ""
    async with visitor.opened(PATH, body(visitor, background=True, stream=True)) as response:
        async for event in events(response):
            response_id = event.get("response", {}).get("id", response_id)
            if event["sequence_number"] >= 3:
                break
    url = f"{visitor.other}{PATH}/{response_id}?stream=true&starting_after=2"
    async with visitor.session.get(url, headers=visitor.headers()) as response:
        if response.status != 200:
            if response.status in GONE:
                return
            raise Refused(response.status, "", await response.text())
        async for event in events(response):
            if is_last(event):
                return


async def over_a_socket(visitor: Visitor) -> None:
    """Some requests on one connection, which is closed in order or dropped in the middle of an answer."""
    async with connected(visitor.url, visitor.key, TOY) as caller:
        said: dict[str, Any] = {}
        for _ in range(visitor.chance.randrange(1, 4)):
            more = {"previous_response_id": said["id"]} if said else {}
            said = await _answer(caller, store=False, max_output_tokens=20, input=visitor.text(), **more)
            if not said:
                return
        if visitor.chance.random() < 0.4:
            await caller.ask(input=visitor.text(), max_output_tokens=200, store=False)
            await visitor.pause(0.2)
            caller.connection.transport.abort()


async def _answer(caller: SocketCaller, **request: Any) -> dict[str, Any]:
    """The response; nothing where it failed or was refused because of trouble. Raises Refused."""
    await caller.ask(**request)
    last = (await caller.rest())[-1]
    if last["type"] == "error":
        error = last["error"]
        raise Refused(int(last.get("status") or 500), str(error["code"]), str(error["message"]))
    response: dict[str, Any] = last["response"]
    return {} if response["status"] == "failed" else response
