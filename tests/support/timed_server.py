"""A server that streams chat answers at known times, one plan per request, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

PROBES = 2
"""Calls that `paddock bench` sends before it begins."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one answer: silence before its first token, then before each other one, in seconds."""

    first_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    status: int = 200
    cut: bool = False
    """The connection is dropped after the last token, before the stream's last word."""
    error: str = ""
    """Said in the stream after the last token."""
    headers: tuple[str, ...] = ()
    waiting: str = ""
    """A comment before the first token."""
    alone: bool = False
    """It waits until those before it that are alone are over."""


@dataclass(slots=True)
class TimedServer:
    """`plan` is asked with the number of each chat, from 0; the probe's are not counted, and answered at once."""

    url: str = ""
    plan: Callable[[int], Timing] = field(default=lambda number: Timing())
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    closes_idle: bool = False
    """Each connection is closed just after its answer, though nothing of the answer said so."""
    refuses: bool = False
    """Every key is wrong."""
    waited: list[float] = field(default_factory=list)
    """How long first tokens took in truth, after their requests were read, which a busy machine makes longer."""
    paused: list[float] = field(default_factory=list)
    """The same between tokens."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answered(reader, writer) and not self.closes_idle:
                    pass
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.splitlines())}
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))))
        number = len(self.asked)
        self.asked.append(body)
        self.keys.append(headers.get("authorization", "").removeprefix("Bearer "))
        return await self._say(number, body, writer)

    async def _say(self, number: int, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        timing = Timing() if number < PROBES else self.plan(number - PROBES)
        timing = Timing(status=401) if self.refuses else timing
        if timing.status != 200:
            text = json.dumps({"error": {"message": f"no: {self.keys[-1]}", "type": "x", "code": timing.status}})
            head = (
                f"HTTP/1.1 {timing.status} No\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
            )
            writer.write(f"{head}{text}".encode())
            return True
        more = "".join(f"{line}\r\n" for line in timing.headers)
        writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{more}transfer-encoding: chunked\r\n\r\n".encode()
        )
        if timing.waiting:
            _event(writer, f": {timing.waiting}\n\n")
        if timing.alone:
            async with self._lock:
                await self._tokens(timing, writer)
        else:
            await self._tokens(timing, writer)
        if timing.cut:
            return False
        if timing.error:
            _event(writer, f"data: {json.dumps({'error': {'message': timing.error}})}\n\n")
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": 2 * prompt, "completion_tokens": 1 + len(timing.gaps_s)}
        usage |= {"prompt_tokens_details": {"cached_tokens": prompt}}
        _event(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    async def _tokens(self, timing: Timing, writer: asyncio.StreamWriter) -> None:
        for number, pause in enumerate((timing.first_s, *timing.gaps_s)):
            began = time.perf_counter()
            await asyncio.sleep(pause)
            (self.paused if number else self.waited).append(time.perf_counter() - began)
            _event(writer, f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': ' t'}}]})}\n\n")
            await writer.drain()


def _event(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(text), text.encode()))


@contextmanager
def timed_server(plan: Callable[[int], Timing] = lambda number: Timing()) -> Iterator[TimedServer]:
    """In a thread and an event loop of its own."""
    loop, server = asyncio.new_event_loop(), TimedServer(plan=plan)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(server.answer, "127.0.0.1", 0, limit=1 << 24), loop
        ).result()
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server
        asyncio.run_coroutine_threadsafe(_close(listening), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _close(listening: asyncio.Server) -> None:
    listening.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Transports close in the loop's next rounds.
    await asyncio.sleep(0.01)
