"""A plain streaming upstream for the nginx yardstick and for other gateways: chat chunks with no work behind them.

    python -m benchmarks.plain_upstream --port 9000 --step-ms 20 --tokens 400

Every chat is answered with one chunk per step, shaped like the gateway's own, all streams on one clock. A model's name
may ask for another pace: `every-40ms` has a clock of its own, and `at-once` does not wait for any. GETs are answered
with a list of no models, for gateways that ask for one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
from functools import cache

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 27\r\n\r\n{"object":"list","data":[]}'
START = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"fake","choices":['
)
PREFIX = START + b'{"index":0,"delta":'
LAST = (
    PREFIX + b'{},"finish_reason":"length"}]}\n\n' + START + b'],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":%d,"total_tokens":%d}}\n\ndata: [DONE]\n\n'
)
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
PACE = re.compile(r"every-(\d+)ms$")
AT_ONCE = "at-once"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(number: int) -> bytes:
    """Return one token's event; no two are alike, since some gateways end a stream that repeats itself."""
    return PREFIX + b'{"content":"t%d "},"finish_reason":null}]}\n\n' % number


@cache
def token_chunk(number: int) -> bytes:
    return chunked(token(number))


class Clock:
    """Wakes every stream at the same beat, as one engine step does."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.beat = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += self.step_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            self.beat.set()
            self.beat = asyncio.Event()


class Upstream:
    """Answers chats: at most `slots` at a time, `tokens` each unless the request asks for fewer."""

    def __init__(self, group: asyncio.TaskGroup, step_s: float, tokens: int, slots: int) -> None:
        self._group, self._step_s, self._tokens = group, step_s, tokens
        self._gate = asyncio.Semaphore(slots)
        self._clocks: dict[float, Clock] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = CONTENT_LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith(b"GET "):
                    writer.write(MODELS)
                else:
                    async with self._gate:
                        await self._answer(writer, json.loads(body))
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, asked: dict[str, object]) -> None:
        tokens = min(self._tokens, int(str(asked.get("max_tokens") or self._tokens)))
        clock = self._clock(str(asked.get("model")))
        writer.write(HEAD)
        for number in range(tokens):
            if clock is not None:
                await clock.beat.wait()
            writer.write(token_chunk(number))
            await writer.drain()
        writer.write(chunked(LAST % (tokens, 9 + tokens)) + b"0\r\n\r\n")
        await writer.drain()

    def _clock(self, model: str) -> Clock | None:
        if model == AT_ONCE:
            return None
        pace = PACE.search(model)
        step_s = int(pace[1]) / 1000 if pace else self._step_s
        if step_s not in self._clocks:
            self._clocks[step_s] = Clock(step_s)
            self._group.create_task(self._clocks[step_s].run())
        return self._clocks[step_s]


async def serve(port: int, step_ms: float, tokens: int, slots: int) -> None:
    async with asyncio.TaskGroup() as group:
        upstream = Upstream(group, step_ms / 1000, tokens, slots)
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", port)
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--slots", type=int, default=64)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.step_ms, given.tokens, given.slots))
