"""Calls for pooled work: what they tokenise, and when they stop doing so."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import Message as AsgiMessage
from starlette.types import Receive

from tests.support.calls import pooled_calls
from tests.support.fake_pooled import FakeInputs, FakePooledEngine
from tests.support.fake_text import TEMPLATE, FakeVocab
from tests.support.waiting import until
from workers.chat.prompts import Prompts, Seen
from workers.chat.template import ChatTemplate
from workers.engine.pooled.engine import PooledRequest
from workers.engine.pooled.jobs import tokens_of
from workers.llama.pooling import Pooling
from workers.protocol.events import CallFailed, FailureCode
from workers.protocol.pooled import POOL_PATH, PoolPrompt, PoolRequest, decode_result
from workers.protocol.requests import Medium, Message
from workers.service.calls.pooled import PooledCalls
from workers.service.calls.pooled_inputs import PooledReader
from workers.service.routes.app import PoolRoutes

NUM_ROWS, WIDTH = 700, 512


class CountedInputs(FakeInputs):
    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def of_pair(self, query: str, document: str) -> list[int]:
        self.num_read += 1
        self.may_go_on.wait(10)
        return super().of_pair(query, document)


def calls_of(inputs: FakeInputs) -> PooledCalls:
    return pooled_calls(
        lambda outcomes: FakePooledEngine(2, 64, 1, outcomes.tell), inputs, pooling=Pooling.RANK, width=1, longest=64
    )


async def test_a_query_that_is_too_long_is_read_once() -> None:
    inputs = CountedInputs()
    with pytest.raises(CallFailed) as caught:
        await calls_of(inputs).pool(PoolRequest(kind="rank", query="long " * 1000, inputs=("a",) * 500))
    assert caught.value.failure.code is FailureCode.CONTEXT_OVERFLOW
    assert inputs.num_read == 1


async def test_the_engine_hears_whose_a_call_is(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    submit = FakePooledEngine.submit

    def hearing(engine: FakePooledEngine, request: PooledRequest) -> None:
        heard.append(request.tenant)
        submit(engine, request)

    monkeypatch.setattr(FakePooledEngine, "submit", hearing)
    await calls_of(FakeInputs()).pool(PoolRequest(kind="rank", query="q", inputs=("a",), tenant="red"))
    assert heard == ["red"], "teams take turns in it"


async def test_a_query_is_read_with_so_many_documents() -> None:
    """One of half a context, with two thousand documents of a letter, had gigabytes of tokens."""
    inputs = CountedInputs()
    with pytest.raises(CallFailed, match="`query` has 5000 characters and is read with each of 2048 documents") as told:
        await calls_of(inputs).pool(PoolRequest(kind="rank", query="q" * 5000, inputs=("a",) * 2048))
    assert (told.value.failure.param, inputs.num_read) == ("query", 0)


async def test_a_call_that_the_engine_refuses_is_told_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "workers.service.calls.call_record")
    with pytest.raises(CallFailed):
        await calls_of(FakeInputs()).pool(PoolRequest(kind="rank", query="long " * 1000, inputs=("a",)))
    (line,) = caplog.records
    assert vars(line)["fields"]["outcome"] == FailureCode.CONTEXT_OVERFLOW.value


async def test_nothing_more_is_read_for_one_who_has_gone() -> None:
    inputs = CountedInputs()
    inputs.may_go_on.clear()
    asked = PoolRequest(kind="rank", query="why", inputs=("because " * 10,) * 500)
    waiting = asyncio.create_task(calls_of(inputs).pool(asked))
    await until(lambda: inputs.num_read == 1, 5.0, "it is read")
    waiting.cancel()
    await asyncio.wait({waiting})
    inputs.may_go_on.set()
    await asyncio.sleep(0.05)
    assert inputs.num_read == 1


class HeardInputs(FakeInputs):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, bool]] = []

    def of_text(self, text: str, *, add_special: bool = True) -> list[int]:
        self.heard.append((text, add_special))
        return super().of_text(text, add_special=add_special)


async def test_texts_and_tokens_of_an_input_are_read_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, asked = HeardInputs(), list[PooledRequest]()
    submit = FakePooledEngine.submit

    def hearing(engine: FakePooledEngine, request: PooledRequest) -> None:
        asked.append(request)
        submit(engine, request)

    monkeypatch.setattr(FakePooledEngine, "submit", hearing)
    calls = pooled_calls(
        lambda outcomes: FakePooledEngine(2, 64, 1, outcomes.tell), inputs, pooling=Pooling.MEAN, width=1, longest=64
    )
    await calls.pool(PoolRequest(inputs=(("a word", 7, "b"),)))
    own = FakeInputs()
    assert list(tokens_of(asked[-1].inputs[0])) == [*own.of_text("a word"), 7, *own.of_text("b", add_special=False)]
    assert inputs.heard == [("a word", True), ("b", False)]
    await calls.pool(PoolRequest(inputs=(("a", 2**70, "b"),)))
    assert tokens_of(asked[-1].inputs[0])[-1] == 2**70, "an engine with a vocabulary names the token that it refuses"
    inputs.heard.clear()
    long: list[list[int | str]] = [[7, "long " * 1000, *["b"] * 500], [*[7] * 500, "b"], [7] * 500]
    for parts in long:
        with pytest.raises(CallFailed) as caught:
            await calls.pool(PoolRequest(inputs=(parts,)))
        assert caught.value.failure.code is FailureCode.CONTEXT_OVERFLOW
    assert inputs.heard == [("long " * 1000, False)]


async def test_all_are_read_otherwise() -> None:
    inputs = CountedInputs()
    result = await calls_of(inputs).pool(PoolRequest(kind="rank", query="why", inputs=("because " * 10,) * 500))
    assert (len(result.vectors), inputs.num_read) == (500, 500)


class LargeEngine(FakePooledEngine):
    """Answers with so many vectors to each input, whatever it is."""

    def submit(self, request: PooledRequest) -> None:
        numbers = np.arange(NUM_ROWS * WIDTH, dtype=np.float32).reshape(NUM_ROWS, WIDTH)
        self._tell(request.key, tuple(numbers + place for place, _ in enumerate(request.inputs)))


async def test_many_token_ids_are_gone_through_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million, 3 MB, took 60 ms of the event loop, and 20 more where the engine looked through lists."""
    asked: list[PooledRequest] = []
    taken: list[threading.Thread] = []
    in_turn, submit = PooledReader._in_turn, FakePooledEngine.submit

    def taking(reader: PooledReader, parts: Sequence[int | str]) -> Sequence[int]:
        taken.append(threading.current_thread())
        return in_turn(reader, parts)

    def hearing(engine: FakePooledEngine, request: PooledRequest) -> None:
        asked.append(request)
        submit(engine, request)

    monkeypatch.setattr(PooledReader, "_in_turn", taking)
    monkeypatch.setattr(FakePooledEngine, "submit", hearing)
    calls = pooled_calls(
        lambda outcomes: FakePooledEngine(2, 64, 1, outcomes.tell),
        FakeInputs(),
        pooling=Pooling.MEAN,
        width=1,
        longest=64,
    )
    await calls.pool(PoolRequest(inputs=((1, 2, 3),)))
    assert taken == [threading.current_thread()], "a few take less than a hop to another thread"
    await calls.pool(PoolRequest(inputs=((1, 2, 3),) * 400))
    assert threading.current_thread() not in taken[1:]
    assert all(isinstance(one, array) for one in asked[-1].inputs), "numpy looks through it without a copy"
    await calls.pool(PoolRequest(inputs=((1, 2**70),)))
    assert list(tokens_of(asked[-1].inputs[0])) == [1, 2**70], (
        "an engine with a vocabulary names the token that it refuses"
    )


