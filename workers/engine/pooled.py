"""The engine for pooled work: one thread that owns a llama.cpp context and reads inputs one micro-batch at a time.

A step takes mail, plans, computes, collects and tells. With nothing to do the thread sleeps on its mailbox.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from workers.engine.cache import IntegrityError
from workers.engine.counters import DECODE_BOUNDS_S, EngineCounters, Tally
from workers.engine.pooled_job import NO_SEQUENCE, Job, PooledRequest
from workers.engine.pooled_plan import Part, Room, plan_batch
from workers.engine.request import EngineLoad
from workers.engine.vectors import Vectors
from workers.engine.watchdog import Watchdog
from workers.llama.pooling import PooledContext, Pooling
from workers.protocol.failures import CallFailed, Failure, FailureCode

__all__ = ["Outcome", "PooledEngine", "PooledRequest", "Tell"]

log = logging.getLogger("paddock.engine")

MIN_WAITING_ROOM = 4

MAX_RESULT_BYTES = 64 << 20
"""Of one answer, before it is encoded."""

Outcome = tuple[Vectors, ...] | Failure
"""Vectors [rows, width] of each input, in order; or why there are none."""

Tell = Callable[[int, Outcome], None]


class PooledEngine:
    """Serves every call that is in at once, in turns; takes `slots` of them and as many more (at least
    `MIN_WAITING_ROOM`).

    `submit`, `cancel`, `drain` and `load` may be called from any thread and do not block. `tell(key, outcome)` is
    called on the engine thread, once per call that is not cancelled; it must be quick and must not raise.
    """

    def __init__(
        self,
        context: PooledContext,
        *,
        slots: int,
        tell: Tell,
        on_crash: Callable[[BaseException], None] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`on_crash` is called on the engine thread."""
        self.slots = slots
        self.n_ctx = context.longest
        """Tokens in one input."""
        self.crashed: BaseException | None = None
        """What ended the loop, if it did not end as asked."""
        self._context = context
        self._tell = tell
        self._on_crash = on_crash
        self._watchdog = watchdog or Watchdog()
        self._capacity = slots + max(slots, MIN_WAITING_ROOM)
        self._batch = context.new_batch()
        # Taken from the end.
        self._free = list(range(context.num_sequences - 1, -1, -1))
        self._jobs: list[Job] = []
        self._num_computed = 0
        self._num_busy = 0
        self._compute_s = Tally(DECODE_BOUNDS_S)
        self._stopping = False
        # The mailbox: acts to carry out on the engine thread.
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        # Guards what `submit` decides on: the calls that are alive, and whether more are taken.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._refusal: Failure | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: PooledRequest) -> None:
        """Take the call. Raises CallFailed: INVALID_REQUEST, CONTEXT_OVERFLOW, BUSY, DRAINING, INTERNAL (crashed)."""
        check_inputs(self._context, request.inputs)
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if request.key in self._open:
                raise ValueError(f"call {request.key} is already in the engine")
            if len(self._open) >= self._capacity:
                raise CallFailed(_busy(self._capacity))
            self._open.add(request.key)
            self._mail.append(partial(self._enter, Job(request)))
        self._wake.set()

    def cancel(self, key: int) -> None:
        """End the call before the next step; nothing more is told of it. Unknown keys are ignored."""
        self._mail.append(partial(self._drop, key))
        self._wake.set()

    def load(self) -> EngineLoad:
        """A snapshot; the step that runs meanwhile may change it."""
        with self._lock:
            num_open = len(self._open)
        jobs = list(self._jobs)
        used = sum(job.offset for job in jobs) if self._context.memory is not None else 0
        busy = min(num_open, self.slots)
        return EngineLoad(self.slots, busy, num_open - busy, self._context.kv_tokens, used)

    @property
    def counters(self) -> EngineCounters:
        """A snapshot, as `load`."""
        return EngineCounters(
            num_decodes=self._num_computed, num_busy=self._num_busy, decode_s=self._compute_s.distribution
        )

    def drain(self) -> None:
        """Refuse new calls with DRAINING; those that are in go on."""
        with self._lock:
            self._refusal = self._refusal or _DRAINING

    def stop(self) -> None:
        """End the loop after the running step and join the thread. Calls that are still in end as DRAINING."""
        self.drain()
        self._mail.append(self._halt)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._end_all()

    def check_integrity(self) -> None:
        """Compare the book of sequences with llama.cpp's. Raises IntegrityError. Waits for the running step."""
        if not self._thread.is_alive():
            self._check()
            return
        result: Future[None] = Future()
        self._mail.append(partial(_answer, result, self._check))
        self._wake.set()
        result.result(timeout=60)

    # On the engine thread.

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._step()
                if not self._jobs:
                    self._rest()
        except BaseException as error:
            # The loop's edge: the process must learn that its engine is dead.
            log.exception("the engine's loop died")
            self.crashed = error
            with self._lock:
                self._refusal = _CRASHED
        try:
            self._end_all()
        finally:
            if self.crashed is not None and self._on_crash is not None:
                self._on_crash(self.crashed)

    def _step(self) -> None:
        self._take_mail()
        parts = plan_batch(self._jobs, self._room())
        if parts:
            self._watchdog.step_began()
            self._run(parts)
            self._watchdog.step_ended()
            self._tell_ended()

    def _take_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _room(self) -> Room:
        context = self._context
        cells = math.inf
        if context.memory is not None:
            cells = context.kv_tokens - sum(job.num_cells for job in self._jobs)
        return Room(context.n_ubatch, len(self._free), cells, context.can_split)

    def _run(self, parts: list[Part[Job]]) -> None:
        context, batch = self._context, self._batch
        batch.clear()
        placed = []
        for part in parts:
            job = part.job
            sequence = job.sequence if part.start else self._free.pop()
            row = batch.add_input(job.inputs[part.index][part.start : part.end], part.start, sequence)
            placed.append((part, sequence, row))
        start = time.perf_counter()
        context.compute(batch)
        self._compute_s.add(time.perf_counter() - start)
        self._num_computed += 1
        self._num_busy += min(len(self._jobs), self.slots)
        for part, sequence, row in placed:
            if context.pooling is Pooling.NONE:
                vectors = context.rows(row, row + part.end - part.start)
            else:
                vectors = context.vector(sequence)
            part.job.take(part, vectors, context.pooling)
            part.job.sequence = NO_SEQUENCE if part.is_last else sequence
            if part.is_last:
                self._release(sequence)

    def _tell_ended(self) -> None:
        for job in [job for job in self._jobs if job.index == len(job.lengths)]:
            self._forget(job)
            wrong = [number for number, vectors in enumerate(job.results) if not np.isfinite(vectors).all()]
            self._tell(job.key, _not_numbers(wrong[0]) if wrong else tuple(job.results))

    def _rest(self) -> None:
        """Nothing is to do: check the books, then sleep until there is mail."""
        if not self._mail:
            self._check()
        while not (self._mail or self._stopping):
            self._wake.wait()
            self._wake.clear()

    def _enter(self, job: Job) -> None:
        job.served = min((other.served for other in self._jobs), default=0)
        self._jobs.append(job)
        self._watchdog.black_box.began(job.key, job.label)

    def _drop(self, key: int) -> None:
        for job in self._jobs:
            if job.key == key:
                self._forget(job)
                return

    def _forget(self, job: Job) -> None:
        """Give back everything that the call holds."""
        if job.sequence != NO_SEQUENCE:
            self._release(job.sequence)
            job.sequence = NO_SEQUENCE
        self._jobs.remove(job)
        self._watchdog.black_box.ended(job.key)
        with self._lock:
            self._open.discard(job.key)

    def _release(self, sequence: int) -> None:
        if self._context.memory is not None:
            self._context.memory.remove(sequence)
        self._free.append(sequence)

    def _halt(self) -> None:
        self._stopping = True

    def _check(self) -> None:
        held = {job.sequence: job.offset for job in self._jobs if job.sequence != NO_SEQUENCE}
        if sorted([*self._free, *held]) != list(range(self._context.num_sequences)):
            raise IntegrityError(f"sequences are lost or held twice: {len(self._free)} free, held {sorted(held)}")
        if len(self._jobs) > len(self._open):
            raise IntegrityError(f"{len(self._jobs)} calls are served, {len(self._open)} are open")
        memory = self._context.memory
        if memory is None:
            return
        for sequence in range(self._context.num_sequences):
            cells, last = held.get(sequence, 0), memory.last_position(sequence)
            if last != cells - 1:
                raise IntegrityError(f"sequence {sequence}: {cells} cells by the book, last position {last}")

    def _end_all(self) -> None:
        """The loop is over: end every call that is still in."""
        self._take_mail()
        for job in list(self._jobs):
            self._forget(job)
            self._tell(job.key, self._refusal or _CRASHED)


