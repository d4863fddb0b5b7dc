"""What each caller got, word by word, and whether that agrees with what gateways logged and workers made."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import PaddockError
from tests.support.stack import Process
from tests.support.tally import read_tally

CALLER_PATIENCE_S = 90.0
FALSE_STATUSES = (400, 404, 500)
"""Never true of a call that a blow hits: it is as well made as the others of its test, and its model is there."""


def _codes(kind: type[PaddockError]) -> Iterator[str]:
    """Yield the codes of this error, and of those below it, that are told with such a status."""
    if kind.status in FALSE_STATUSES:
        yield kind.code or kind.type
    for below in kind.__subclasses__():
        yield from _codes(below)


FALSE_CODES = frozenset(_codes(PaddockError))
"""The same, as a stream tells it."""


@dataclass(slots=True)
class Record:
    """One call as its caller saw it."""

    id: str
    gateway: Process
    model: str
    wanted: int
    """Tokens that it asks for."""
    text: str = ""
    status: int = 0
    error: str = ""
    """Code of the error that the caller was told."""
    broken: str = ""
    """The connection ended without a word: only a gateway that died may do that."""
    usage: int | None = None
    done: bool = False
    asked_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    last_word_at: float = 0.0
    longest_gap_s: float = 0.0
    """Between two words."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first word and by the end."""
    task: asyncio.Task[None] | None = None

    @property
    def words(self) -> list[str]:
        return self.text.split()

    @property
    def answered(self) -> bool:
        return self.status == 200 and self.done and not self.error and not self.broken

    @property
    def ending(self) -> str:
        """`answered`, the code of an error, `left` (the caller went away) or `broken`."""
        if self.answered or self.error:
            return self.error or "answered"
        return "left" if self.broken == "left" else "broken"

    @property
    def took_s(self) -> float:
        return self.ended_at - self.asked_at

    def heard(self, text: str) -> None:
        now = time.monotonic()
        if self.text:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_word_at)
        self.last_word_at = now
        self.text += text
        self.begun.set()

    async def end(self, timeout_s: float = CALLER_PATIENCE_S) -> Record:
        assert self.task is not None
        await asyncio.wait([self.task], timeout=timeout_s)
        assert self.task.done(), f"{self.id} has no end after {timeout_s} s; it has {len(self.words)} words"
        if not self.task.cancelled():
            self.task.result()
        return self

    async def has_begun(self, timeout_s: float = 10.0) -> None:
        """Its first word is there."""
        await asyncio.wait_for(self.begun.wait(), timeout_s)
        assert self.text, f"{self.id} ended before its first word: {self.ending}"

    async def leave(self) -> None:
        """The caller goes away."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait([self.task])

    def check(self) -> None:
        """In order, nothing lost, nothing doubled, and an end of some kind; an error that is true of the service."""
        words = self.words
        assert words == [f"t{n}" for n in range(len(words))], f"{self.id}: {words}"
        if self.answered:
            assert len(words) == self.wanted == self.usage, f"{self.id}: {len(words)} of {self.wanted}, {self.usage}"
        else:
            assert self.error or self.broken, f"{self.id} ended with status {self.status} and neither answer nor error"
        told = f"{self.id} was told {self.status} {self.error}"
        assert self.status not in FALSE_STATUSES, told
        assert self.error not in FALSE_CODES, told


@dataclass(slots=True)
class Book:
    """All calls of a test. Open one with `keeping_book`."""

    session: aiohttp.ClientSession
    records: list[Record] = field(default_factory=list)
    numbers: Iterable[int] = field(default_factory=itertools.count)

    def ask(
        self, gateway: Process, model: str, tokens: int, headers: Mapping[str, str] | None = None, **more: Any
    ) -> Record:
        """A streamed chat completion of so many tokens, read by a task of its own. `more` goes into the body."""
        record = Record(f"call-{len(self.records)}-{model}", gateway, model, tokens)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me a story about a boat."}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        self.records.append(record)
        record.task = asyncio.create_task(self._read(record, body, headers or {}))
        return record

    async def _read(self, record: Record, body: dict[str, Any], more: Mapping[str, str]) -> None:
        url, headers = f"{record.gateway.url}/v1/chat/completions", {"x-request-id": record.id, **more}
        try:
            async with self.session.post(url, json=body, headers=headers) as response:
                record.status = response.status
                if response.status != 200:
                    record.error = _code((await response.json())["error"])
                    return
                async for line in response.content:
                    _understand(record, line)
            if not record.done:
                record.broken = "ended early"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.broken = type(error).__name__
        except asyncio.CancelledError:
            record.broken = "left"
            raise
        finally:
            record.ended_at = time.monotonic()
            record.begun.set()

    def endings(self) -> Counter[str]:
        return Counter(record.ending for record in self.records)

    def check(self, gateways: Iterable[Process], tallies: Iterable[Path], struck: frozenset[str]) -> Figures:
        """Raises AssertionError where callers, gateways and workers disagree.

        `struck` names the processes that were killed or stopped: a gateway among them may break a connection and owes
        no log line, a worker among them may have made tokens that nobody got. Compared, call by call: the caller's
        words, which are numbered; its usage; the gateway's log line; tokens in the workers' tallies.
        """
        made = {file.stem: read_tally(file) for file in tallies}
        figures = Figures(calls=len(self.records))
        for gateway in gateways:
            lines = _log_lines(gateway)
            here = [record for record in self.records if record.gateway is gateway]
            for record in here:
                record.check()
                _check_line(record, lines.get(record.id, []), gateway.name in struck)
                _check_making(record, made, struck, figures)
            if gateway.popen.poll() is None:
                _check_metrics(gateway, lines)
        return figures


@dataclass(slots=True)
class Figures:
    """What was compared."""

    calls: int
    words: int = 0
    """That callers got."""
    made: int = 0
    """That workers made."""


@asynccontextmanager
async def keeping_book(key: str) -> AsyncIterator[Book]:
    """Calls that still run at the end are given up."""
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        book = Book(session)
        try:
            yield book
        finally:
            tasks = [record.task for record in book.records if record.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _understand(record: Record, line: bytes) -> None:
    if not line.startswith(b"data: "):
        return
    if line.strip() == b"data: [DONE]":
        record.done = True
        return
    chunk = json.loads(line[6:])
    if "error" in chunk:
        record.error = _code(chunk["error"])
        return
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            record.heard(text)
    if chunk.get("usage"):
        record.usage = chunk["usage"]["completion_tokens"]


def _code(error: dict[str, Any]) -> str:
    """Some errors have a type only."""
    return str(error["code"] or error["type"])


def _log_lines(gateway: Process) -> dict[str, list[dict[str, Any]]]:
    """Request id -> its lines."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in gateway.text().splitlines():
        if '"request_id"' in line and line.startswith("{"):
            fields = json.loads(line)
            if "outcome" in fields:
                lines.setdefault(fields["request_id"], []).append(fields)
    return lines


