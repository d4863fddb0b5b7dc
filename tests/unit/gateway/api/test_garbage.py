"""What an answer leaves behind: nothing that waits for the collector of cycles, which a gateway runs seldom."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.api.anthropic.writing import MessagesDialect
from gateway.api.native.completion import CompletionDialect as NativeDialect
from gateway.api.openai.dialects import ChatDialect, CompletionDialect
from gateway.api.responses.request import read_draft
from gateway.api.responses.response_store import ResponseWriters
from gateway.call import Call, Principal
from gateway.errors import PaddockError, QueueFull
from gateway.resume.recording import Recording
from gateway.store.streams import StreamInfo
from tests.support.request_logs import placed_log
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Reasoning,
    Started,
    Text,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from workers.protocol.requests import AdapterUse

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
REQUEST_LOG = placed_log("w-a")
DIALECTS = ("chat", "completions", "messages", "native", "responses")
PROBS = TokenLogprob(5, b"boat", -0.5)
EVENTS: list[CallEvent] = [
    Started(1, 0, 7, 3),
    Reasoning(1, "a thought"),
    Logprobs(1, PROBS, (PROBS,)),
    Text(1, "boat"),
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a": 1}'),
    Finished(1, FinishReason.STOP, Usage(7, 2, 3), Timings(3, 4, 8.0, 2, 10.0)),
]


class Fleet:
    def number_slot(self, model: str, worker: str, slot: int) -> int:
        return slot

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        return asked


def writer_of(dialect: str, *, stream: bool) -> Any:
    """A `StreamWriter`, or a `WholeWriter` of that dialect."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": stream}
    text = {"model": "m", "prompt": "hi", "stream": stream}
    made: Any
    asked: Any
    match dialect:
        case "chat":
            made, asked = ChatDialect(), ChatDialect().read(encoded(chat), {})
        case "completions":
            made, asked = CompletionDialect(), CompletionDialect().read(encoded(text), {})
        case "messages":
            made, asked = MessagesDialect(), MessagesDialect().read(encoded(chat), {})
        case "native":
            made = NativeDialect(Fleet())
            asked = made.read(encoded(text), {})
        case _:
            made, asked = ResponseWriters(), read_draft(encoded({"model": "m", "input": "hi"})).resolved({}).complete()
    return (made.stream_writer if stream else made.whole_writer)(asked, CALL, REQUEST_LOG)


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_that_has_ended_is_gone_at_once(dialect: str) -> None:
    writer = writer_of(dialect, stream=True)
    written = writer.opening() + b"".join(writer.chunks([event], 0) for event in EVENTS) + writer.closing()
    assert b"boat" in written
    gone = weakref.ref(writer)
    del writer
    assert gone() is None, "its parts hold each other"


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_whole_answer_is_gone_at_once(dialect: str) -> None:
    writer = writer_of(dialect, stream=False)
    writer.add(EVENTS, 0)
    assert b"boat" in b"".join(writer.parts())
    gone = weakref.ref(writer)
    del writer
    assert gone() is None, "its parts hold each other"


class Asked:
    """A request of many bytes."""


async def refused(recording: Recording) -> weakref.ref[Asked]:
    """Refuse a stream as `Responder` does, from within a call that knows what was asked."""
    asked = Asked()
    known = weakref.ref(asked)

    async def note_begun() -> None:
        assert asked is not None

    def call(_: Asked) -> None:
        raise QueueFull("the line is full") from KeyError("something below")

    recording.on_start = note_begun
    failure: PaddockError | None = None
    try:
        call(asked)
    except PaddockError as error:
        failure = error
    assert failure is not None
    recording.refuse(failure, b"event: error\ndata: {}\n\n")
    recording.end()
    del failure
    return known


@pytest.mark.usefixtures("no_collector")
async def test_a_refused_stream_keeps_nothing_of_its_request() -> None:
    """It is kept for minutes, its request was kept with it: 6 MiB for each response in the background that failed."""
    recording = Recording("s", StreamInfo("team", "", ""), 1 << 20)
    asked = await refused(recording)
    assert isinstance(recording.refusal, QueueFull)
    assert asked() is None
