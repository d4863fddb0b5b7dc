"""Parses one answer as it comes and records it on its tape.

Kinds of errors: `http_<status>`, `in_stream` (an error after the stream had begun), `cut` (the stream ended without
`[DONE]`), `empty` (it ended in order and had no text), `unreadable`, `timeout`, `connection`.
Source: OpenAI's API reference, "Chat completion chunk"; llama-server's `timings`; Paddock's `docs/api.md`, "Headers".
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from gateway.bench.tape import Tape

DETAIL_CHARS = 300
_WAITING = re.compile(rb"waiting position=(\d+)(?: wait_s=([\d.]+))?")
_LAST_WORD = b"data: [DONE]"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(Struct):
    cache_n: int | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Reading:
    """Parses one answer. `said` has the pieces of its text."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.said: list[str] = []
        self._status = 0
        self._streams = False
        self._rest = b""
        self._whole = False

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        self._streams = status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if (position := headers.get(b"x-queue-position", b"")).isdigit():
            self.tape.position = int(position)

    def feed(self, data: bytes, now: float) -> None:
        rest = self._rest + data if self._rest else data
        if not self._streams:
            self._rest = rest
            return
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *events, self._rest = rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                self._chunk(event[6:], now)
            else:
                self._lines(event, now)

    def finish(self, now: float) -> None:
        """Record the end of the HTTP response, and the failure of an answer that is not whole."""
        if self._streams and self._rest:
            self._lines(self._rest, now)
        tape = self.tape
        tape.ended = now
        tape.tokens = tape.tokens or len(tape.times)
        if tape.error:
            return
        if self._status != 200:
            self.fail(f"http_{self._status}", self._rest.decode("utf-8", "replace"))
        elif not self._streams:
            self.fail("unreadable", "the answer is no stream of events: " + self._rest.decode("utf-8", "replace"))
        elif not self._whole:
            self.fail("cut", "the stream ended before its last word")
        elif not tape.times:
            self.fail("empty", "the answer has no text")

    def fail(self, kind: str, detail: str) -> None:
        """Record a failure; only the first counts."""
        if not self.tape.error:
            self.tape.error, self.tape.detail = kind, " ".join(detail.split())[:DETAIL_CHARS]

    def _lines(self, event: bytes, now: float) -> None:
        for line in event.split(b"\n"):
            if line.startswith(_LAST_WORD) or line == b"data:[DONE]":
                self._whole = True
            elif line.startswith(b"data:"):
                self._chunk(line[5:], now)
            elif line.startswith(b":") and self.tape.wait_s is None and (told := _WAITING.search(line)):
                self.tape.wait_s = float(told[2]) if told[2] else None  # unknown before there is a worker
                if self.tape.position is None:
                    self.tape.position = int(told[1])

    def _chunk(self, document: bytes, now: float) -> None:
        try:
            chunk = _decode(document)
        except msgspec.MsgspecError as error:
            self.fail("unreadable", f"{error}: {document[:100].decode('utf-8', 'replace')}")
            return
        for choice in chunk.choices:
            self._piece(choice.delta, now)
        if chunk.usage is not None:
            self._usage(chunk.usage)
        if chunk.timings is not None and self.tape.cached_tokens is None:
            self.tape.cached_tokens = chunk.timings.cache_n
        if chunk.error is not None:
            self.fail("in_stream", msgspec.json.encode(chunk.error).decode())

    def _piece(self, delta: _Delta, now: float) -> None:
        if delta.content:
            self.said.append(delta.content)
        elif not (delta.reasoning_content or delta.reasoning or delta.tool_calls):
            return
        self.tape.times.append(now)

    def _usage(self, usage: _Usage) -> None:
        tape = self.tape
        tape.tokens, tape.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            tape.cached_tokens = usage.prompt_tokens_details.cached_tokens
