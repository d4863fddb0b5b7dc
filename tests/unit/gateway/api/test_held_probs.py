"""Probabilities that a gateway holds of an answer are counted, by number and by bytes, and are not without bound."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
from starlette.types import Message, Scope

from gateway.api.call_handlers import CallHandlers
from gateway.api.dialect import Dialect
from gateway.api.http.diagnostics import begin_request_log
from gateway.api.http.streaming import Pings
from gateway.api.intake.decoding import DecodingThread
from gateway.api.intake.intake import Intake
from gateway.api.intake.memory_budget import (
    MAX_WAITING_PROBS,
    MAX_WHOLE_PROBS,
    PROB_BYTES,
    TOKEN_BYTES,
    MemoryBudget,
    ProbabilityBudget,
)
from gateway.api.media.loader import MediaLoader
from gateway.api.openai.dialects import ChatDialect, CompletionDialect
from gateway.api.responses.events import EventWriter
from gateway.api.responses.request import read_draft
from gateway.call import Call, Principal
from gateway.errors import HeldTooMuch, InvalidRequest, TakesTooMuch, WorkerLost
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Text,
    Timings,
    TokenLogprob,
    Usage,
    decode_step,
    encode_step,
)
from workers.protocol.requests import GenerateRequest
from workers.tracing.tracer import NoTracer

ASKER = Principal("key", "red", None, admin=False)
CALL = Call("r", ASKER, "alias", "model", 0.0, 1.0, 1.0)
ONE = TokenLogprob(5, b"", -1.0)
EVENTS: list[CallEvent] = [Logprobs(1, ONE, (ONE, ONE)), Text(1, "a")]
EVENTS_BYTES = TOKEN_BYTES + 3 * PROB_BYTES
MANY: list[CallEvent] = [Logprobs(1, ONE, (ONE,) * 99)] * 16
END = Finished(1, FinishReason.STOP, Usage(1, 1, 0), Timings(0, 1, 1.0, 1, 1.0))


class Holding:
    """What a request holds."""

    num_bytes = 0

    def holds(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def held_of(
    *requests: GenerateRequest, streams: bool = False, repeats: bool = False
) -> tuple[ProbabilityBudget, Holding]:
    holding = Holding()
    return ProbabilityBudget(requests, holding.holds, streams=streams, repeats=repeats), holding


def test_the_chosen_one_and_those_in_its_place_count() -> None:
    held, holding = held_of(GenerateRequest(n_probs=2))
    held.count(0, EVENTS, written=False)
    assert holding.num_bytes == EVENTS_BYTES
    num_left = MAX_WHOLE_PROBS // 3 - 1
    held.count(0, EVENTS * num_left, written=False)
    assert holding.num_bytes == (num_left + 1) * EVENTS_BYTES
    with pytest.raises(InvalidRequest, match=f"more than {MAX_WHOLE_PROBS} probabilities"):
        held.count(0, EVENTS, written=False)


def test_what_was_written_is_held_no_more() -> None:
    held, holding = held_of(GenerateRequest(n_probs=2), GenerateRequest(n_probs=2), streams=True)
    for _ in range(MAX_WAITING_PROBS // 3 // 1000 + 10):
        held.count(0, EVENTS * 1000, written=False)
        held.count(0, EVENTS, written=True)
    assert holding.num_bytes == 0
    held.count(1, EVENTS, written=False)
    held.count(0, EVENTS, written=True)
    assert holding.num_bytes == EVENTS_BYTES, "the other answer's text has not come"
    with pytest.raises(InvalidRequest, match=f"more than {MAX_WAITING_PROBS} probabilities"):
        held.count(1, EVENTS * (MAX_WAITING_PROBS // 3), written=False)


def test_a_stream_that_tells_them_again_at_its_end_holds_them_until_then() -> None:
    held, holding = held_of(GenerateRequest(n_probs=2), streams=True, repeats=True)
    for _ in range(10):
        held.count(0, EVENTS, written=True)
    assert holding.num_bytes == 10 * EVENTS_BYTES


@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_what_such_a_stream_counts_is_about_what_it_holds_with_the_parts_of_its_end(num_top: int) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": num_top}
    asked = read_draft(json.dumps({"model": "m", "input": "hi", **include}).encode()).resolved({}).complete()
    writer, (held, holding) = EventWriter(asked, CALL), held_of(*asked.requests, streams=True, repeats=True)
    tokens = [TokenLogprob(100_000 + n, b" token%d" % n, -n / 7) for n in range(num_top + 1)]
    step = encode_step([Logprobs(1, tokens[0], tuple(tokens[1:])), Text(1, " token0")])
    tracemalloc.start()
    for _ in range(1000):
        events = list[CallEvent](decode_step(step))
        held.count(0, events, written=bool(writer.chunks(events, 0)))
    for body in (writer.chunks([END], 0), writer.closing()):
        for event in [body] if isinstance(body, bytes) else body:
            for _ in () if isinstance(event, bytes) else event.parts:
                pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.75 * most < holding.num_bytes < 2.5 * most


def test_long_tokens_those_of_a_prompt_and_those_told_twice_take_more() -> None:
    held, holding = held_of(GenerateRequest(n_probs=2, post_sampling_probs=True))
    long = TokenLogprob(5, b" " * 100, -1.0)
    held.count(0, [Logprobs(1, long, (long,)), PromptLogprobs(1, ((ONE, ()), (ONE, (ONE,))))], written=False)
    assert holding.num_bytes == 2 * (3 * TOKEN_BYTES + 5 * PROB_BYTES + 5 * 2 * 100)


def test_only_answers_that_tell_any_are_looked_at() -> None:
    assert not held_of(GenerateRequest())[0].are_wanted
    assert held_of(GenerateRequest(), GenerateRequest(n_probs=-1))[0].are_wanted


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "hi"}


@pytest.mark.parametrize("num_top", [1, 5, 20])
@pytest.mark.parametrize(
    ("dialect", "body", "by_number"),
    [
        (ChatDialect(), CHAT, "n_probs"),
        (ChatDialect(), CHAT | {"post_sampling_probs": True}, "n_probs"),
        (CompletionDialect(), PROMPT, "n_probs"),
        (CompletionDialect(), PROMPT, "logprobs"),
    ],
)
def test_what_is_counted_is_about_what_is_held(
    dialect: Dialect[Any], body: dict[str, Any], by_number: str, num_top: int
) -> None:
    asked = dialect.read(json.dumps(body | {by_number: num_top}).encode(), {})
    writer, (held, holding) = dialect.whole_writer(asked, CALL, RequestLog("r", "POST", "/")), held_of(*asked.requests)
    tokens = [TokenLogprob(100_000 + n, b" token%d" % n, -n / 7) for n in range(num_top + 1)]
    step = encode_step([Logprobs(1, tokens[0], tuple(tokens[1:])), Text(1, " token0")])
    writer.add(list(decode_step(step)), 0)
    tracemalloc.start()
    for _ in range(500):
        events = list[CallEvent](decode_step(step))
        writer.add(events, 0)
        held.count(0, events, written=False)
    writer.add([END], 0)
    for _ in writer.parts():
        pass
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.75 * most < holding.num_bytes < 2.5 * most


class Answer:
    """As many probabilities as are asked for, until `end`."""

    choice, ended = 0, False
    end: Finished | None = None

    def __init__(self, end: Callable[[], Finished | None]) -> None:
        self._end = end

    async def take(self, push: object = None) -> list[CallEvent]:
        self.end = self._end()
        self.ended = self.end is not None
        await asyncio.sleep(0)
        return [*MANY, Text(1, "a")] if self.end is None else [self.end]


class Resolver:
    """Makes the same call for all."""

    def begin(self, *about: object) -> None:
        """Nothing has to be known before a body is read."""

    def resolve(self, *about: object, adapters: object, held_bytes: int, autoload: bool | None) -> Call:
        return CALL


class Pipeline:
    """Answers at once."""

    def __init__(self, end: Callable[[], Finished | None]) -> None:
        self._end = end

    @asynccontextmanager
    async def permitted(self, call: Call, *about: object) -> AsyncIterator[Call]:
        yield call

    @asynccontextmanager
    async def answer(self, *about: object) -> AsyncIterator[Answer]:
        yield Answer(self._end)


async def asked_of(budget: MemoryBudget, end: Callable[[], Finished | None]) -> list[Message]:
    """Return what is sent to who asks for a whole answer, in which `end` is asked before each step."""
    raw = json.dumps(CHAT | {"n_probs": 99}).encode()
    path = "/v1/chat/completions"
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    begin_request_log(scope, NoTracer())
    pipeline, intake = cast(Any, Pipeline(end)), Intake(8 << 20, budget, DecodingThread(), lambda: 4096)
    nobody = cast(Any, None)
    calls = CallHandlers(cast(Any, Resolver()), pipeline, intake, Pings(15.0), nobody, nobody, MediaLoader(nobody))
    came: list[Message] = [{"type": "http.request", "body": raw}]
    sent: list[Message] = []

    async def receive() -> Message:
        if came:
            return came.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        assert budget.num_bytes > STEPS * len(MANY) * 100 * PROB_BYTES, "it counts until it is sent"
        sent.append(message)

    await calls.generate(ChatDialect())(ASKER, scope, receive, send)
    return sent


STEPS = 5


def after_steps(budget: MemoryBudget, last: Callable[[], Finished]) -> Callable[[], Finished | None]:
    """Return what ends an answer after some steps, each of which holds more than the one before."""
    held: list[int] = []

    def end() -> Finished | None:
        held.append(budget.num_bytes)
        assert held == sorted(set(held)), "they count as they come"
        return last() if len(held) > STEPS else None

    return end


async def test_a_whole_answer_counts_until_it_is_sent() -> None:
    budget = MemoryBudget(64 << 20)
    sent = await asked_of(budget, after_steps(budget, lambda: END))
    assert sent[0]["status"] == 200
    assert budget.num_bytes == 0


def _fails(error: BaseException) -> Finished:
    raise error


@pytest.mark.parametrize("error", [WorkerLost("gone"), asyncio.CancelledError(), ZeroDivisionError()])
async def test_what_ends_early_holds_nothing_more(error: BaseException) -> None:
    budget = MemoryBudget(64 << 20)
    with pytest.raises(type(error)):
        await asked_of(budget, after_steps(budget, partial(_fails, error)))
    assert budget.num_bytes == 0


async def test_an_answer_that_never_fits_is_told_so() -> None:
    budget = MemoryBudget(8 << 20)
    with pytest.raises(TakesTooMuch, match="The request and its answer take"):
        await asked_of(budget, lambda: None)
    assert budget.num_bytes == 0


async def test_an_answer_ends_where_others_of_its_key_hold_their_share() -> None:
    budget = MemoryBudget(8 << 20)
    other = budget.reserve(ASKER)
    other.resize(budget.largest - (1 << 20))
    with pytest.raises(HeldTooMuch, match="this key"):
        await asked_of(budget, lambda: None)
    assert budget.num_bytes == other.num_bytes
