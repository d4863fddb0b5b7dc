"""A plain streaming upstream for the nginx yardstick: the bytes that the gateway writes, with no work behind them.

    python -m benchmarks.plain_upstream --port 9000 --step-ms 20 --tokens 400

Every POST is answered with one chunk per step, shaped like the gateway's own, all streams on one clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1790000000,'
    b'"model":"fake","choices":[{"index":0,"delta":'
)
TOKEN = PREFIX + b'{"content":"token "},"finish_reason":null}]}\n\n'
LAST = (
    PREFIX + b'{},"finish_reason":"length"}]}\n\n' + PREFIX[:-32] + b'"choices":[],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":%d,"total_tokens":0}}\n\ndata: [DONE]\n\n'
)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


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


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Clock, tokens: int, gate: asyncio.Semaphore
) -> None:
    token, last = chunked(TOKEN), chunked(LAST % tokens)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            async with gate:
                writer.write(HEAD)
                for _ in range(tokens):
                    await clock.beat.wait()
                    writer.write(token)
                    await writer.drain()
                writer.write(last + b"0\r\n\r\n")
                await writer.drain()
    writer.close()


async def serve(port: int, step_ms: float, tokens: int, slots: int) -> None:
    clock, gate = Clock(step_ms / 1000), asyncio.Semaphore(slots)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer, clock, tokens, gate)

    server = await asyncio.start_server(connected, "127.0.0.1", port)
    print("ready", flush=True)
    async with server, asyncio.TaskGroup() as group:
        group.create_task(clock.run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--slots", type=int, default=64)
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.step_ms, given.tokens, given.slots))
