"""Pushed and buffered events make the same answers, whatever the client and the worker do in between."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Scope

from gateway.api.anthropic.writing import MessagesDialect
from gateway.api.dialect import Dialect
from gateway.api.http.diagnostics import begin_request_log, request_log_of
from gateway.api.http.streaming import Pings
from gateway.api.intake.disconnect import ClientGone
from gateway.api.intake.intake import RESERVATION
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.api.native.completion import CompletionDialect as NativeDialect
from gateway.api.openai.dialects import ChatDialect, CompletionDialect
from gateway.api.push_relay import hand_on
from gateway.api.responder import Responder
from gateway.api.responses.request import read_draft
from gateway.api.responses.response_store import ResponseWriters
from gateway.call import Answer, Call, Cutoff, Principal, Push
from gateway.errors import PaddockError, WorkerLost
from gateway.relay.mailbox import Mailbox
from tests.unit.gateway.api.test_garbage import Fleet
from workers.http_server.connection import CHUNK
from workers.protocol.events import (
    CallEvent,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Reasoning,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
)
from workers.tracing.tracer import NoTracer

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1e12, 1e12)
TIMINGS = Timings(3, 4, 8.0, 2, 10.0)
PROBS = TokenLogprob(5, b"boat", -0.5)
END = Finished(1, FinishReason.STOP, Usage(7, 9, 3), TIMINGS)
FAILED = Failed(1, Failure(FailureCode.INTERNAL, "broken"))
EVENTS: list[CallEvent] = [
    Started(1, 0, 7, 3),
    Reasoning(1, "a thought"),
    Reasoning(1, ", and more"),
    Text(1, "boat"),
    Logprobs(1, PROBS, (PROBS,)),
    Text(1, " and boat"),
    Tokens(1, (5, 6)),
    TimingsSoFar(1, TIMINGS),
    Text(1, " \n\n data: x"),
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a":'),
    ToolCallDelta(1, 0, "", "", " 1}"),
]
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
TEXT = {"model": "m", "prompt": "hi", "stream": True}
MANY = CHAT | {"n": 3, "stream_options": {"include_usage": True}}
NATIVE = NativeDialect(Fleet())

ASKED: dict[str, tuple[Dialect[Any], dict[str, Any]]] = {
    "chat": (ChatDialect(), CHAT),
    "chat with probabilities": (ChatDialect(), CHAT | {"logprobs": True, "top_logprobs": 1, "timings_per_token": True}),
    "three chats": (ChatDialect(), MANY),
    "whole chats": (ChatDialect(), CHAT | {"n": 2, "stream": False}),
    "completion": (CompletionDialect(), TEXT | {"logprobs": 1}),
    "messages": (MessagesDialect(), CHAT),
    "native": (NATIVE, TEXT | {"n_probs": 1, "return_tokens": True}),
    "responses": (cast(Any, ResponseWriters()), {}),
}


class Unpushed:
    """An answer that nobody can push to: its reader takes lists, as they gathered."""

    def __init__(self, answer: Mailbox) -> None:
        self._answer = answer
        self.choice = 0

    @property
    def ended(self) -> bool:
        return self._answer.ended

    @property
    def end(self) -> Finished | Failed | None:
        return self._answer.end

    async def take(self, push: Push | None = None) -> list[CallEvent]:
        return await self._answer.take()


@dataclass
class Trial:
    """One request to a `Responder`, whose answers come from mailboxes that the test fills."""

    name: str
    pushed: bool
    limit: int = 1000
    chunks: bool = True
    """Whether the server writes chunks at once while the client keeps up."""
    sent: list[Message] = field(default_factory=list)
    mailboxes: list[Mailbox] = field(default_factory=list)
    cutoff: Cutoff = field(default_factory=lambda: Cutoff(1e12, "time"))
    broken: bool = False

    def __post_init__(self) -> None:
        self.flows, self.left = asyncio.Event(), asyncio.Event()
        self.flows.set()
        path = "/v1/chat/completions"
        self._scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        if self.chunks:
            self._scope["extensions"] = {CHUNK: {"write": self.write_chunk}}
        begin_request_log(self._scope, NoTracer())
        self._scope[RESERVATION] = MemoryBudget(1 << 20).reserve(CALL.principal)
        self.request_log = request_log_of(self._scope)
        self.request_log.answer.begin_attempt(cast(Any, SimpleNamespace(worker="w", boot="b")), "", 0, "")
        dialect, body = ASKED[self.name]
        if body:
            self._asked: Any = dialect.read(json.dumps(body).encode(), {})
        else:
            self._asked = read_draft(b'{"model": "m", "input": "hi", "stream": true}').resolved({}).complete()
        pipeline: Any = SimpleNamespace(answer=self._answer, permitted=self._permitted)
        self._responder = Responder(dialect, pipeline, Pings(1e6), cast(Any, None))

    @asynccontextmanager
    async def _permitted(self, call: Call, *_: object) -> AsyncIterator[Call]:
        yield call

    @asynccontextmanager
    async def _answer(self, *_: object) -> AsyncIterator[Answer]:
        mailbox = Mailbox(self.limit, self.cutoff.cut)
        self.mailboxes.append(mailbox)
        async with self.cutoff if len(self._asked.requests) == 1 else asyncio.timeout(None):
            yield cast(Answer, mailbox if self.pushed else Unpushed(mailbox))

    async def send(self, message: Message) -> None:
        if self.broken:
            raise ZeroDivisionError
        if not self.flows.is_set():
            await self.flows.wait()
        self.sent.append(message)

    def write_chunk(self, body: bytes) -> bool:
        if self.broken or not self.flows.is_set():
            return False
        self.sent.append({"type": "http.response.body", "body": body, "more_body": True})
        return True

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def run(self) -> str:
        """Return how the request ended."""
        try:
            await self._responder.answer(self._asked, CALL, None, self._scope, self.receive, self.send)
        except (PaddockError, ClientGone, ZeroDivisionError) as error:
            return type(error).__name__
        return "ok"

    @property
    def told(self) -> list[bytes]:
        """The bodies that were sent, without what differs by chance and by time."""
        bodies = [message.get("body", b"") for message in self.sent]
        return [re.sub(rb'[0-9a-f]{12,}|"created(_at)?":\d+|"completed_at":\d+', b"#", body) for body in bodies]


async def turns(num: int = 12) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


Script = list[tuple[str, int]]
"""What happens, and how often or to which answer."""


async def played(trial: Trial, script: Script, end: CallEvent, last: str) -> str:
    """Play the script, then the rest of each answer and its end, and return how the request ended."""
    running = asyncio.create_task(trial.run())
    await turns()
    rest = [iter([*EVENTS, end]) for _ in trial.mailboxes]
    ended = set[int]()

    def put(number: int, num_together: int = 1) -> None:
        events = [event for _, event in zip(range(num_together), rest[number], strict=False)]
        if events:
            trial.mailboxes[number].put_all(events)
            if events[-1] is end:
                ended.add(number)

    for act, number in script:
        match act:
            case "put":
                put(number % len(rest), 1 + number // 2)
            case "stall":
                trial.flows.clear()
            case "flow":
                trial.flows.set()
            case _:
                await turns(number)
    match last:
        case "leaves":
            trial.left.set()
        case "breaks":
            trial.broken = True
            trial.flows.set()
        case "is cut":
            trial.cutoff.cut(WorkerLost("cut"))
        case _:
            trial.flows.set()
    if last in ("ends", "breaks"):
        for number in range(len(rest)):
            while number not in ended:
                put(number)
    trial.flows.set()
    async with asyncio.timeout(5):
        return await running


SCRIPTS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "stall", "flow", "turns"]), st.integers(0, 5)), max_size=60
)


async def one_way(
    name: str, script: Script, end: CallEvent, last: str, *, pushed: bool, chunks: bool = False
) -> tuple[Trial, str]:
    trial = Trial(name, pushed, chunks=chunks)
    return trial, await played(trial, script, end, last)


@pytest.mark.parametrize("name", ASKED)
@settings(max_examples=40, deadline=None)
@given(script=SCRIPTS, end=st.sampled_from([END, FAILED]), chunks=st.booleans())
def test_both_ways_send_the_same(name: str, script: Script, end: CallEvent, chunks: bool) -> None:
    pushed, how = asyncio.run(one_way(name, script, end, "ends", pushed=True, chunks=chunks))
    buffered, how_too = asyncio.run(one_way(name, script, end, "ends", pushed=False))
    assert how == how_too
    assert pushed.request_log.outcome == buffered.request_log.outcome
    if end is END or len(pushed.mailboxes) == 1:  # else the first that fails ends the others wherever they are
        assert pushed.request_log.usage == buffered.request_log.usage
        for number in range(len(pushed.mailboxes)):
            assert of_answer(number, pushed.told) == of_answer(number, buffered.told)


def of_answer(number: int, bodies: list[bytes]) -> list[bytes]:
    """Leave out the chunks of other answers: answers are told in whatever order they come."""
    others = [b'"index":%d,"delta"' % other for other in range(3) if other != number]
    return [body for body in bodies if not any(other in body for other in others)]


@pytest.mark.parametrize("name", ["chat", "responses"])
@settings(max_examples=60, deadline=None)
@given(script=SCRIPTS, last=st.sampled_from(["leaves", "breaks", "is cut"]))
def test_an_answer_that_ends_early_ends_alike(name: str, script: Script, last: str) -> None:
    whole, _ = asyncio.run(one_way(name, [], END, "ends", pushed=False))
    told: list[list[bytes]] = []
    for is_pushed in (True, False):
        trial, how = asyncio.run(one_way(name, script, END, last, pushed=is_pushed, chunks=is_pushed))
        finished = trial.told[-1:] == whole.told[-1:]
        if not finished:
            assert how == {"leaves": "ClientGone", "breaks": "ZeroDivisionError", "is cut": "ok"}[last]
        bodies = [body for body in trial.told if b"cut" not in body and b"DONE" not in body and body]
        assert bodies == [body for body in whole.told if b"DONE" not in body and body][: len(bodies)]
        told.append(bodies)
    if ("stall", 0) not in [(act, 0) for act, _ in script]:
        assert len(told[0]) >= len(told[1]), "what is pushed is never later"


async def test_a_token_wakes_no_task_while_the_client_keeps_up() -> None:
    trial = Trial("chat", pushed=True)
    running = asyncio.create_task(trial.run())
    await turns()
    [mailbox] = trial.mailboxes
    for event in EVENTS[:4]:
        mailbox.put(event)
    assert b"boat" in trial.told[-1], "without a turn of the event loop"
    trial.flows.clear()
    mailbox.put(Text(1, " one"))
    mailbox.put(Text(1, " two"))
    await turns()
    assert b"boat" in trial.told[-1]
    trial.flows.set()
    await turns()
    assert [b" one" in trial.told[-2], b" two" in trial.told[-1]] == [True, True]
    mailbox.put(Text(1, " three"))
    assert b" three" in trial.told[-1], "pushed again"
    mailbox.put(END)
    assert await running == "ok"


async def test_a_slow_client_is_cut_off_at_the_bound() -> None:
    trial = Trial("chat", pushed=True, limit=5)
    running = asyncio.create_task(trial.run())
    await turns()
    [mailbox] = trial.mailboxes
    mailbox.put(EVENTS[0])
    trial.flows.clear()
    for number in range(7):
        mailbox.put(Text(1, str(number)))
        await turns()
    trial.flows.set()
    assert await running == "ok"
    assert trial.request_log.outcome == "client_too_slow"


async def test_a_connection_that_breaks_in_a_push_disturbs_no_other_call() -> None:
    ill, well = Trial("chat", pushed=True), Trial("chat", pushed=True)
    running = [asyncio.create_task(trial.run()) for trial in (ill, well)]
    await turns()
    ill.broken = True
    for event in [*EVENTS, END]:
        for trial in (ill, well):
            trial.mailboxes[0].put(event)
    assert await asyncio.gather(*running) == ["ZeroDivisionError", "ok"]
    assert b"[DONE]" in well.told[-1]


async def test_what_stalled_is_given_up_with_its_answer() -> None:
    """Nothing waits on: neither the coroutine of the push nor what it holds."""
    given_up = asyncio.Event()

    async def handle(events: list[CallEvent]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    mailbox = Mailbox(10, lambda error: None)
    handing = asyncio.create_task(hand_on(mailbox, handle, lambda end, choice: None))
    await turns(2)
    mailbox.put(Text(1, "a"))
    handing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handing
    assert given_up.is_set()
