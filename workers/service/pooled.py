"""The desk for pooled work: tokenises the inputs, hands them to the engine, and waits for the whole answer.

Runs on the event loop; `tell` is for the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np

from workers.chat.prompts import SHORT_CHARS
from workers.engine.counters import EngineCounters
from workers.engine.pooled import Outcome, PooledRequest
from workers.engine.request import EngineLoad, EngineRequest
from workers.engine.vectors import Vectors
from workers.llama.pooling import Pooling
from workers.patience import Patience
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.json_parts import base64_parts, struct_parts
from workers.protocol.pooled import PoolInput, PoolKind, PoolRequest, PoolResult
from workers.service.call_story import ANSWERED, Stories
from workers.service.lanes import FairLane, prompt_lane

MAX_QUERY_CHARS = 8 << 20
"""Most characters of a query times the number of documents: it is tokenised again with each of them."""


class Inputs(Protocol):
    """Turns texts into tokens, on any thread."""

    def of_text(self, text: str, *, add_special: bool = True) -> Sequence[int]: ...
    def of_pair(self, query: str, document: str) -> Sequence[int]: ...


class Engine(Protocol):
    """The engine, as the desk needs it; the outcome of a call goes to `PooledDesk.tell`."""

    def submit(self, request: PooledRequest) -> None:
        """Take the call, without waiting. Raises CallFailed."""

    def cancel(self, key: int) -> None:
        """End the call before the next step; unknown keys are ignored."""


class WholeEngine(Engine, Protocol):
    """An engine for pooled work as its process sees it."""

    @property
    def n_ctx(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def counters(self) -> EngineCounters: ...
    def load(self) -> EngineLoad: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """The answer to a call. Its vectors stay where the engine has put them until they are written."""

    head: PoolResult
    """The result without the vectors."""
    vectors: tuple[Vectors, ...]
    """Vectors of each input."""

    def parts(self) -> Iterator[bytes]:
        """Yield the `PoolResult` as JSON in parts: in one piece 32 MiB held the event loop for 66 ms."""
        buffers = (np.ascontiguousarray(one, dtype="<f4").reshape(-1).view(np.uint8).data for one in self.vectors)
        return struct_parts(self.head, {"vectors": base64_parts(buffers)})


class PooledDesk:
    """All calls of a worker that does pooled work. Build it on the running loop, and connect its engine."""

    def __init__(self, inputs: Inputs, *, pooling: Pooling, width: int, lane: FairLane | None = None) -> None:
        """`lane`: threads on which long inputs are tokenised; None: the desk makes its own."""
        self.kind: PoolKind = "rank" if pooling is Pooling.RANK else "embed"
        self.draining = False
        self.idle = asyncio.Event()
        """Set while there is no call."""
        self.idle.set()
        self._inputs = inputs
        self._pooling = pooling
        self._width = width
        self._loop = asyncio.get_running_loop()
        self._lane = lane or prompt_lane()
        self._engine: Engine | None = None
        self._longest = 0
        """Most tokens of one input that the engine takes."""
        self._observe: Callable[[int, float], None] = _ignore
        self._stories = Stories()
        self._keys = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Outcome]] = {}

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def connect(self, engine: WholeEngine) -> TextRefused:
        """Connect the engine; return it as the rest of the process sees it."""
        self._engine, self._longest = engine, engine.n_ctx
        return TextRefused(engine, self.kind)

    def follow(self, observe: Callable[[int, float], None], stories: Stories) -> None:
        """Have `observe(num_tokens, seconds)` called for every answered call, and calls recorded in `stories`."""
        self._observe, self._stories = observe, stories

    async def pool(self, request: PoolRequest) -> PooledAnswer:
        """Return the whole answer. Raises CallFailed. Cancelling ends the call before the engine's next step."""
        if self.draining or self._engine is None:
            raise CallFailed(Failure(FailureCode.DRAINING, "this worker is stopping and takes no new calls"))
        self._check(request)
        story = self._stories.begin(self.kind, request.request_id, request.traceparent, request.tracestate)
        key = next(self._keys)
        future = self._calls[key] = self._loop.create_future()
        self.idle.clear()
        told = False
        try:
            tokens = await self._tokens(key, request)
            if not future.done():
                asked = PooledRequest(key, tokens, request.normalize, request.request_id, request.tenant)
                self._engine.submit(asked)
            outcome = await future
            told = True
            story.num_prompt_tokens = sum(map(len, tokens))
            story.outcome = outcome.code.value if isinstance(outcome, Failure) else ANSWERED
        except CallFailed as refused:
            story.outcome = refused.failure.code.value
            raise
        finally:
            self._stories.end(story)
            del self._calls[key]
            if not self._calls:
                self.idle.set()
            if not told:
                self._engine.cancel(key)
        if isinstance(outcome, Failure):
            raise CallFailed(outcome)
        num_tokens = tuple(map(len, tokens))
        self._observe(sum(num_tokens), time.monotonic() - story.began_at)
        rows = tuple(map(len, outcome))
        pooling = self._pooling.name.lower()
        head = PoolResult(pooling=pooling, width=self._width, rows=rows, num_tokens=num_tokens, vectors=b"")
        return PooledAnswer(head, outcome)

    def tell(self, key: int, outcome: Outcome) -> None:
        """Take the outcome of a call; for the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, key, outcome)

    def fail_all(self, failure: Failure) -> None:
        """End every call: the engine is gone or the time to drain is up."""
        for key in list(self._calls):
            self._deliver(key, failure)
            if self._engine is not None:
                self._engine.cancel(key)

    def _deliver(self, key: int, outcome: Outcome) -> None:
        future = self._calls.get(key)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _check(self, request: PoolRequest) -> None:
        if request.kind != self.kind:
            raise CallFailed(_other_kind(self.kind))
        if request.normalize < -1:
            raise CallFailed(_invalid(f"`normalize` is {request.normalize}; use -1 or more", "normalize"))
        if request.kind == "rank":
            if request.query is None:
                raise CallFailed(_invalid("`query` is missing; say what the documents are ranked against", "query"))
            if not all(isinstance(document, str) for document in request.inputs):
                raise CallFailed(_invalid("documents to rank must be texts, not token ids", "input"))
            if len(request.query) * len(request.inputs) > MAX_QUERY_CHARS:
                message = f"`query` has {len(request.query)} characters and is read with each of {len(request.inputs)} "
                message += f"documents; at most {MAX_QUERY_CHARS} in all may be; send fewer documents at a time"
                raise CallFailed(_invalid(message, "query"))

    async def _tokens(self, key: int, request: PoolRequest) -> list[Sequence[int]]:
        if _num_chars(request) <= SHORT_CHARS:
            return self._tokenized(key, request)
        return await self._lane.run(request.tenant, 0, self._tokenized, key, request)

    def _tokenized(self, key: int, request: PoolRequest) -> list[Sequence[int]]:
        """Return the inputs' tokens, but no more after an input that is too long, for which the engine refuses the
        call: a query of megabytes would be read again with each document. Stop also once nobody waits.
        """
        tokens: list[Sequence[int]] = []
        patience = Patience(_num_chars(request))
        for one in request.inputs:
            if key not in self._calls:
                break
            patience.check()
            if not isinstance(one, str):
                tokens.append(self._in_turn(one))
            elif request.query is not None and request.kind == "rank":
                tokens.append(self._inputs.of_pair(request.query, one))
            else:
                tokens.append(self._inputs.of_text(one))
            if len(tokens[-1]) > self._longest:
                break
        return tokens

    def _in_turn(self, parts: Sequence[int | str]) -> Sequence[int]:
        """Return texts and tokens in turn as tokens; only a text that is the first part gets the special tokens."""
        if str not in set(map(type, parts)):
            return [part for part in parts if isinstance(part, int)]
        tokens: list[int] = []
        for number, part in enumerate(parts):
            if isinstance(part, str):
                tokens += self._inputs.of_text(part, add_special=number == 0)
            else:
                tokens.append(part)
        return tokens


class TextRefused:
    """A pooled engine in the place of one that generates text: it refuses such calls."""

    def __init__(self, engine: WholeEngine, kind: PoolKind) -> None:
        self._engine = engine
        self._kind: PoolKind = kind
        self.start, self.stop, self.load = engine.start, engine.stop, engine.load

    @property
    def n_ctx(self) -> int:
        return self._engine.n_ctx

    @property
    def slots(self) -> int:
        return self._engine.slots

    @property
    def counters(self) -> EngineCounters:
        return self._engine.counters

    def retire(self) -> None:
        """Do nothing: no cache is kept between calls that others could go on with."""

    def submit(self, request: EngineRequest) -> None:
        """Raise CallFailed: UNSUPPORTED."""
        raise CallFailed(_other_kind(self._kind))

    def cancel(self, key: int) -> None:
        """Do nothing: there is no such call."""


def no_pooled_work() -> Failure:
    """Return the refusal of pooled work by a worker that generates text."""
    return Failure(
        FailureCode.UNSUPPORTED,
        "this model is served for generating text; for embeddings serve it with `embeddings: true` in its `llama` "
        "settings, for ranking serve a reranker",
    )


def _other_kind(kind: PoolKind) -> Failure:
    match kind:
        case "embed":
            message = "this model is served for embeddings only; ask another model, or serve it without `embeddings`"
        case "rank":
            message = "this model is served for ranking documents only; ask another model, or set another `pooling`"
        case _:
            assert_never(kind)
    return Failure(FailureCode.UNSUPPORTED, message, "model")


def _num_chars(request: PoolRequest) -> int:
    """Return the characters of all that is tokenised; the query counts with each document."""
    query = len(request.query or "")
    return sum(query + _chars_of(one) for one in request.inputs)


def _chars_of(one: PoolInput) -> int:
    return len(one) if isinstance(one, str) else sum(len(part) for part in one if isinstance(part, str))


def _invalid(message: str, param: str) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, message, param)


def _ignore(num_tokens: int, seconds: float) -> None:
    """Do nothing: nobody follows the desk yet."""