async def test_a_large_answer_is_written_in_parts_and_others_get_their_turn() -> None:
    """Joined, encoded and written at once, 32 MiB held the event loop for 66 ms."""
    calls = pooled_calls(
        lambda outcomes: LargeEngine(2, 64, WIDTH, outcomes.tell),
        FakeInputs(),
        pooling=Pooling.NONE,
        width=WIDTH,
        longest=64,
    )
    parts: list[bytes] = []
    turns: set[int] = set()
    turn = 0

    async def send(message: AsgiMessage) -> None:
        parts.append(message.get("body", b""))
        turns.add(turn)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    body = msgspec.json.encode(PoolRequest(inputs=("a", "b", "c")))
    scope = {"type": "http", "method": "POST", "path": POOL_PATH, "headers": []}
    response = await PoolRoutes(calls).pool(Request(scope, receiving(body)))
    await response(scope, receiving(body), send)
    counting.cancel()
    result = decode_result(b"".join(parts))
    assert (result.pooling, result.width, result.rows) == ("none", WIDTH, (NUM_ROWS,) * 3)
    numbers = np.frombuffer(result.vectors, dtype="<f4").reshape(3, NUM_ROWS, WIDTH)
    assert np.array_equal(numbers, np.arange(NUM_ROWS * WIDTH).reshape(NUM_ROWS, WIDTH) + np.arange(3)[:, None, None])
    num_bytes = sum(map(len, parts))
    assert max(map(len, parts)) < 256 << 10
    assert len(turns) > num_bytes // (256 << 10)


