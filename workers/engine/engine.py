"""The engine: one thread that owns a llama.cpp context and moves every conversation on it one step at a time.

A step takes mail, schedules, runs, samples, tells. With nothing to do the thread sleeps on its mailbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from workers.engine.adapters import AdapterShelf
from workers.engine.cache import IntegrityError, PrefixCache
from workers.engine.checkpoints import CheckpointCache
from workers.engine.pace import MovePace, PrefillPace
from workers.engine.request import EngineCounters, EngineLoad, EngineRequest
from workers.engine.roster import MOVE_S, Roster
from workers.engine.scheduler import Limits, Plan
from workers.engine.sequence import Sequence
from workers.engine.turns import Turns, chosen
from workers.llama.context import Context
from workers.llama.model import Model
from workers.llama.samplers import SamplerChain
from workers.protocol.events import CallEvent, Failed, FinishReason
from workers.protocol.failures import CallFailed, Failure, FailureCode

__all__ = ["Engine", "EngineLoad", "EngineRequest", "IntegrityError"]

log = logging.getLogger("paddock.engine")

Emit = Callable[[int, list[CallEvent]], None]

DEFAULT_RAM_BYTES = 256 << 20
MIN_WAITING_ROOM = 4
MIN_PREFILL = 32
LOOK_INTERVAL_S = 0.1
MIN_SHIFT = 4
"""Tokens at the end of a full context that `n_keep` can't keep: something must go."""


