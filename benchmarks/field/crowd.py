"""A crowd of streams through one gateway, and what it costs: the gateway's CPU, its memory, and what a newcomer waits.

    python -m benchmarks.field.crowd --url http://127.0.0.1:8080 --key KEY --model every-40ms --streams 64 --watch PID

Run on a core of its own. All streams begin, then tokens and the gateway's CPU time are counted for a while, so that the
cost is that of tokens alone; then single calls are made beside the streams, in turns through the gateway and directly
to what stands behind it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil

from benchmarks.load import ERROR, Answer, Plan, Reader, request_bytes
from benchmarks.plain_upstream import AT_ONCE
from benchmarks.ttft_added import DirectCaller
from tests.support.worker_access import access_headers_of
from workers.protocol import framing

TOKEN = b'"content":"t'
"""Both upstreams' tokens begin with a `t`; what says who speaks and nothing else does not."""
SETTLE_S = 5.0
"""After the last call is made: a gateway with more than it can do is measured although not all streams have begun."""
END_WITHIN_S = 180.0
SAMPLE_S = 0.2
MOST_COUNTED = 0.98
"""Of the tokens at least: one that is cut in two by a chunk's end is not seen."""
FIRST_PROBES, LEAST_PROBES, PROBES_S = 2, 3, 8.0
"""Of each way: those not counted, and those made although they take longer than that together."""

Asker = Callable[[int], Awaitable[float]]
"""Makes the call of that number; returns the seconds until its first text."""


@dataclass(slots=True)
class Stream(Reader):
    """A connection that counts the tokens as they come."""

    num_tokens: int = 0
    on_begun: Callable[[], None] = lambda: None

    def data_received(self, data: bytes) -> None:
        had, self.num_tokens = self.num_tokens, self.num_tokens + data.count(TOKEN)
        if not had and self.num_tokens:
            self.on_begun()
        # Named because slots make the class anew, which `super()` without them does not know.
        Reader.data_received(self, data)

    def _settle(self, answer: Answer) -> None:
        """Judge by the status, by errors and by the last chunk alone: proxies cut chunks within words."""
        if self.head[9:12] != b"200" or ERROR.search(b"".join(self.parts)):
            answer.error = b"".join(self.parts)[-300:].decode(errors="replace")
        assert self.done is not None
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Window:
    """What was counted while the streams ran."""

    seconds: float
    tokens: int
    cpu_s: float
    num_begun: int
    """Streams that had a token when it began."""


