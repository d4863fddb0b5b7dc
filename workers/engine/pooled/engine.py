"""The engine for pooled work (embeddings, scores): reads inputs on one llama.cpp context, one micro-batch at a time.

A step plans, computes, collects and reports. Its thread and mailbox are in `workers.engine.thread`; pictures and sounds
in inputs are in `workers.engine.pooled.media`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from workers.engine.counters import EngineCounters, Tally
from workers.engine.encoder import MediaEncoder
from workers.engine.pooled.input_checks import check_inputs
from workers.engine.pooled.jobs import (
    NO_SEQUENCE,
    Job,
    Part,
    PooledRequest,
    Room,
    Vectors,
    plan_batch,
)
from workers.engine.pooled.media import PooledMedia, Rows
from workers.engine.request import EngineLoad, Intake, IntegrityError
from workers.engine.step.shares import overdraft_of
from workers.engine.thread import EngineThread, Work
from workers.engine.watchdog import Watchdog
from workers.llama.pooling import PooledContext, Pooling
from workers.metrics.types import DECODE_S
from workers.protocol.events import CallFailed, Failure, FailureCode

__all__ = ["Outcome", "PooledEngine", "PooledRequest", "Tell"]

NO_POSITION = -1
"""Last position of a sequence without cells."""

Outcome = tuple[Vectors, ...] | Failure
"""The vectors [rows, width] of each input, in order; or why there are none."""

Tell = Callable[[int, Outcome], None]


class PooledEngine:
    """Computes all admitted calls side by side, with teams in turn; admits `slots` calls and some more (`Intake`).

    `submit`, `cancel`, `drain` and `load` may be called from any thread and do not block. `tell(key, outcome)` is
    called on the engine thread, once per call that is not cancelled; it must be quick and must not raise."""

    def __init__(
        self,
        context: PooledContext,
        *,
        slots: int,
        tell: Tell,
        on_crash: Callable[[BaseException], None] | None = None,
        watchdog: Watchdog | None = None,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """`on_crash` is called on the engine thread. `encoder`: makes embeddings of pictures and sounds, for a context
        that can split inputs; None: inputs are text only. The caller stops it after the engine."""
        self.slots = slots
        self.n_ctx = context.longest
        """Maximum tokens of one input."""
        self._context = context
        self._tell = tell
        watchdog = watchdog or Watchdog()
        self._black_box = watchdog.black_box
        self._intake = Intake(slots, beyond=overdraft_of(slots))
        self._thread = EngineThread(
            Work(self._step, self._rest, self._end_all, self._check), self._intake, watchdog, on_crash
        )
        self._batch = context.new_batch()
        self._encoder = encoder
        self._media = None if encoder is None else PooledMedia(encoder, context, self._thread.wake)
        # Ids are taken from the end.
        self._free = list(range(context.num_sequences - 1, -1, -1))
        self._jobs: list[Job] = []
        self._num_computed = 0
        self._num_busy = 0
        self._compute_s = Tally(DECODE_S)

    # Any thread may call these.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: PooledRequest) -> None:
        """Take a call. Raises CallFailed: INVALID_REQUEST, CONTEXT_OVERFLOW, BUSY, DRAINING, INTERNAL (crashed)."""
        check_inputs(self._context, request.inputs, takes_media=self._media is not None)
        self._intake.enter(request.key)
        if not self._intake.hand_over(request.key, partial(self._thread.post, partial(self._enter, Job(request)))):
            self._intake.leave(request.key)
            if self._intake.is_over:
                raise CallFailed(self._intake.refusal)

    def cancel(self, key: int) -> None:
        """End the call before the next step, without an outcome. Unknown keys are ignored."""
        self._intake.cancel(key, partial(self._thread.post, partial(self._drop, key)))

    @property
    def crashed(self) -> BaseException | None:
        """Return the error that ended the engine's loop; None: the loop runs, or was stopped."""
        return self._thread.crashed

    def load(self) -> EngineLoad:
        """Return a snapshot of the load; a step that runs meanwhile may change some numbers."""
        num_open = self._intake.num_open
        jobs = list(self._jobs)
        used = sum(job.offset for job in jobs) if self._context.memory is not None else 0
        busy = min(num_open, self.slots)
        kv_tokens, overdraft = self._context.kv_tokens, overdraft_of(self.slots)
        encode_s = 0.0 if self._encoder is None else self._encoder.cell_s
        return EngineLoad(self.slots, busy, num_open - busy, kv_tokens, used, overdraft=overdraft, encode_s=encode_s)

    @property
    def counters(self) -> EngineCounters:
        """Return a snapshot of the counters, as `load` does."""
        return EngineCounters(
            num_decodes=self._num_computed, num_busy=self._num_busy, decode_s=self._compute_s.distribution
        )

    def drain(self) -> None:
        """Refuse new calls with DRAINING; admitted calls go on."""
        self._intake.drain()

    def stop(self) -> None:
        """End the loop after the running step and join the thread. Unfinished calls end as DRAINING."""
        self._thread.stop()

    def check_integrity(self) -> None:
        """Compare the cells noted for sequences with llama.cpp's. Raises IntegrityError. Waits for the running step."""
        self._thread.check()

    # The engine thread calls these.

    def _step(self) -> bool:
        self._look_at_media()
        parts = plan_batch(self._jobs, self._room())
        if not parts:
            return False  # all that is left waits for embeddings, which wake the thread
        self._run(parts)
        self._tell_ended()
        return bool(self._jobs)

    def _look_at_media(self) -> None:
        """Have embeddings of pictures and sounds made, and end calls of which some can't be had."""
        if self._media is None:
            return
        for job in [job for job in self._jobs if job.media]:
            self._media.want(job.media, job.account.team, job.salt)
            failure = next((why for one in job.media.values() if (why := one.failure) is not None), None)
            if failure is not None:
                self._forget(job)
                if job.key not in self._intake.take_cancelled():
                    self._tell(job.key, replace(failure, param="input") if failure.param else failure)

    def _room(self) -> Room:
        context = self._context
        cells = math.inf
        if context.memory is not None:
            cells = context.kv_tokens - sum(job.num_cells for job in self._jobs)
        return Room(context.n_ubatch, len(self._free), cells, context.can_split)

    def _run(self, parts: list[Part[Job]]) -> None:
        context = self._context
        placed = [(part, part.job.sequence if part.start else self._free.pop()) for part in parts]
        start = time.perf_counter()
        rows = self._compute(placed)
        self._compute_s.add(time.perf_counter() - start)
        self._num_computed += 1
        self._num_busy += min(len(self._jobs), self.slots)
        for (part, sequence), row in zip(placed, rows, strict=True):
            if context.pooling is Pooling.NONE:
                vectors = context.rows(row, row + part.end - part.start)
            else:
                vectors = context.vector(sequence)
            part.job.take(part, vectors, context.pooling)
            part.job.sequence = NO_SEQUENCE if part.is_last else sequence
            if part.is_last:
                self._release(sequence)

    def _compute(self, placed: list[tuple[Part[Job], int]]) -> Sequence[int]:
        """Compute parts of one kind, each under its sequence. Return the first row of each. Raises DecodeFailed."""
        if self._media is not None and placed[0][0].kind is not Rows.TOKENS:
            return self._media.compute((part.job.media[part.index], part, sequence) for part, sequence in placed)
        batch = self._batch
        batch.clear()
        rows: list[int] = []
        for part, sequence in placed:
            tokens = part.job.inputs[part.index][part.start : part.end]
            rows.append(batch.add_input(tokens, part.job.position(part), sequence))
        self._context.compute(batch)
        return rows

    def _tell_ended(self) -> None:
        ended = [job for job in self._jobs if job.index == len(job.lengths)]
        cancelled = self._intake.take_cancelled()
        for job in ended:
            self._forget(job)
            wrong = [number for number, vectors in enumerate(job.results) if not np.isfinite(vectors).all()]
            if job.key not in cancelled:
                self._tell(job.key, _not_numbers(wrong[0]) if wrong else tuple(job.results))

    def _rest(self) -> None:
        """Do what `check_integrity` does, as there is nothing to compute; skip it if something was posted meanwhile."""
        if not self._thread.is_wanted:
            self._check()

    def _enter(self, job: Job) -> None:
        accounts = {other.account.team: other.account for other in self._jobs}
        job.account.served = min((account.served for account in accounts.values()), default=0)
        job.account = accounts.get(job.account.team, job.account)
        job.served = min((other.served for other in self._jobs if other.account is job.account), default=0)
        self._jobs.append(job)
        self._black_box.began(job.key, job.label)

    def _drop(self, key: int) -> None:
        for job in self._jobs:
            if job.key == key:
                self._forget(job)
                break
        self._intake.take_cancelled()

    def _forget(self, job: Job) -> None:
        """Give back everything that the call holds."""
        if job.sequence != NO_SEQUENCE:
            self._release(job.sequence)
            job.sequence = NO_SEQUENCE
        self._jobs.remove(job)
        self._black_box.ended(job.key)
        self._intake.leave(job.key)

    def _release(self, sequence: int) -> None:
        if self._context.memory is not None:
            self._context.memory.remove(sequence)
        self._free.append(sequence)

    def _check(self) -> None:
        held = {job.sequence: job for job in self._jobs if job.sequence != NO_SEQUENCE}
        if sorted([*self._free, *held]) != list(range(self._context.num_sequences)):
            raise IntegrityError(f"sequences are lost or held twice: {len(self._free)} free, held {sorted(held)}")
        if len(self._jobs) > self._intake.num_open:
            raise IntegrityError(f"{len(self._jobs)} calls are served, {self._intake.num_open} are open")
        memory = self._context.memory
        if memory is None:
            return
        for sequence in range(self._context.num_sequences):
            job, last = held.get(sequence), memory.last_position(sequence)
            expected = NO_POSITION if job is None else job.last_position
            if last != expected:
                raise IntegrityError(f"sequence {sequence}: last position {last}, by the book {expected}")

    def _end_all(self) -> None:
        for job in list(self._jobs):
            self._forget(job)
            self._tell(job.key, self._intake.refusal)


def _not_numbers(number: int) -> Failure:
    message = f"the model computed values that are not numbers for input {number}; try a model file of higher precision"
    return Failure(FailureCode.INTERNAL, message)