class Engine:
    """Serves `slots` calls at once and lets as many more (at least `MIN_WAITING_ROOM`) wait, first come, first served.

    `submit`, `cancel`, `drain` and `load` may be called from any thread and do not block. `emit(step, events)` is
    called on the engine thread, once per step that brought something, with `step` rising by one; it must be quick and
    must not raise. The events of one call come in the order that `workers.protocol.events` describes.
    """

    def __init__(
        self,
        model: Model,
        context: Context,
        *,
        slots: int,
        n_ctx: int,
        emit: Emit,
        on_crash: Callable[[BaseException], None] | None = None,
        ram_bytes: int = DEFAULT_RAM_BYTES,
        adapters: AdapterShelf | None = None,
    ) -> None:
        """`n_ctx`: the longest single conversation, tokens. `on_crash` is called on the engine thread.

        `ram_bytes`: most memory for prefixes that left the KV cache; 0: they are forgotten. `adapters`: LoRA adapters
        that calls may name; whoever made the shelf closes it after `stop`.
        """
        if n_ctx > context.kv_tokens:
            raise ValueError(f"n_ctx {n_ctx} is more than the {context.kv_tokens} cells that all slots share")
        if slots > context.slots:
            raise ValueError(f"{slots} slots on a context made for {context.slots} sequences")
        self.slots = slots
        self.n_ctx = n_ctx
        self.crashed: BaseException | None = None
        """What ended the loop, if it did not end as asked."""
        self._model = model
        self._context = context
        self._emit = emit
        self._on_crash = on_crash
        self._capacity = slots + max(slots, MIN_WAITING_ROOM)
        limits = Limits(n_batch=context.n_batch, n_ubatch=context.n_ubatch, min_prefill=MIN_PREFILL)
        self._pace = PrefillPace(MIN_PREFILL, context.n_ubatch)
        kind = PrefixCache if context.memory.kind.by_range else CheckpointCache
        self._cache = kind(
            context.memory,
            kv_tokens=context.kv_tokens,
            num_sequences=context.num_sequences,
            ram_bytes=ram_bytes,
            pace=MovePace(self._pace),
        )
        self._roster = Roster(self._cache, slots, limits, self._pace)
        self._batch = context.new_batch()
        self._adapters = adapters or AdapterShelf(model, context)
        self._adapters.follow(self.post)
        self._turns: Turns[bytes] = Turns()
        self._events: list[CallEvent] = []
        self._step_number = 0
        self._num_decodes = 0
        self._num_rows = 0
        self._num_used = 0
        self._look_again_at = 0.0
        self._stopping = False
        # The mailbox: acts to carry out on the engine thread.
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        # Guards what `submit` decides on: the calls that are alive, and whether more are taken.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._refusal: Failure | None = None
        self._cancelled: set[int] = set()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Take the call. Raises CallFailed: CONTEXT_OVERFLOW, BUSY, DRAINING, INTERNAL (the engine has crashed)."""
        num_prompt = len(request.tokens)
        if num_prompt == 0:
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, "the prompt has no tokens; send some text"))
        if num_prompt >= self.n_ctx:
            raise CallFailed(_overflow(num_prompt, self.n_ctx))
        vocab = self._model.vocab
        banned = (*vocab.suppressed, *vocab.eog) if request.ignore_eos else vocab.suppressed
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if request.key in self._open:
                raise ValueError(f"call {request.key} is already in the engine")
            if len(self._open) >= self._capacity:
                raise CallFailed(_busy(self.slots, self._capacity - self.slots))
            adapters = self._adapters.resolve(request.adapters)
            try:
                chain = SamplerChain(vocab, request.sampling, n_ctx=self.n_ctx, banned=banned)
            except BaseException:
                self._adapters.release(adapters)
                raise
            self._open.add(request.key)
            self._mail.append(partial(self._join, Sequence(request, chain, vocab, self.n_ctx, adapters)))
        self._wake.set()

    def cancel(self, key: int) -> None:
        """End the call within one step; it emits nothing more. Unknown keys are ignored."""
        with self._lock:
            if key not in self._open:
                return
            self._cancelled.add(key)
        self._mail.append(partial(self._drop, key))
        self._wake.set()

    def post(self, act: Callable[[], None]) -> None:
        """Have `act` carried out on the engine thread between two steps. It must be quick and must not raise."""
        self._mail.append(act)
        self._wake.set()

    def load(self) -> EngineLoad:
        """A snapshot; the step that runs meanwhile may change it."""
        num_busy = len(self._roster.running)
        with self._lock:
            num_open = len(self._open)
        return EngineLoad(
            slots=self.slots,
            slots_busy=num_busy,
            waiting=max(0, num_open - num_busy),
            kv_tokens=self._context.kv_tokens,
            kv_tokens_used=self._num_used,
        )

    @property
    def counters(self) -> EngineCounters:
        """A snapshot, as `load`."""
        cache = self._cache
        return EngineCounters(
            num_decodes=self._num_decodes,
            num_rows=self._num_rows,
            num_preempted=self._roster.num_preempted,
            num_restored=cache.num_restored,
            ram_bytes=cache.ram.num_bytes,
        )

    def drain(self) -> None:
        """Refuse new calls with DRAINING; those that are in go on."""
        with self._lock:
            self._refusal = self._refusal or _DRAINING

    def stop(self) -> None:
        """End the loop after the running step and join the thread. Calls that are still in end as Failed (DRAINING)."""
        self.drain()
        self._mail.append(self._halt)
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._end_all()

    def check_integrity(self) -> None:
        """Compare the book of slots and cells with llama.cpp's. Raises IntegrityError. Waits for the running step."""
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
                if not self._roster.running:
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
        if time.monotonic() >= self._look_again_at:
            self._look()
        plan = self._schedule()
        self._run(plan)
        self._sample(plan)
        self._tell()

    def _take_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _schedule(self) -> Plan[Sequence]:
        """Let in who fits, then decide what this step computes."""
        roster, cache = self._roster, self._cache
        if roster.waiting or any(not sequence.decoding for sequence in roster.running):
            roster.admit(self._events, _always)
        self._shift_full()
        plan = roster.plan(self._of_one_turn)
        cache.tidy(self._num_decodes, MOVE_S)
        return plan

    def _run(self, plan: Plan[Sequence]) -> None:
        if not plan.decode and not plan.prefill:
            return
        batch = self._batch
        batch.clear()
        for sequence in plan.decode:
            sequence.row = batch.add_token(sequence.token, sequence.num_cells, sequence.id)
            sequence.num_cells += 1
        for chunk in plan.prefill:
            sequence = chunk.sequence
            position = sequence.num_cells
            tokens = sequence.take_chunk(chunk.num_tokens)
            last = sequence.num_prompt_left == 0
            sequence.row = batch.add_prompt(tokens, position, sequence.id, want_logits=last)
        one = plan.decode[0] if plan.decode else plan.prefill[0].sequence
        switched = self._adapters.apply(one.adapter_set)
        start = time.perf_counter()
        self._context.decode(batch)
        seconds = time.perf_counter() - start
        self._pace.note(batch.num_tokens, seconds)
        self._turns.note_step(seconds, switched=switched, comparable=not plan.prefill)
        self._num_decodes += 1
        self._num_rows += len(plan.decode)

    def _of_one_turn(self, ready: list[Sequence]) -> list[Sequence]:
        return chosen(self._turns, ready, time.perf_counter())

    def _shift_full(self) -> None:
        """Conversations that are as long as they may be go on without their older half, or end."""
        for sequence in [one for one in self._roster.running if one.decoding and one.num_cells >= self.n_ctx]:
            num_kept = sequence.num_prompt if sequence.request.n_keep < 0 else sequence.request.n_keep
            num_kept = min(num_kept, self.n_ctx - MIN_SHIFT)
            end = num_kept + (sequence.num_cells - num_kept) // 2
            if not self._cache.shift(sequence, num_kept, end):
                self._events.append(sequence.finished(FinishReason.LENGTH, time.perf_counter()))
                self._forget(sequence)

    def _sample(self, plan: Plan[Sequence]) -> None:
        sample = self._context.sample
        events = self._events
        ended: list[tuple[Sequence, FinishReason]] = []
        for sequence in plan.decode:
            reason = sequence.accept(sample(sequence.chain.pointer, sequence.row), events)
            if reason is not None:
                ended.append((sequence, reason))
        for chunk in plan.prefill:
            sequence = chunk.sequence
            if not sequence.num_prompt_left or sequence.num_cells in sequence.stops:
                self._cache.reached(sequence)
            if sequence.num_prompt_left:
                continue
            reason = FinishReason.LENGTH
            if sequence.limit:
                if not sequence.num_predicted:
                    sequence.chain.accept_prompt(sequence.request.tokens)
                reason = sequence.accept(sample(sequence.chain.pointer, sequence.row), events)
                sequence.decoding = True
            if not sequence.first_token_at:
                sequence.first_token_at = time.perf_counter()
            if reason is not None:
                ended.append((sequence, reason))
        for sequence, reason in ended:
            events.append(sequence.finished(reason, time.perf_counter()))
            self._forget(sequence)

    def _tell(self) -> None:
        events, self._events = self._events, []
        if self._cancelled:
            events = self._without_cancelled(events)
        if events:
            self._step_number += 1
            self._emit(self._step_number, events)

    def _without_cancelled(self, events: list[CallEvent]) -> list[CallEvent]:
        """A call may be cancelled while its step runs: what the step brought for it stays here."""
        with self._lock:
            cancelled = frozenset(self._cancelled)
            self._cancelled &= self._open
        return [event for event in events if event.call not in cancelled]

    def _look(self) -> None:
        """What `load` tells of the cache: the cells that running calls need."""
        self._num_used = self._cache.num_used - self._cache.num_idle
        self._look_again_at = time.monotonic() + LOOK_INTERVAL_S

    def _rest(self) -> None:
        """Nothing runs: check the books, then sleep until there is mail."""
        self._look()
        if not self._roster.waiting and not self._mail:
            self._cache.check_cells()
        while not (self._mail or self._roster.waiting or self._stopping):
            self._wake.wait()
            self._wake.clear()

    def _forget(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give back everything that the call holds; with `keep` its prefix stays for those who come after."""
        sequence.chain.close()
        self._adapters.release(sequence.adapter_set)
        self._roster.remove(sequence, keep=keep)
        with self._lock:
            self._open.discard(sequence.key)

    def _join(self, sequence: Sequence) -> None:
        self._roster.join(sequence)
        try:
            self._adapters.bring(sequence.adapter_set)
        except CallFailed as failed:
            self._forget(sequence)
            self._events.append(Failed(sequence.key, failed.failure))

    def _drop(self, key: int) -> None:
        sequence = self._roster.find(key)
        if sequence is not None:
            self._forget(sequence)

    def _halt(self) -> None:
        self._stopping = True

    def _check(self) -> None:
        try:
            self._roster.check()
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        self._cache.check()
        self._adapters.check(one.adapter_set for one in (*self._roster.running, *self._roster.waiting))

    def _end_all(self) -> None:
        """The loop is over: end every call that is still in, and give back what they hold."""
        self._take_mail()
        failure = self._refusal or _CRASHED
        for sequence in (*self._roster.running, *self._roster.waiting):
            self._forget(sequence)
            self._events.append(Failed(sequence.key, failure))
        self._tell()


_DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
_CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")


def _always(sequence: Sequence) -> bool:
    return True


def _answer(result: Future[None], act: Callable[[], None]) -> None:
    try:
        act()
    except IntegrityError as error:
        result.set_exception(error)
    else:
        result.set_result(None)


def _overflow(num_prompt: int, n_ctx: int) -> Failure:
    message = (
        f"the prompt has {num_prompt} tokens and a conversation may have {n_ctx}, answer included; "
        "shorten the prompt or serve the model with a larger --ctx"
    )
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, "messages")


def _busy(slots: int, room: int) -> Failure:
    message = f"all {slots} slots and the waiting room for {room} are taken; ask again, or serve with more --slots"
    return Failure(FailureCode.BUSY, message)
