"""How calls report what a parser finds: thoughts, calls, the end after the one call that is wanted, its faults."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from tests.unit.workers.service.test_generate import TIMINGS, USAGE, Bench, submit
from workers.chat.answers import Answers, family_of
from workers.chat.tools import ContentPiece, Piece
from workers.protocol.events import (
    CallEvent,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    ToolCallDelta,
    Usage,
    decode_step,
    encode_step,
)
from workers.protocol.framing import FrameReader
from workers.protocol.requests import Thinking, Tool
from workers.service.calls import delivery, stream
from workers.service.calls.call_record import CallRecords
from workers.service.calls.stream import MAX_PART_BYTES, EventHub

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


class MarkVocab:
    """Two control tokens: one opens a thought, one closes it. No other token has a text."""

    eog: frozenset[int] = frozenset()

    def __init__(self, opening: int, closing: int) -> None:
        self.marks = {opening: b"[THINK]", closing: b"[/THINK]"}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        return [token for token, mark in self.marks.items() if mark == text.encode()] or [1, 1]

    def piece(self, token: int) -> bytes:
        return b""

    def special_piece(self, token: int) -> bytes:
        return self.marks.get(token, b"")


VOCAB = MarkVocab(7, 8)
LAST_TOKEN = 4
"""Of the prompts here, which end with `None`: they have no tools."""


def wire(bench: Bench, template: str, vocab: MarkVocab = VOCAB) -> None:
    bench.wire(answers=Answers(family_of(template), vocab))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.hub.check_integrity()


async def test_the_answer_ends_after_the_one_call_that_is_wanted(bench: Bench) -> None:
    wire(bench, "<tool_call>")
    await bench.calls.submit(submit(1, tools=(Tool("f"),), parallel_tool_calls=False))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(1, [Started(key, 0, 9, 4)])
    bench.delivery.deliver(2, [Text(key, CALL, 7), Text(key, CALL, 7)])
    assert bench.engine.ended == [(key, 7)]
    usage = Usage(prompt_tokens=9, completion_tokens=16, cached_tokens=4)
    bench.delivery.deliver(3, [Text(key, " and more"), Finished(key, FinishReason.LENGTH, usage, TIMINGS)])
    started, call, end = bench.sent()
    assert isinstance(started, Started)
    assert isinstance(call, ToolCallDelta)
    assert (call.name, call.arguments, call.num_tokens) == ("f", '{"a": 1}', 7)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage) == (FinishReason.TOOL_CALLS, Usage(9, 7, 4))
    assert bench.calls.num_calls == 0


async def test_a_call_that_the_token_limit_cuts_off_is_not_made_whole(bench: Bench) -> None:
    wire(bench, "<tool_call>")
    for number, reason in ((1, FinishReason.LENGTH), (2, FinishReason.STOP)):
        await bench.calls.submit(submit(number, tools=(Tool("f"),)))
        key = bench.engine.taken[-1].key
        bench.delivery.deliver(number, [Text(key, CALL.partition("}")[0]), Finished(key, reason, USAGE, TIMINGS)])
    deltas = [event for event in bench.sent() if isinstance(event, ToolCallDelta)]
    assert "".join(one.arguments for one in deltas if one.call == 1) + "}" == "".join(
        one.arguments for one in deltas if one.call == 2
    )


async def test_thoughts_are_told_apart_unless_the_caller_wants_them_as_they_are(bench: Bench) -> None:
    wire(bench, "</think>")
    text = "<think>\nHm.\n</think>\n\nYes."
    await bench.calls.submit(submit(1))
    await bench.calls.submit(submit(2, thinking=Thinking(split=False)))
    one, other = (request.key for request in bench.engine.taken)
    bench.delivery.deliver(1, [Text(one, text, 8), Text(other, text, 8)])
    assert bench.sent() == [Reasoning(1, "Hm.", 8), Text(1, "Yes.", 0), Text(2, text, 8)]


@pytest.mark.parametrize("opened", [True, False])
async def test_a_prompt_may_end_inside_of_a_thought(bench: Bench, opened: bool) -> None:
    wire(bench, "[/THINK]", MarkVocab(LAST_TOKEN, 8) if opened else MarkVocab(8, LAST_TOKEN))
    await bench.calls.submit(submit(1))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(1, [Text(key, "Hm.[/THINK]Yes."), Finished(key, FinishReason.STOP, USAGE, TIMINGS)])
    told = bench.sent()[:-1]
    assert told == ([Reasoning(1, "Hm.", 1), Text(1, "Yes.", 0)] if opened else [Text(1, "Hm.[/THINK]Yes.")])


async def test_who_reads_marks_gets_the_one_that_the_prompt_ended_with(bench: Bench) -> None:
    wire(bench, "[/THINK]", MarkVocab(LAST_TOKEN, 8))
    await bench.calls.submit(submit(1, thinking=Thinking(split=False)))
    key = bench.engine.taken[0].key
    bench.delivery.deliver(
        1, [Text(key, "Hm.[/THINK]"), Text(key, "Yes."), Finished(key, FinishReason.STOP, USAGE, TIMINGS)]
    )
    told = bench.sent()[:-1]
    assert "".join(event.text for event in told if isinstance(event, Text)) == "[THINK]Hm.[/THINK]Yes."
    assert sum(event.num_tokens for event in told if isinstance(event, Text)) == 2

    request = submit(2, tools=(Tool("f"),), thinking=Thinking(split=False)).request
    parser = Answers(family_of("[/THINK]"), MarkVocab(LAST_TOKEN, 8)).parser(request, [1, LAST_TOKEN])
    assert parser is not None
    pieces = [*parser.feed("Hm.[/THINK]"), *parser.feed(CALL), *parser.finish()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece)) == "[THINK]Hm.[/THINK]"
    assert parser.num_calls == 1


async def test_marks_that_are_control_tokens_are_written_for_those_who_read_them(bench: Bench) -> None:
    wire(bench, "[/THINK]")
    await bench.calls.submit(submit(1))
    await bench.calls.submit(submit(2, prompt="a b"))
    chat, raw = bench.engine.taken
    assert dict(chat.written) == VOCAB.marks
    assert not raw.written
    wire(bench, "[TOOL_CALLS]")
    await bench.calls.submit(submit(3))
    assert not bench.engine.taken[-1].written


async def test_long_answers_that_may_become_calls_are_no_long_frames(bench: Bench) -> None:
    """Eight answers at once: half a megabyte of each left in one frame at the end."""
    wire(bench, "<tool_call>")
    token, num_tokens = "-" * 112, 5_000
    for number in range(1, 9):
        await bench.calls.submit(submit(number, tools=(Tool("f"),)))
    keys = [request.key for request in bench.engine.taken]
    frames: list[bytes] = []
    for step in range(1, num_tokens + 1):
        bench.delivery.deliver(step, [Text(key, token if step > 1 else '{"type": "') for key in keys])
        frames.append(bench.feeds["g"].take(1))
    bench.delivery.deliver(num_tokens + 1, [Finished(key, FinishReason.LENGTH, USAGE, TIMINGS) for key in keys])
    frames += iter(lambda: bench.feeds["g"].take(1), b"")
    assert max(map(len, frames)) <= MAX_PART_BYTES
    said = dict.fromkeys(range(1, 9), "")
    for frame in FrameReader().feed(b"".join(frames)):
        for event in decode_step(frame.data):
            if isinstance(event, Text):
                said[event.call] += event.text
    assert set(said.values()) == {'{"type": "' + token * (num_tokens - 1)}


class BrokenParser:
    """Breaks over one text, and quotes it."""

    is_over = False
    num_calls = 0

    def __init__(self, breaks_at: str = "", *, breaks_at_end: bool = False) -> None:
        self.breaks_at, self.breaks_at_end = breaks_at, breaks_at_end

    def feed(self, text: str) -> list[Piece]:
        if text == self.breaks_at:
            raise KeyError(text)
        return [ContentPiece(text)]

    def finish(self, *, cut_off: bool) -> list[Piece]:
        if self.breaks_at_end:
            raise KeyError("secret")
        return []


async def two_calls(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, parser: BrokenParser, *, cache_prompt: bool = True
) -> tuple[int, int]:
    """The first is read by `parser`."""
    parsers = iter([parser, None])
    monkeypatch.setattr(Answers, "parser", lambda *_: next(parsers))
    for call in (1, 2):
        await bench.calls.submit(submit(call, cache_prompt=cache_prompt))
    first, second = (request.key for request in bench.engine.taken)
    bench.delivery.deliver(1, [Started(first, 0, 4, 0), Started(second, 1, 4, 0)])
    bench.sent()
    return first, second


def the_failure(event: CallEvent) -> Failure:
    assert isinstance(event, Failed)
    return event.failure


async def test_what_breaks_the_parser_of_one_call_ends_that_call_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await two_calls(bench, monkeypatch, BrokenParser("secret"))
    bench.delivery.deliver(2, [Text(first, "a"), Text(first, "secret"), Text(second, "b"), Text(first, "c")])
    text, failed, other = bench.sent()
    assert (text, other) == (Text(1, "a"), Text(2, "b"))
    assert (failed.call, the_failure(failed).code) == (1, FailureCode.INTERNAL)
    assert bench.engine.cancelled == [first]
    bench.delivery.deliver(3, [Text(first, "d"), Finished(second, FinishReason.STOP, USAGE, TIMINGS)])
    assert bench.sent() == [Finished(2, FinishReason.STOP, USAGE, TIMINGS)]
    assert bench.calls.num_calls == 0
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "req-1" in logged
    assert "in feed" in logged
    assert "KeyError" in logged
    assert '"secret"' not in logged.replace("'", '"')


async def test_a_parser_that_breaks_at_the_end_ends_its_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await two_calls(bench, monkeypatch, BrokenParser(breaks_at_end=True))
    bench.delivery.deliver(2, [Finished(first, FinishReason.STOP, USAGE, TIMINGS), Text(second, "b")])
    failed, other = bench.sent()
    assert the_failure(failed).code == FailureCode.INTERNAL
    assert other == Text(2, "b")
    assert bench.calls.num_calls == 1


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("cache_prompt", [False, True])
async def test_an_event_that_cannot_be_encoded_ends_its_call_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: bool, cache_prompt: bool
) -> None:
    first, second = await two_calls(bench, monkeypatch, BrokenParser(), cache_prompt=cache_prompt)
    end = [Finished(first, FinishReason.STOP, USAGE, TIMINGS)] if ends else []
    bench.delivery.deliver(2, [Text(first, "a"), Text(first, "secret\ud800"), Text(second, "b"), *end])
    other, failed = bench.sent()
    assert other == Text(2, "b")
    assert (failed.call, the_failure(failed).code) == (1, FailureCode.INTERNAL)
    assert bench.engine.cancelled == ([] if ends and not cache_prompt else [first])
    assert bench.calls.num_calls == 1
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "UnicodeEncodeError" in logged
    assert "secret" not in logged


async def test_a_story_that_cannot_be_told_ends_no_other_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await two_calls(bench, monkeypatch, BrokenParser())

    def refuse(*_: object) -> None:
        raise KeyError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(CallRecords, "end", refuse)
        bench.delivery.deliver(2, [Finished(first, FinishReason.STOP, USAGE, TIMINGS), Text(second, "b")])
    assert bench.sent() == [Finished(1, FinishReason.STOP, USAGE, TIMINGS), Text(2, "b")]
    assert bench.calls.num_calls == 1


async def test_what_is_no_calls_fault_is_raised(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(BrokenParser):
        def feed(self, text: str) -> list[Piece]:
            raise MemoryError

    def refuse(*_: object) -> None:
        raise KeyError("ring")

    first, second = await two_calls(bench, monkeypatch, Short())
    with pytest.raises(MemoryError):
        bench.delivery.deliver(2, [Text(first, "a")])
    monkeypatch.setattr(EventHub, "publish", refuse)
    with pytest.raises(KeyError):
        bench.delivery.deliver(3, [Text(second, "a")])


async def test_events_are_encoded_once_while_all_of_them_can_be(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await two_calls(bench, monkeypatch, BrokenParser())
    encoded: list[int] = []

    def counted(events: list[CallEvent]) -> bytes:
        encoded.append(len(events))
        return encode_step(events)

    monkeypatch.setattr(stream, "encode_step", counted)
    monkeypatch.setattr(delivery, "encode_step", counted, raising=False)
    bench.delivery.deliver(2, [Text(first, "a"), Text(second, "b")])
    assert encoded == [2]
