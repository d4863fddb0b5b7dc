"""A gateway's half of the wire, as small as can be: submit, cancel, and an event stream that remembers what came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec

from tests.support.worker_access import access_headers
from workers.protocol.events import CallEvent, Failed, Failure, Finished, Text, decode_alive, decode_step
from workers.protocol.framing import ALIVE_EVENT, CANCEL_PATH, EVENTS_PATH, SUBMIT_PATH, FrameReader
from workers.protocol.requests import Accepted, Cancel, GenerateRequest, Message, Submit

SECRET = "fake-secret"


class Heard:
    """What one gateway has heard, over all its connections."""

    def __init__(self) -> None:
        self.events: list[CallEvent] = []
        self.alive: list[list[int]] = []
        self.last_id = ""
        self.num_bytes = 0
        self.over = asyncio.Event()
        self._news = asyncio.Event()

    def take(self, chunk: bytes, reader: FrameReader) -> None:
        self.num_bytes += len(chunk)
        for frame in reader.feed(chunk):
            self.last_id = frame.id
            if frame.event == ALIVE_EVENT:
                self.alive.append(decode_alive(frame.data))
            else:
                self.events.extend(decode_step(frame.data))
        self._news.set()

    def of(self, call: int) -> list[CallEvent]:
        return [event for event in self.events if event.call == call]

    def text(self, call: int) -> str:
        return "".join(event.text for event in self.of(call) if isinstance(event, Text))

    def end(self, call: int) -> Finished | Failed | None:
        last = self.of(call)[-1:]
        return last[0] if last and isinstance(last[0], Finished | Failed) else None

    async def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_end(self, *calls: int) -> None:
        await self.until(lambda: all(self.end(call) for call in calls))


class Gateway:
    """One gateway process, to one worker."""

    def __init__(self, session: aiohttp.ClientSession, address: str, name: str = "g", secret: str = SECRET) -> None:
        self.heard = Heard()
        self._session = session
        self._address = address
        self._name = name
        self._secret = secret
        self._headers: dict[str, str] = {}

    async def headers(self) -> dict[str, str]:
        """What the worker wants to be shown."""
        self._headers = self._headers or await access_headers(self._session, self._address, self._secret)
        return self._headers

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        shown = await self.headers() | headers
        async with self._session.post(self._address + path, data=body, headers=shown) as response:
            return response.status, await response.read()

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self._session.get(self._address + path, headers=headers) as response:
            return response.status, await response.read()

    async def submit(self, call: int, content: str = "hello", **fields: Any) -> Accepted | Failure:
        request = GenerateRequest(messages=(Message("user", content),), **fields)
        message = Submit(gateway=self._name, call=call, request=request, tenant="t", request_id=f"r{call}")
        status, body = await self.post(SUBMIT_PATH, msgspec.json.encode(message))
        if status == 202:
            return msgspec.json.decode(body, type=Accepted)
        return msgspec.json.decode(body, type=Failure)

    async def cancel(self, *calls: int) -> None:
        status, _ = await self.post(CANCEL_PATH, msgspec.json.encode(Cancel(self._name, calls)))
        assert status == 204

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Heard]:
        """One connection of the event stream, from where the last one ended."""
        headers = dict(await self.headers())
        if self.heard.last_id:
            headers["Last-Event-ID"] = self.heard.last_id
        url = f"{self._address}{EVENTS_PATH}?gateway={self._name}"
        self.heard.over.clear()
        async with self._session.get(url, headers=headers) as response:
            assert response.status == 200
            task = asyncio.create_task(self._read(response))
            await self.heard.until(lambda: self.heard.num_bytes)
            try:
                yield self.heard
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        reader = FrameReader()
        with contextlib.suppress(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                self.heard.take(chunk, reader)
        self.heard.over.set()


def words(num: int) -> str:
    """What the fake engine says in so many tokens."""
    return "".join(f"t{index} " for index in range(num))
