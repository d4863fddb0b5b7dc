"""A stream that others may read again, and that breaks in the gateway: they are told, and it is counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from gateway.api.http.sockets import Socket
from gateway.api.http.streaming import LongEvent, Pings, written
from gateway.api.intake.disconnect import ClientGone
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.openai.dialects import ChatDialect
from gateway.api.responder import RecordingSink, Responder
from gateway.api.responses.socket.stream_queues import EventMessages
from gateway.call import Call, Principal
from gateway.resume.recording import Recording
from gateway.store.streams import StreamInfo
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import CallEvent, Started, Text

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
HOLDS = MemoryBudget(1 << 20).reserve(CALL.principal).add


class Answer:
    """Two tokens, and then something that nobody expected."""

    choice, end, ended = 0, None, False

    def __init__(self, *steps: list[CallEvent]) -> None:
        self._steps = iter(steps)

    async def take(self, push: object = None) -> list[CallEvent]:
        for step in self._steps:
            return step
        raise ZeroDivisionError


def responder(*steps: list[CallEvent], begins: bool = True) -> Any:
    @asynccontextmanager
    async def answer(*_: object) -> AsyncIterator[Answer]:
        if not begins:
            raise ZeroDivisionError
        yield Answer(*steps)

    @asynccontextmanager
    async def permitted(call: Call, *_: object) -> AsyncIterator[Call]:
        yield call

    pipeline: Any = SimpleNamespace(answer=answer, permitted=permitted)
    nothing: Any = None
    return Responder(ChatDialect(), pipeline, Pings(1.0), nothing)


@pytest.mark.parametrize("begins", [True, False])
async def test_readers_are_told_of_a_break(begins: bool, caplog: pytest.LogCaptureFixture) -> None:
    one = responder([Started(1, 0, 7, 3), Text(1, "boat")], begins=begins)
    asked = ChatDialect().read(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}', {})
    request_log = RequestLog("req-7", "POST", "/v1/chat/completions")
    recording = Recording("s", StreamInfo("team", "", "gateway"), 1 << 16)
    await one.record(asked, CALL, request_log, ChatDialect().stream_writer(asked, CALL, request_log), HOLDS, recording)
    told, _ = recording.after(0)
    assert b"Something broke in the gateway; its log has request req-7." in told
    assert request_log.outcome == "internal_error"
    assert "a stream broke" in caplog.text
    if begins:
        assert told.index(b"boat") < told.index(b"Something broke"), "in the stream, behind what there was"
        assert request_log.usage is not None
        assert (request_log.usage.prompt_tokens, request_log.usage.completion_tokens) == (7, 1)
    else:
        assert recording.refusal is not None


async def test_a_caller_who_leaves_is_no_break(caplog: pytest.LogCaptureFixture) -> None:
    """As one does whose WebSocket closes while its answer is written."""

    class Gone:
        async def start(self) -> None: ...

        async def write(self, body: bytes) -> None:
            raise ClientGone

    one = responder([Started(1, 0, 7, 3), Text(1, "boat")])
    asked = ChatDialect().read(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}', {})
    request_log = RequestLog("req-7", "POST", "/v1/chat/completions")
    with pytest.raises(ClientGone):
        await one.write(asked, CALL, request_log, ChatDialect().stream_writer(asked, CALL, request_log), HOLDS, Gone())
    assert (request_log.outcome, caplog.text) == ("", "")


async def test_a_long_event_is_kept_in_one_piece_in_its_brief_form() -> None:
    def brief(event: bytes) -> list[bytes | LongEvent]:
        return [b"data: a\n\n", LongEvent(iter([b"data: ", b"long", event]), iter([b"data: ", event])), b"data: b\n\n"]

    recording = Recording("s", StreamInfo("team", "", "gateway"), 1 << 16)
    await written(RecordingSink(recording).write(brief(b"1\n\n")))
    assert recording.after(0) == (b"id: s:1\ndata: a\n\nid: s:2\ndata: 1\n\nid: s:3\ndata: b\n\n", 3)
    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["text"])

    told: list[bytes | LongEvent] = [LongEvent(iter([]), iter([b"event: x\ndata: ", b"{}\n\n"]))]
    await EventMessages(Socket(cast(Any, None), send), "lane").write(told)
    assert sent == ['{,"stream_id":"lane"}']
