"""Takes the calls for pooled work (embeddings, ranking): reads pictures and sounds, tokenises the inputs, hands them to
the engine, and waits for the whole answer.

Runs on the event loop; `Outcomes.tell` is for the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
from msgspec.structs import replace

from workers.engine.pooled.engine import Outcome, PooledRequest
from workers.engine.pooled.jobs import Vectors
from workers.llama.pooling import Pooling
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import base64_parts, struct_parts
from workers.protocol.pooled import PoolKind, PoolPrompt, PoolRequest, PoolResult
from workers.service.calls.call_record import ANSWERED, CallRecords
from workers.service.calls.pooled_inputs import PooledReader
from workers.service.lifecycle import Lifecycle
from workers.service.registration.heartbeat import Rates

MAX_QUERY_CHARS = 8 << 20
"""Maximum of a query's characters times its number of documents, since the query is tokenised with each of them."""


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
        reader: PooledReader,
        life: Lifecycle,
        metrics: WorkerMetrics,
        records: CallRecords,
        *,
        pooling: Pooling,
        width: int,
    ) -> None:
        """`outcomes` must be where `engine` reports its outcomes. `width`: how many numbers a vector has."""
        self.kind: PoolKind = kind_of(pooling)
        self.idle = asyncio.Event()
        """Set while there is no call."""
        self.idle.set()
        self.rates = Rates()
        """Averages over past calls, from which gateways predict how long a call would wait."""
        self._outcomes = outcomes
        self._engine = engine
        self._reader = reader
        self._life = life
        self._metrics = metrics
        self._records = records
        self._pooling = pooling
        self._width = width
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
            tokens = await self._reader.read(request, lambda: key not in self._outcomes)
            request = replace(request, media=())  # some megabytes, which nobody needs any more
            num_tokens = tuple(map(len, tokens))
            if not future.done():
                asked = PooledRequest(
                    key, tokens, request.normalize, request.request_id, request.tenant, request.cache_salt
                )
                self._engine.submit(asked)
                del asked
            del tokens  # with pixels, some megabytes, which the engine gives back as it goes
            outcome = await future
            told = True
            record.num_prompt_tokens = sum(num_tokens)
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
        num_places = sum(one.num_media for one in request.inputs if isinstance(one, PoolPrompt))
        if num_places != len(request.media):
            message = f"there are {num_places} places for {len(request.media)} pictures and sounds; send as many"
            raise CallFailed(_invalid(message, "input"))
        if request.kind == "rank":
            if request.query is None:
                raise CallFailed(_invalid("`query` is missing; say what the documents are ranked against", "query"))
            if not all(isinstance(document, str) for document in request.inputs):
                raise CallFailed(_invalid("documents to rank must be texts, not token ids, messages or media", "input"))
            if len(request.query) * len(request.inputs) > MAX_QUERY_CHARS:
                message = f"`query` has {len(request.query)} characters and is read with each of {len(request.inputs)} "
                message += f"documents; at most {MAX_QUERY_CHARS} in all may be; send fewer documents at a time"
                raise CallFailed(_invalid(message, "query"))


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


def _invalid(message: str, param: str) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, message, param)