def processes_of(roots: Iterable[int]) -> list[int]:
    """Return these processes and all that they have started."""
    return [
        process.pid
        for root in roots
        for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True))
    ]


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes in the scheduler's nanoseconds: short runs are few ticks of 10 ms."""
    total_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def resident_bytes(pids: Iterable[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


async def connected(url: str, kind: type[Reader]) -> Reader:
    target = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(kind, target.hostname or "127.0.0.1", target.port or 80)
    return reader


async def ask(url: str, plan: Plan, number: int) -> float:
    """Make one call by plain HTTP, over a connection of its own as each stream has. Raises RuntimeError."""
    reader = await connected(url, Reader)
    answer = await reader.ask(request_bytes(plan, number))
    if reader.transport is not None:
        reader.transport.close()
    if answer.error:
        raise RuntimeError(answer.error)
    return answer.first - answer.sent


@asynccontextmanager
async def direct_asker(given: argparse.Namespace, plan: Plan) -> AsyncIterator[Asker]:
    """Ask the plain upstream by HTTP; a fake worker as a gateway does, by a submit and the event stream."""
    if not given.worker_secret:
        yield lambda number: ask(given.direct, plan, number)
        return
    frames: asyncio.Queue[framing.Frame] = asyncio.Queue()
    headers = access_headers_of(given.direct, given.worker_secret)
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.TaskGroup() as group:
        caller, is_open = DirectCaller(session, given.direct), asyncio.Event()
        following = group.create_task(caller.follow(frames, is_open))
        await is_open.wait()
        yield lambda number: caller.first_text_s(frames, f"{number} tell me about it")
        following.cancel()


class Crowd:
    """The streams of one trial."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._pids = processes_of(given.watch)
        self._streams: list[Stream] = []
        self._answers: list[Answer] = []
        self._most_bytes = 0
        self._num_begun = 0
        self._all_begun = asyncio.Event()

    async def run(self) -> dict[str, object]:
        given = self._given
        async with asyncio.timeout(END_WITHIN_S), asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_memory())
            asking = [group.create_task(self._stream(number)) for number in range(given.streams)]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(given.ramp + SETTLE_S):
                    await self._all_begun.wait()
            window = await self._count()
            through_s, direct_s = await self._probe()
            await asyncio.gather(*asking)
            watching.cancel()
        return {**_window_figures(window), **self._stream_figures(), **_ttft(through_s, direct_s)}

    async def _stream(self, number: int) -> None:
        given = self._given
        await asyncio.sleep(given.ramp * number / given.streams)
        stream = await connected(given.url, Stream)
        assert isinstance(stream, Stream)
        stream.on_begun = self._note_begun
        self._streams.append(stream)
        self._answers.append(
            await stream.ask(request_bytes(_plan(given, given.prefix + given.model, given.tokens), number))
        )
        if stream.transport is not None:
            stream.transport.close()

    async def _watch_memory(self) -> None:
        while True:
            self._most_bytes = max(self._most_bytes, resident_bytes(self._pids))
            await asyncio.sleep(SAMPLE_S)

    async def _count(self) -> Window:
        num_begun = self._num_begun
        at, tokens, cpu_s = time.perf_counter(), self._num_tokens(), cpu_seconds(self._pids)
        await asyncio.sleep(self._given.window)
        seconds = time.perf_counter() - at
        used_s = cpu_seconds(self._pids) - cpu_s
        return Window(seconds, self._num_tokens() - tokens, used_s, num_begun)

    def _note_begun(self) -> None:
        self._num_begun += 1
        if self._num_begun == self._given.streams:
            self._all_begun.set()

    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self._streams)

    async def _probe(self) -> tuple[list[float], list[float]]:
        given = self._given
        plan = _plan(given, given.prefix + AT_ONCE, 1)
        through_s: list[float] = []
        direct_s: list[float] = []
        async with direct_asker(given, _plan(given, AT_ONCE, 1)) as ask_directly:
            began = time.perf_counter()
            for number in range(given.probes + FIRST_PROBES):
                if len(through_s) >= LEAST_PROBES and time.perf_counter() - began > PROBES_S:
                    break
                direct, through = await ask_directly(number), await ask(given.url, plan, number)
                if number >= FIRST_PROBES:
                    direct_s.append(direct)
                    through_s.append(through)
        return through_s, direct_s

    def _stream_figures(self) -> dict[str, object]:
        """Raises RuntimeError when a stream failed or was not whole."""
        errors = [answer.error for answer in self._answers if answer.error]
        whole = self._num_tokens() >= MOST_COUNTED * self._given.streams * self._given.tokens
        if errors or not whole:
            raise RuntimeError(f"{len(errors)} streams failed, {self._num_tokens()} tokens came: {errors[:1]}")
        longest_s = max((answer.longest_gap_s for answer in self._answers), default=math.nan)
        return {"most_bytes": self._most_bytes, "longest_gap_ms": longest_s * 1000}


def _plan(given: argparse.Namespace, model: str, tokens: int) -> Plan:
    return Plan(
        url=given.url,
        key=given.key,
        model=model,
        callers=1,
        requests=1,
        max_tokens=tokens,
        prompt_words=8,
        temperature=0.8,
    )


def _window_figures(window: Window) -> dict[str, object]:
    return {
        "cpu_s": window.cpu_s,
        "tokens": window.tokens,
        "window_s": window.seconds,
        "num_begun": window.num_begun,
    }


def _ttft(through_s: list[float], direct_s: list[float]) -> dict[str, object]:
    if not through_s:
        return {}
    return {"ttft_ms": statistics.median(through_s) * 1000, "direct_ms": statistics.median(direct_s) * 1000}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--url", required=True)
    flags.add_argument("--key", default="none")
    flags.add_argument("--prefix", default="", help="stands before the names of models")
    flags.add_argument("--model", required=True)
    flags.add_argument("--streams", type=int, required=True)
    flags.add_argument("--tokens", type=int, default=100, help="of each stream")
    flags.add_argument("--ramp", type=float, default=0.0, help="seconds over which the streams begin")
    flags.add_argument("--window", type=float, default=3.0, help="seconds for which CPU time and tokens are counted")
    flags.add_argument("--probes", type=int, default=10, help="single calls each way, beside the streams")
    flags.add_argument("--direct", default="", help="URL of what stands behind the gateway")
    flags.add_argument("--worker-secret", default="", help="what stands behind it is a worker that knows this secret")
    flags.add_argument("--watch", type=int, nargs="*", default=[], help="processes of the gateway")
    return flags


def reason(error: BaseException) -> str:
    """Return the first cause in a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join((str(error) or type(error).__name__).split())


def main() -> int:
    try:
        found = asyncio.run(Crowd(parser().parse_args()).run())
    except TimeoutError:
        print(f"the streams did not end within {END_WITHIN_S:g} s", file=sys.stderr)
        return 1
    except (ExceptionGroup, RuntimeError, OSError) as error:
        print(reason(error), file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
