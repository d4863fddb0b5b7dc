"""Load: N callers at once, each asking for streamed answers one after the other. Measures what a caller sees.

    python -m benchmarks.load --url http://127.0.0.1:8080 --key KEY --model NAME --callers 8 --requests 32

Raw asyncio protocols, so that the load costs little beside what it measures; run it on a core of its own. Prints one
JSON object. Asks for chat completions of any OpenAI-compatible server; with `--path` and `--body` for anything that is
streamed by Paddock, since it knows the end of a stream and the count of its tokens in every dialect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

FIRST_TOKEN = re.compile(rb'"(?:content|reasoning_content|text|thinking|arguments|partial_json|delta)": ?"[^"]')
COMPLETION_TOKENS = re.compile(rb'"(?:completion_tokens|output_tokens|tokens_predicted)": ?(\d+)')
LAST_WORD = re.compile(rb'data: \[DONE\]|event: message_stop|event: response\.(?:completed|incomplete)|"stop": ?true')
ERROR = re.compile(rb'"error": ?[^n]')
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d+)\r\n", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Answer:
    """One streamed answer; times are time.perf_counter() seconds."""

    sent: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    error: str = ""
    num_bytes: int = 0
    longest_gap_s: float = 0.0


@dataclass(slots=True)
class Reader(asyncio.Protocol):
    """One connection; `ask` sends a request and waits for its whole stream."""

    transport: asyncio.Transport | None = None
    answer: Answer | None = None
    done: asyncio.Future[None] | None = None
    parts: list[bytes] = field(default_factory=list)
    tail: bytes = b""
    head: bytes = b""
    last: float = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        answer, now = self.answer, time.perf_counter()
        if answer is None or self.done is None:
            return
        answer.num_bytes += len(data)
        if not answer.first:
            self.head += data
            if FIRST_TOKEN.search(self.head):
                answer.first = now
        else:
            answer.longest_gap_s = max(answer.longest_gap_s, now - self.last)
        self.last = now
        self.parts.append(data)
        self.tail = (self.tail + data)[-len(LAST_CHUNK) :]
        if self.tail == LAST_CHUNK or self._whole():
            answer.ended = now
            self._settle(answer)

    def _whole(self) -> bool:
        """An answer that is not streamed (an error) is here in full."""
        found = CONTENT_LENGTH.search(self.head)
        return found is not None and len(self.head) >= self.head.find(b"\r\n\r\n") + 4 + int(found[1])

    def _settle(self, answer: Answer) -> None:
        told = b"".join(self.parts)
        found = COMPLETION_TOKENS.findall(told)
        answer.tokens = int(found[-1]) if found else 0
        status = self.head[9:12]
        if status != b"200" or ERROR.search(told) or not LAST_WORD.search(told) or not found:
            answer.error = (self.head if status != b"200" else told)[-300:].decode(errors="replace")
        assert self.done is not None
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            assert self.answer is not None
            self.answer.error = f"connection lost: {error}"
            self.done.set_result(None)

    async def ask(self, request: bytes) -> Answer:
        assert self.transport is not None
        self.answer, self.parts, self.tail, self.head = Answer(sent=time.perf_counter()), [], b"", b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self.done
        return self.answer


@dataclass(frozen=True, slots=True)
class Plan:
    url: str
    key: str
    model: str
    callers: int
    requests: int
    max_tokens: int
    prompt_words: int
    temperature: float
    first: int = 0
    """Number of the first prompt: rounds that must not meet each other's cached prompts begin at different ones."""
    watch: tuple[int, ...] = ()
    path: str = "/v1/chat/completions"
    body: Path | None = None
    """A file: what is sent in place of a chat, the same each time."""
    header: tuple[str, ...] = ()
    """More of them, as `name: value`."""
    ramp: float = 0.0
    """Seconds over which the callers begin."""


@dataclass(slots=True)
class Tally:
    answers: list[Answer] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    cpu_s: float = 0.0


