"""Sends a source's requests, each when it is due or as soon as a caller is free, and records each call on a `Tape`."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from math import inf

import msgspec

from gateway.bench.connection import UNFINISHED, Connections, Dropped, Reading, Tape, Target
from gateway.bench.workload import Prompt, Source

LAG_EVERY_S = 0.02
LEAST_SECRET = 6
"""API keys with fewer characters are not masked, since they are words such as `none`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An API key, and the team name under which its calls are reported."""

    team: str
    key: str = field(repr=False)

    def covered(self, text: str) -> str:
        """Return a server's error text with the key masked, since some servers repeat it."""
        return text.replace(self.key, "***") if len(self.key) >= LEAST_SECRET else text


@dataclass(frozen=True, slots=True)
class Form:
    """The fields that all requests have in common. `ignore_eos`: every answer goes on until `max_tokens`."""

    model: str
    ignore_eos: bool
    temperature: float | None

    def body(self, prompt: Prompt) -> bytes:
        document: dict[str, object] = {
            "model": self.model,
            "messages": prompt.messages,
            "max_tokens": prompt.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            document["ignore_eos"] = True
        if self.temperature is not None:
            document["temperature"] = self.temperature
        return msgspec.json.encode(document)


@dataclass(frozen=True, slots=True)
class Span:
    """When to stop sending calls: after this many seconds or this many calls, whichever comes first."""

    seconds: float = inf
    calls: float = inf


@dataclass(slots=True)
class Run:
    """The record of a run so far. Times are time.perf_counter()."""

    began: float = 0.0
    sending_ended: float = 0.0
    """The time at which sending ended; 0: calls are still being sent."""
    ended: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of this process during the run."""
    tapes: list[Tape] = field(default_factory=list)
    lags: array[float] = field(default_factory=lambda: array("d"))
    """Seconds that the event loop was late, measured every 20 ms."""
    interrupted: bool = False
    pieces: int = 0
    """Total number of pieces in the answers that have ended."""
    running: set[int] = field(default_factory=set)
    """Indexes in `tapes` of the calls that are running."""


class Driver:
    """Sends the calls of one run. The callers take turns: each call uses the next key."""

    def __init__(self, there: Target, form: Form, callers: Sequence[Caller], source: Source, timeout_s: float) -> None:
        self.run = Run()
        self._there = there
        self._form = form
        self._callers = cycle(callers)
        self._source = source
        self._timeout_s = timeout_s
        self._connections = Connections(there)
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End the run now: running calls are cancelled and count as unfinished."""
        self.run.interrupted = True
        self._stopped.set()
        for task in self._tasks:
            task.cancel()

    async def timed(self, dues: Iterable[float], span: Span) -> None:
        """Send each call when it is due, whether or not earlier calls have ended. Return when all have ended."""
        async with self._measured(), asyncio.TaskGroup() as group:
            for number, at in enumerate(dues):
                if at >= span.seconds or number >= span.calls or not await self._until(self.run.began + at):
                    break
                prompt = self._source.next()
                if prompt is None:
                    break
                self._keep(group.create_task(self._call(self.run.began + at, prompt)))
            else:
                at = 0.0
            if span.seconds < inf and not self.run.interrupted and at >= span.seconds:
                await self._until(self.run.began + span.seconds)
            self.run.sending_ended = time.perf_counter()

    async def together(self, callers: int, span: Span) -> None:
        """Run `callers` callers at once; each sends its next call when the answer to its last one is complete."""
        async with self._measured(), asyncio.TaskGroup() as group:
            for _ in range(min(callers, int(min(span.calls, callers)))):
                self._keep(group.create_task(self._ask_on(span)))

    async def _ask_on(self, span: Span) -> None:
        run = self.run
        try:
            while len(run.tapes) < span.calls and not self._stopped.is_set():
                now = time.perf_counter()
                if now - run.began >= span.seconds or (prompt := self._source.next()) is None:
                    break
                await self._call(now, prompt)
        finally:
            run.sending_ended = min(time.perf_counter(), run.began + span.seconds)

    async def _until(self, at: float) -> bool:
        """Wait until the time `at`, or until the run is stopped. Return False if it was stopped."""
        delay = at - time.perf_counter()
        if delay > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
        else:
            await asyncio.sleep(0)
        return not self._stopped.is_set()

    async def _call(self, due: float, prompt: Prompt) -> None:
        caller, run = next(self._callers), self.run
        tape, number = Tape(due, caller.team, time.perf_counter()), len(run.tapes)
        run.tapes.append(tape)
        run.running.add(number)
        reading = Reading(tape)
        try:
            request = self._there.request(self._form.body(prompt), caller.key)
            async with asyncio.timeout(self._timeout_s):
                await self._connections.exchange(request, reading)
        except TimeoutError:
            reading.fail("timeout", f"no whole answer within {self._timeout_s:g} s")
        except Dropped as error:
            reading.fail("cut" if tape.times else "connection", str(error))
        except OSError as error:
            reading.fail("connection", str(error) or type(error).__name__)
        except asyncio.CancelledError:
            reading.fail(UNFINISHED, "the run was ended")
            raise
        finally:
            tape.ended = tape.ended or time.perf_counter()
            tape.tokens = tape.tokens or len(tape.times)
            tape.detail = caller.covered(tape.detail)
            run.pieces += len(tape.times)
            run.running.discard(number)
            self._source.ended(prompt, "".join(reading.said), good=tape.good)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _measured(self) -> _Measured:
        return _Measured(self.run, self._connections)


class _Measured:
    """Measures a run: its wall and CPU time, and how late its event loop is."""

    def __init__(self, run: Run, connections: Connections) -> None:
        self._run = run
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        self._cpu_s = 0.0

    async def __aenter__(self) -> None:
        self._cpu_s, self._run.began = time.process_time(), time.perf_counter()
        self._task = asyncio.create_task(self._lag())

    async def __aexit__(self, *raised: object) -> None:
        run = self._run
        run.ended = time.perf_counter()
        run.sending_ended = run.sending_ended or run.ended
        run.cpu_s = time.process_time() - self._cpu_s
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._connections.close()

    async def _lag(self) -> None:
        while True:
            due = time.perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self._run.lags.append(max(0.0, time.perf_counter() - due))
