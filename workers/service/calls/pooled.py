"""Takes the calls for pooled work (embeddings, ranking): tokenises the inputs, hands them to the engine, and waits for
the whole answer.

Runs on the event loop; `Outcomes.tell` is for the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never, cast

import numpy as np

from workers.chat.prompts import SHORT_CHARS, Patience
from workers.engine.pooled.engine import Outcome, PooledRequest
from workers.engine.pooled.jobs import Vectors
from workers.llama.pooling import Pooling
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import base64_parts, struct_parts
from workers.protocol.pooled import PoolInput, PoolKind, PoolRequest, PoolResult
from workers.protocol.token_arrays import extend, in_array, joined
from workers.service.calls.call_record import ANSWERED, CallRecords
from workers.service.calls.lanes import FairLane
from workers.service.lifecycle import Lifecycle
from workers.service.registration.heartbeat import Rates

MAX_QUERY_CHARS = 8 << 20
"""Maximum of a query's characters times its number of documents, since the query is tokenised with each of them."""


class Inputs(Protocol):
    """Turns texts into tokens, on any thread."""

    def of_text(self, text: str, *, add_special: bool = True) -> Sequence[int]: ...
    def of_pair(self, query: str, document: str) -> Sequence[int]: ...


class Engine(Protocol):
    """The part of an engine that calls need. The outcome of a call goes to `Outcomes.tell`."""

    def submit(self, request: PooledRequest) -> None:
        """Take the call without waiting. Raises CallFailed."""

    def cancel(self, key: int) -> None:
        """End the call before the next step; unknown keys are ignored."""