def _check_line(record: Record, lines: list[dict[str, Any]], struck: bool) -> None:
    """The gateway's word on the call: one line, the same end, the same number of tokens."""
    where = f"{record.id}, {record.ending}, {record.gateway.name}: {lines}"
    assert len(lines) == 1 or (struck and not lines), where
    for line in lines:
        if record.broken == "left":
            assert line["outcome"] in ("client_gone", "ok", "cancelled"), where
        elif record.broken:
            assert struck, where
        else:
            assert line["outcome"] == (record.error or "ok"), where
        if record.answered:
            assert line["completion_tokens"] == len(record.words), where


def _check_making(
    record: Record, made: dict[str, dict[str, list[int]]], struck: frozenset[str], figures: Figures
) -> None:
    """Some worker made what the caller got; what else was made for it was made by one that was struck."""
    runs = [(worker, tokens) for worker, tally in made.items() for tokens in tally.get(record.id, ())]
    words = len(record.words)
    figures.words += words
    figures.made += sum(tokens for _, tokens in runs)
    where = f"{record.id}, {record.ending}: {words} words, made: {runs}"
    assert max((tokens for _, tokens in runs), default=0) >= words, where
    if record.answered:
        assert words in [tokens for _, tokens in runs], where
        assert len([worker for worker, _ in runs if worker not in struck]) <= 1, where


def _check_metrics(gateway: Process, lines: dict[str, list[dict[str, Any]]]) -> None:
    """A gateway's counter is the sum of its lines."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=5) as answer:
        exposition = answer.read().decode()
    counted = sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == "paddock_generated_tokens_total"
    )
    logged = sum(line.get("completion_tokens", 0) for of_one in lines.values() for line in of_one)
    assert counted == logged, f"{gateway.name} counted {counted} tokens and logged {logged}"