def receiving(body: bytes) -> Receive:
    """Return what brings a body, and then nothing more."""
    messages: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> AsgiMessage:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    return receive


PICTURE = Medium("picture", b"x", "input.0.content.0")


class Eyes:
    """Reads so many tokens of each picture, and counts the pictures."""

    def __init__(self, num_tokens: int = 4) -> None:
        self.num_tokens = num_tokens
        self.num_read = 0

    def read(self, medium: Medium) -> Seen:
        self.num_read += 1
        return ([7] * self.num_tokens,)


def seeing_calls(eyes: Eyes, engine: type[FakePooledEngine] = FakePooledEngine) -> PooledCalls:
    prompts = Prompts(ChatTemplate(TEMPLATE), FakeVocab(), num_tokens=FakeVocab.num_tokens, media=eyes)
    return pooled_calls(
        lambda outcomes: engine(2, 64, WIDTH, outcomes.tell),
        FakeInputs(),
        pooling=Pooling.MEAN,
        width=WIDTH,
        longest=64,
        prompts=prompts,
    )


async def test_texts_with_media_and_messages_are_inputs_beside_others() -> None:
    eyes = Eyes()
    messages = PoolPrompt(messages=(Message("user", "what", media=(0,)),))
    inputs = ("text", PoolPrompt(text="abcd", media=(0, 4)), (1, 2, 3), messages)
    answer = await seeing_calls(eyes).pool(PoolRequest(inputs=inputs, media=(PICTURE,) * 3))
    text, *_ = answer.head.num_tokens
    assert answer.head.num_tokens[1:3] == (4 + 4 + text, 3), "the pictures count, and what stands between them"
    assert answer.head.num_tokens[3] > 4
    assert (len(answer.vectors), eyes.num_read) == (4, 3)


async def test_places_and_media_must_be_as_many() -> None:
    for inputs in (("text",), (PoolPrompt(text="ab", media=(0, 1)),)):
        with pytest.raises(CallFailed, match="places for 1 pictures") as refused:
            await seeing_calls(Eyes()).pool(PoolRequest(inputs=inputs, media=(PICTURE,)))
        assert refused.value.failure.code is FailureCode.INVALID_REQUEST


async def test_no_more_pictures_are_read_than_fit_an_input() -> None:
    eyes = Eyes(30)
    inputs = (PoolPrompt(text="", media=(0, 0)), PoolPrompt(text="", media=(0,) * 30))
    with pytest.raises(CallFailed) as refused:
        await seeing_calls(eyes).pool(PoolRequest(inputs=inputs, media=(PICTURE,) * 32))
    failure = refused.value.failure
    assert (failure.code, failure.num_prompt_tokens, failure.param) == (
        FailureCode.CONTEXT_OVERFLOW,
        90,
        PICTURE.param,
    )
    assert "input 1" in failure.message
    assert eyes.num_read == 5, "those of the first input fit"


class Data(bytes):
    """Contents of a file that tells when nobody refers to it any more."""

    gone: threading.Event

    def __del__(self) -> None:
        self.gone.set()


class WaitingEngine(FakePooledEngine):
    def submit(self, request: PooledRequest) -> None:
        """Tell nothing."""


async def test_files_are_not_kept_while_their_call_waits() -> None:
    data, gone = Data(b"a picture"), threading.Event()
    data.gone = gone
    calls = seeing_calls(Eyes(), WaitingEngine)
    request = PoolRequest(inputs=(PoolPrompt(text="a", media=(0,)),), media=(Medium("picture", data),))
    waiting = asyncio.create_task(calls.pool(request))
    del data, request
    assert not gone.is_set()
    await until(gone.is_set, 5.0, "they are dropped")
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_documents_with_pictures_are_not_ranked() -> None:
    asked = PoolRequest(kind="rank", query="q", inputs=(PoolPrompt(text="a", media=(0,)),), media=(PICTURE,))
    with pytest.raises(CallFailed, match="must be texts"):
        await calls_of(FakeInputs()).pool(asked)