class Outcomes:
    """Hands outcomes to the calls that wait for them. Build and use it on one event loop, except for `tell`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}

    def tell(self, key: int, outcome: Outcome) -> None:
        """Hand the outcome of a call to the event loop; called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self.settle, key, outcome)

    def settle(self, key: int, outcome: Outcome) -> None:
        """Set the outcome of a call that still waits for it."""
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_result(outcome)

    def expect(self, key: int) -> asyncio.Future[Outcome]:
        future = self._waiting[key] = self._loop.create_future()
        return future

    def forget(self, key: int) -> None:
        del self._waiting[key]

    @property
    def keys(self) -> list[int]:
        return list(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """The answer to a call. The vectors are not copied: they stay in the engine's arrays until they are written."""

    head: PoolResult
    """The result without the vectors."""
    vectors: tuple[Vectors, ...]
    """For each input, its vectors: an array of shape [rows, width]."""

    def parts(self) -> Iterator[bytes]:
        """Yield the `PoolResult` as JSON in parts: encoding 32 MiB in one piece blocked the event loop for 66 ms."""
        buffers = (np.ascontiguousarray(one, dtype="<f4").reshape(-1).view(np.uint8).data for one in self.vectors)
        return struct_parts(self.head, {"vectors": base64_parts(buffers)})


def kind_of(pooling: Pooling) -> PoolKind:
    """Return the kind of work that a worker with this pooling does."""
    return "rank" if pooling is Pooling.RANK else "embed"


class PooledCalls:
    """All calls of a worker that does pooled work."""

    def __init__(
        self,
        outcomes: Outcomes,
        engine: Engine,
        inputs: Inputs,
        life: Lifecycle,
        metrics: WorkerMetrics,
        records: CallRecords,
        lane: FairLane,
        *,
        pooling: Pooling,
        width: int,
        longest: int,
    ) -> None:
        """`outcomes` must be where `engine` reports its outcomes. `lane`: threads on which long inputs are tokenised.

        `width`: how many numbers a vector has. `longest`: maximum tokens of one input that the engine takes."""
        self.kind: PoolKind = kind_of(pooling)
        self.idle = asyncio.Event()
        """Set while there is no call."""
        self.idle.set()
        self.rates = Rates()
        """Averages over past calls, from which gateways predict how long a call would wait."""
        self._outcomes = outcomes
        self._engine = engine
        self._inputs = inputs
        self._life = life
        self._metrics = metrics
        self._records = records
        self._lane = lane
        self._pooling = pooling
        self._width = width
        self._longest = longest
        self._keys = itertools.count(1)

    @property
    def num_calls(self) -> int:
        return len(self._outcomes)

    async def pool(self, request: PoolRequest) -> PooledAnswer:
        """Return the whole answer. Raises CallFailed. Cancelling ends the call before the engine's next step."""
        if self._life.draining:
            raise CallFailed(Failure(FailureCode.DRAINING, "this worker is stopping and takes no new calls"))
        self._check(request)
        record = self._records.begin(self.kind, request.request_id, request.traceparent, request.tracestate)
        key = next(self._keys)
        future = self._outcomes.expect(key)
        self.idle.clear()
        told = False
        try:
            tokens = await self._tokens(key, request)
            if not future.done():
                asked = PooledRequest(key, tokens, request.normalize, request.request_id, request.tenant)
                self._engine.submit(asked)
            outcome = await future
            told = True
            record.num_prompt_tokens = sum(map(len, tokens))
            record.outcome = outcome.code.value if isinstance(outcome, Failure) else ANSWERED
        except CallFailed as refused:
            record.outcome = refused.failure.code.value
            raise
        finally:
            self._records.end(record)
            self._outcomes.forget(key)
            if not len(self._outcomes):
                self.idle.set()
            if not told:
                self._engine.cancel(key)
        if isinstance(outcome, Failure):
            raise CallFailed(outcome)
        num_tokens = tuple(map(len, tokens))
        self._metrics.pooled(sum(num_tokens), time.monotonic() - record.began_at)
        self.rates.held(record.began_at)
        rows = tuple(map(len, outcome))
        pooling = self._pooling.name.lower()
        head = PoolResult(pooling=pooling, width=self._width, rows=rows, num_tokens=num_tokens, vectors=b"")
        return PooledAnswer(head, outcome)

    def end_all(self, why: Callable[[], Failure]) -> None:
        """End every call, because the engine is gone or the time to drain is up. `why` makes each call's failure."""
        for key in self._outcomes.keys:
            self._outcomes.settle(key, why())
            self._engine.cancel(key)

    def _check(self, request: PoolRequest) -> None:
        if request.kind != self.kind:
            raise CallFailed(other_kind(self.kind))
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
        # Count the parts first: if there are many, counting their characters takes long as well.
        if _num_parts(request) <= SHORT_CHARS and _num_chars(request) <= SHORT_CHARS:
            return self._tokenized(key, request)
        return await self._lane.run(request.tenant, 0, self._tokenized, key, request)

    def _tokenized(self, key: int, request: PoolRequest) -> list[Sequence[int]]:
        """Return the tokens of each input. Stop after an input that is too long, since the engine will refuse the call:
        a query of megabytes would be tokenised in vain with each further document. Stop also if the call is over."""
        tokens: list[Sequence[int]] = []
        patience = Patience(_num_chars(request))
        for one in request.inputs:
            if key not in self._outcomes:
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
        """Return the tokens of an input of texts and token ids, or so many that the engine will refuse the input.

        Only a text that comes first gets special tokens."""
        if not any(isinstance(part, str) for part in parts):
            ids = cast("Sequence[int]", parts)
            if len(ids) > self._longest:
                return ids
            try:
                return in_array(ids)  # a list would be walked once more on the event loop, id by id
            except OverflowError:  # the engine refuses an id that no vocabulary has
                return ids
        tokens = joined()
        for number, part in enumerate(parts):
            if len(tokens) > self._longest:
                break
            if isinstance(part, str):
                extend(tokens, self._inputs.of_text(part, add_special=number == 0))
                continue
            try:
                tokens.append(part)
            except OverflowError:
                return [*tokens, part]
        return tokens


def no_pooled_work() -> Failure:
    """Return the refusal of pooled work by a worker that generates text."""
    return Failure(
        FailureCode.UNSUPPORTED,
        "this model is served for generating text; for embeddings serve it with `embeddings: true` in its `llama` "
        "settings, for ranking serve a reranker",
    )


def other_kind(kind: PoolKind) -> Failure:
    """Return the refusal of any other work, for a worker that does only `kind`."""
    match kind:
        case "embed":
            message = "this model is served for embeddings only; ask another model, or serve it without `embeddings`"
        case "rank":
            message = "this model is served for ranking documents only; ask another model, or set another `pooling`"
        case _:
            assert_never(kind)
    return Failure(FailureCode.UNSUPPORTED, message, "model")


def _num_chars(request: PoolRequest) -> int:
    """Return the number of characters that are tokenised; the query counts once for each document."""
    query = len(request.query or "")
    return sum(query + _chars_of(one) for one in request.inputs)


def _num_parts(request: PoolRequest) -> int:
    """Return the number of elements (token ids and texts) of those inputs that are lists; plain texts add none."""
    return sum(len(one) for one in request.inputs if not isinstance(one, str))


def _chars_of(one: PoolInput) -> int:
    return len(one) if isinstance(one, str) else sum(len(part) for part in one if isinstance(part, str))


def _invalid(message: str, param: str) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, message, param)
