"""A caller of the Responses API over WebSocket, for tests that look at single messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

Event = dict[str, Any]
LAST = {"response.completed", "response.incomplete", "response.failed", "error"}


class SocketCaller:
    """One connection. `model` is put into each request that names none."""

    def __init__(self, connection: ClientConnection, model: str) -> None:
        self.connection = connection
        self.model = model

    async def ask(self, **body: Any) -> None:
        await self.connection.send(json.dumps({"type": "response.create", "model": self.model, **body}))

    async def event(self) -> Event:
        message: Event = json.loads(await self.connection.recv())
        return message

    async def until(self, kind: str) -> Event:
        """The next event of this type; those before it are thrown away."""
        while (event := await self.event())["type"] != kind:
            pass
        return event

    async def rest(self) -> list[Event]:
        """All events up to the end of a response, of whichever lane."""
        events = [await self.event()]
        while events[-1]["type"] not in LAST:
            events.append(await self.event())
        return events

    async def answer(self, **body: Any) -> Event:
        """The response, whole. Raises AssertionError where there is none."""
        await self.ask(**body)
        last = (await self.rest())[-1]
        assert "response" in last, last
        response: Event = last["response"]
        return response

    async def refusal(self, **body: Any) -> tuple[int, Event]:
        """Status and error of a request that is refused."""
        await self.ask(**body)
        [event] = await self.rest()
        return event["status"], event["error"]


@asynccontextmanager
async def connected(url: str, key: str, model: str, **options: Any) -> AsyncIterator[SocketCaller]:
    """`url` of a gateway. Leaving the block closes the connection. `options` are those of `websockets.connect`."""
    headers = {"Authorization": f"Bearer {key}", **options.pop("headers", {})}
    address = f"{url.replace('http', 'ws', 1)}/v1/responses"
    async with connect(address, additional_headers=headers, **options) as connection:
        yield SocketCaller(connection, model)