def check_inputs(context: PooledContext, inputs: Sequence[Sequence[int]]) -> None:
    """Whether the context can read them, and one answer hold what comes of them. Raises CallFailed."""
    if not inputs:
        raise CallFailed(_invalid("there is no input; send at least one"))
    n_vocab = context.model.vocab.num_tokens
    for number, tokens in enumerate(inputs):
        if not tokens:
            raise CallFailed(_invalid(f"input {number} has no tokens; send some text"))
        if len(tokens) > context.longest:
            raise CallFailed(_overflow(number, len(tokens), context))
        if min(tokens) < 0 or max(tokens) >= n_vocab:
            wrong = next(token for token in tokens if not 0 <= token < n_vocab)
            raise CallFailed(_invalid(f"input {number} has token {wrong}; this model has tokens 0 to {n_vocab - 1}"))
    num_rows = sum(map(len, inputs)) if context.pooling is Pooling.NONE else len(inputs)
    size = num_rows * context.width * 4
    if size > MAX_RESULT_BYTES:
        raise CallFailed(
            _invalid(
                f"the answer would have {num_rows} vectors of {context.width} numbers, {size:,} bytes, and may have "
                f"{MAX_RESULT_BYTES:,}; send fewer inputs at a time"
            )
        )


_DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
_CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")


def _answer(result: Future[None], act: Callable[[], None]) -> None:
    try:
        act()
    except IntegrityError as error:
        result.set_exception(error)
    else:
        result.set_result(None)


def _invalid(message: str) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, message, "input")


def _overflow(number: int, num_tokens: int, context: PooledContext) -> Failure:
    remedy = "shorten it"
    if context.longest < context.n_ctx:
        remedy += f" or raise n_ubatch ({context.n_ubatch}) in the model's `llama` settings"
    elif context.n_ctx < context.model.facts.n_ctx_train:
        remedy += " or serve the model with a larger --ctx"
    message = f"input {number} has {num_tokens} tokens and this model reads {context.longest} at once; {remedy}"
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, "input")


def _busy(capacity: int) -> Failure:
    return Failure(
        FailureCode.BUSY, f"all {capacity} places for calls are taken; ask again, or serve with more --slots"
    )


def _not_numbers(number: int) -> Failure:
    message = f"the model computed values that are not numbers for input {number}; try a model file of higher precision"
    return Failure(FailureCode.INTERNAL, message)
