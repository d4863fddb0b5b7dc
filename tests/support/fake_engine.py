"""An engine without a model: all busy slots emit one token per step, on the clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.support.fake_cache import FakeCache
from tests.support.tally import Tally as TokenTally
from workers.engine.cache.report import Found
from workers.engine.counters import EngineCounters, Tally
from workers.engine.pace import AnswerLengths
from workers.engine.request import CallLeft, EngineLoad, EngineRequest
from workers.metrics.types import GAP_S
from workers.protocol.events import (
    CallEvent,
    CallFailed,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Started,
    Text,
    Timings,
    TimingsSoFar,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
    context_overflow,
)
from workers.protocol.requests import Notice

CHARS_PER_TOKEN = 4
MIN_WAITING_ROOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """How the engine behaves and misbehaves. Numbers of tokens are per answer, where nothing else is said."""

    slots: int = 8
    n_ctx: int = 4096
    step_ms: float = 20.0
    prefill_ms: float = 0.0
    prefill_token_ms: float = 0.0
    """And so much for each token of the prompt that is not cached."""
    cache_tokens: int = 0
    """Tokens of prompts that it remembers; 0: as many as all slots hold."""
    tokens: int = 64
    answer: str = ""
    """What each answer says; empty: `t0 t1 t2 ...`, so that a gap or a swap shows."""
    fail_after: int = 0
    die_after: int = 0
    """Tokens of all answers together; 0: never."""
    crash_after: int = 0
    garble_after: int = 0
    refuse: str = ""
    refuse_calls: int = 0
    """So many of them, and then none; 0: every one."""
    hang: bool = False
    tally: str = ""
    """File that each token is written to, by the label and the key of its call; empty: none."""


@dataclass(slots=True)
class _Answer:
    key: int
    num_prompt_tokens: int
    pieces: Sequence[str] | None
    """Text of each token; None: `t<n> `."""
    num_tokens: int
    reason: FinishReason
    tell: tuple[Notice, ...] = ()
    n_probs: int = 0
    label: str = ""
    num_cached: int = 0
    slot: int = -1
    started_at: float = 0.0
    first_at: float = 0.0
    sent: int = 0

    def piece(self) -> str:
        return f"t{self.sent} " if self.pieces is None else self.pieces[self.sent]


class FakeTokenizer:
    """About one token for four characters, as everywhere."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> Sequence[int]:
        return range(int(add_special) + (len(text) + CHARS_PER_TOKEN - 1) // CHARS_PER_TOKEN)


class FakeEngine:
    """The seam of the real engine. Steps lie on a fixed grid of time: a late step is followed sooner by the next."""

    def __init__(
        self,
        options: FakeOptions,
        emit: Callable[[int, list[CallEvent]], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._options = options
        self._emit = emit
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._waiting: deque[_Answer] = deque()
        self._running: dict[int, _Answer] = {}
        self._free = list(range(options.slots))[::-1]
        self._cache = FakeCache(options.cache_tokens or options.slots * options.n_ctx)
        self._requests: dict[int, EngineRequest] = {}
        """Of the calls that wait."""
        self._gaps = Tally(GAP_S)
        self._lengths = AnswerLengths()
        self._stopping = False
        self._num_tokens = 0
        self._num_refused = 0
        self._tally = TokenTally(options.tally) if options.tally else None
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    @property
    def n_ctx(self) -> int:
        return self._options.n_ctx

    @property
    def slots(self) -> int:
        return self._options.slots

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters(gap_s=self._gaps.distribution)

    def take(self) -> list[Found]:
        """As `workers.engine.cache.report.CacheReportProxy`."""
        with self._lock:
            return self._cache.take()

    def forget(self, keys: Iterable[int]) -> None:
        with self._lock:
            self._cache.forget(keys)

    def load(self) -> EngineLoad:
        with self._lock:
            used = sum(answer.num_prompt_tokens + answer.sent for answer in self._running.values())
            options = self._options
            total = options.slots * options.n_ctx
            running = tuple(
                CallLeft(
                    0 if one.first_at else one.num_prompt_tokens - one.num_cached,
                    self._lengths.left(one.sent, one.num_tokens),
                )
                for one in self._running.values()
            )
            backlog = sum(one.num_prompt for one in running) + sum(one.num_prompt_tokens for one in self._waiting)
            return EngineLoad(
                options.slots,
                len(running),
                len(self._waiting),
                total,
                min(used, total),
                backlog,
                running,
                self._lengths.usual,
                options.prefill_token_ms / 1000,
            )

    def start(self) -> None:
        self._thread.start()

    def retire(self) -> None:
        """It has nothing to hand on."""

    def stay(self) -> None:
        """It had nothing to hand on."""

    def stop(self) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join()

    def submit(self, request: EngineRequest) -> None:
        options = self._options
        if options.refuse and (not options.refuse_calls or self._num_refused < options.refuse_calls):
            self._num_refused += 1
            message = f"this fake worker refuses every call (--refuse {options.refuse})"
            raise CallFailed(Failure(FailureCode(options.refuse), message))
        num_prompt_tokens, max_tokens = len(request.prompt), request.asked.max_tokens
        if num_prompt_tokens >= options.n_ctx:
            raise CallFailed(context_overflow(num_prompt_tokens, options.n_ctx))
        text = options.answer
        pieces = [text[i : i + CHARS_PER_TOKEN] for i in range(0, len(text), CHARS_PER_TOKEN)] if text else None
        num_tokens = options.tokens if pieces is None else len(pieces)
        reason = FinishReason.STOP
        if max_tokens is not None and (max_tokens < num_tokens or request.asked.ignore_eos):
            num_tokens = min(max_tokens, num_tokens) if pieces else max_tokens
            reason = FinishReason.LENGTH
        with self._work:
            room = max(options.slots, MIN_WAITING_ROOM)
            if len(self._running) + len(self._waiting) >= options.slots + room:
                message = f"all {options.slots} slots and {room} waiting places are taken; try again later"
                raise CallFailed(Failure(FailureCode.BUSY, message))
            answer = _Answer(request.key, num_prompt_tokens, pieces, num_tokens, reason)
            answer.tell, answer.n_probs = request.asked.tell, request.asked.n_probs
            answer.label = f"{request.label}#{request.key}"
            self._waiting.append(answer)
            self._requests[request.key] = request
            self._work.notify()

    def cancel(self, key: int) -> None:
        with self._lock:
            answer = self._running.pop(key, None)
            if answer is not None:
                self._free.append(answer.slot)
                self._cache.ended(key)
            else:
                self._requests.pop(key, None)
                self._waiting = deque(waiting for waiting in self._waiting if waiting.key != key)

    def end(self, key: int, num_tokens: int) -> None:
        with self._lock:
            answer = self._running.get(key)
            if answer is not None:  # it is told in the next step
                answer.num_tokens = answer.sent = num_tokens
                answer.reason = FinishReason.STOP

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001 - the thread's edge: the process is told and ends
            self._on_crash(error)

    def _loop(self) -> None:
        step = 0
        interval_s = self._options.step_ms / 1000
        due = time.monotonic()
        while True:
            with self._work:
                idle = False
                while not self._stopping and (self._options.hang or not (self._running or self._waiting)):
                    idle = True
                    self._work.wait()
                if self._stopping:
                    return
                now = time.monotonic()
                due = now if idle or now - due > 1.0 else due + interval_s
            delay_s = due - time.monotonic()
            if delay_s > 0:
                time.sleep(delay_s)
            events = self._step(time.monotonic())
            if events:
                step += 1
                self._emit(step, events)

    def _step(self, now: float) -> list[CallEvent]:
        options = self._options
        events: list[CallEvent] = []
        with self._lock:
            while self._waiting and self._free:
                answer = self._waiting.popleft()
                answer.slot, answer.started_at = self._free.pop(), now
                self._running[answer.key] = answer
                cached = answer.num_cached = self._cache.enter(self._requests.pop(answer.key))
                events.append(Started(answer.key, answer.slot, answer.num_prompt_tokens, cached))
                if "progress" in answer.tell:
                    events.append(Progress(answer.key, answer.num_prompt_tokens, cached, cached, 0))
            ended = []
            said = []
            for key, answer in self._running.items():
                if now - answer.started_at < self._prefill_s(answer):
                    continue
                if options.fail_after and answer.sent >= options.fail_after:
                    message = f"this fake worker fails each answer after {options.fail_after} tokens (--fail-after)"
                    events.append(Failed(key, Failure(FailureCode.INTERNAL, message)))
                    ended.append(answer)
                    continue
                if answer.sent < answer.num_tokens:
                    events += _said(answer, now)
                    said.append(answer.label)
                    answer.sent += 1
                    self._num_tokens += 1
                if answer.sent >= answer.num_tokens:
                    events.append(_finished(answer, now))
                    self._lengths.note(answer.sent)
                    ended.append(answer)
            for answer in ended:
                del self._running[answer.key]
                self._free.append(answer.slot)
                self._cache.ended(answer.key)
            self._gaps.add(options.step_ms / 1000, len(said))
        if self._tally is not None:
            self._tally.note(said)
        if options.garble_after and self._num_tokens >= options.garble_after:
            events.append(ToolCallDelta(next(iter(self._running), 0), 0, "", "", ""))  # not an engine's event
        self._misbehave()
        return events

    def _prefill_s(self, answer: _Answer) -> float:
        options = self._options
        num_computed = answer.num_prompt_tokens - answer.num_cached
        return (options.prefill_ms + num_computed * options.prefill_token_ms) / 1000

    def _misbehave(self) -> None:
        options = self._options
        if options.die_after and self._num_tokens >= options.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.crash_after and self._num_tokens >= options.crash_after:
            raise RuntimeError(f"this fake worker's engine crashes after {options.crash_after} tokens (--crash-after)")


def _said(answer: _Answer, now: float) -> list[CallEvent]:
    """One more token, whose number is its place in the answer."""
    events: list[CallEvent] = []
    if "progress" in answer.tell and not answer.first_at:
        time_ms = int((now - answer.started_at) * 1000)
        events.append(
            Progress(answer.key, answer.num_prompt_tokens, answer.num_cached, answer.num_prompt_tokens, time_ms)
        )
    answer.first_at = answer.first_at or now
    if "tokens" in answer.tell:
        events.append(Tokens(answer.key, (answer.sent,)))
    if "timings" in answer.tell:
        events.append(TimingsSoFar(answer.key, _timings(answer, answer.sent + 1, now)))
    piece = answer.piece()
    if answer.n_probs:
        likely = tuple(TokenLogprob(answer.sent + i, piece.encode(), -0.25 - i) for i in range(max(1, answer.n_probs)))
        events.append(Logprobs(answer.key, likely[0], likely[: max(0, answer.n_probs)]))
    events.append(Text(answer.key, piece))
    return events


def _timings(answer: _Answer, num_predicted: int, now: float) -> Timings:
    first_at = answer.first_at or now
    return Timings(
        cache_n=answer.num_cached,
        prompt_n=answer.num_prompt_tokens - answer.num_cached,
        prompt_ms=(first_at - answer.started_at) * 1000,
        predicted_n=num_predicted,
        predicted_ms=(now - first_at) * 1000,
    )


def _finished(answer: _Answer, now: float) -> Finished:
    usage = Usage(answer.num_prompt_tokens, answer.sent, answer.num_cached)
    return Finished(answer.key, answer.reason, usage, _timings(answer, answer.sent, now))