def request_bytes(plan: Plan, number: int) -> bytes:
    """One request; every number's prompt begins differently, so that no server's prompt cache helps."""
    body = chat_body(plan, number) if plan.body is None else plan.body.read_bytes()
    more = "".join(f"{header}\r\n" for header in plan.header)
    host = urlsplit(plan.url).netloc
    head = f"POST {plan.path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {plan.key}\r\n{more}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def chat_body(plan: Plan, number: int) -> bytes:
    words = " ".join(f"{(number * 7919 + i * 104729) % 99991}" for i in range(plan.prompt_words))
    return json.dumps(
        {
            "model": plan.model,
            "messages": [{"role": "user", "content": f"{number} tell me about {words}"}],
            "max_tokens": plan.max_tokens,
            "temperature": plan.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ).encode()


def cpu_seconds(pids: tuple[int, ...]) -> float:
    """User and system time of these processes so far, all threads."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


async def run(plan: Plan) -> Tally:
    """Runs the whole plan; raises OSError when the server does not accept connections."""
    loop = asyncio.get_running_loop()
    target = urlsplit(plan.url)
    host, port = target.hostname or "127.0.0.1", target.port or 80
    numbers = iter(range(plan.first, plan.first + plan.requests))
    tally = Tally()

    async def caller(begin_s: float) -> None:
        await asyncio.sleep(begin_s)
        for number in numbers:
            # A connection each: some servers close theirs after a stream, and a reused one may be gone just then.
            _, reader = await loop.create_connection(Reader, host, port)
            tally.answers.append(await reader.ask(request_bytes(plan, number)))
            if reader.transport is not None:
                reader.transport.close()

    cpu_before = cpu_seconds(plan.watch)
    tally.began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        callers = min(plan.callers, plan.requests)
        for place in range(callers):
            group.create_task(caller(plan.ramp * place / callers))
    tally.ended = time.perf_counter()
    tally.cpu_s = cpu_seconds(plan.watch) - cpu_before
    return tally


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summary(tally: Tally) -> dict[str, object]:
    good = [a for a in tally.answers if not a.error]
    tokens, wall = sum(a.tokens for a in good), tally.ended - tally.began
    ttft = [(a.first - a.sent) * 1000 for a in good if a.first]
    return {
        "requests": len(tally.answers),
        "errors": len(tally.answers) - len(good),
        "first_error": next((a.error for a in tally.answers if a.error), ""),
        "tokens": tokens,
        "bytes": sum(a.num_bytes for a in good),
        "wall_s": round(wall, 3),
        "tokens_per_s": round(tokens / wall, 2),
        "ttft_p50_ms": round(quantile(ttft, 0.5), 3),
        "ttft_p99_ms": round(quantile(ttft, 0.99), 3),
        "e2e_p50_s": round(quantile([a.ended - a.sent for a in good], 0.5), 3),
        "longest_gap_ms": round(max((a.longest_gap_s for a in good), default=math.nan) * 1000, 1),
        "watched_cpu_s": round(tally.cpu_s, 3),
        "watched_cpu_us_per_token": round(tally.cpu_s / tokens * 1e6, 2) if tokens else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="paddock-demo")
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--watch", type=int, nargs="*", default=[], help="process ids whose CPU time is counted")
    parser.add_argument("--path", default="/v1/chat/completions")
    parser.add_argument("--body", type=Path, help="file with the body to send in place of a chat")
    parser.add_argument("--ramp", type=float, default=0.0, help="seconds over which the callers begin")
    parser.add_argument("--header", action="append", default=[], help="one more, as NAME: VALUE; may be repeated")
    given = vars(parser.parse_args())
    plan = Plan(**{**given, "watch": tuple(given["watch"]), "header": tuple(given["header"])})
    tally = asyncio.run(run(plan))
    print(json.dumps(summary(tally)))
    return 1 if any(a.error for a in tally.answers) else 0


if __name__ == "__main__":
    sys.exit(main())
