"""The engine: one thread that owns a llama.cpp context and moves every conversation on it one step at a time.

The thread takes mail, makes a step (`workers.engine.stepper`) and tells what it brought. With nothing to do it sleeps
on its mailbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from workers.engine.adapters import AdapterShelf
from workers.engine.cache import IntegrityError
from workers.engine.counters import EngineCounters
from workers.engine.disk import DiskTier
from workers.engine.disk_link import DiskLink
from workers.engine.picker import PickerTools
from workers.engine.request import EngineLoad, EngineRequest
from workers.engine.sequence import Sequence
from workers.engine.slots import SlotDoor
from workers.engine.stepper import Bounds, Stepper
from workers.engine.watchdog import Watchdog
from workers.llama.context import Context
from workers.llama.dry import DryStages
from workers.llama.model import Model
from workers.llama.samplers import SamplerChain
from workers.protocol.events import CallEvent
from workers.protocol.failures import CallFailed, Failure, FailureCode

__all__ = ["Engine", "EngineLoad", "EngineRequest", "IntegrityError"]

log = logging.getLogger("paddock.engine")

Emit = Callable[[int, list[CallEvent]], None]

DEFAULT_RAM_BYTES = 256 << 20
MIN_WAITING_ROOM = 4
LOOK_INTERVAL_S = 0.1


class Engine:
    """Serves `slots` calls at once and lets as many more (at least `MIN_WAITING_ROOM`) wait.

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
        watchdog: Watchdog | None = None,
        disk: DiskTier | None = None,
        write_out_s: float = 5.0,
    ) -> None:
        """`n_ctx`: the longest single conversation, tokens. `on_crash` is called on the engine thread.

        `ram_bytes`: most memory for prefixes that left the KV cache; 0: they are forgotten. `adapters`: LoRA adapters
        that calls may name. `watchdog`: is told of each step. `disk`: the tier behind RAM; `stop` spends at most
        `write_out_s` on writing everything there. Whoever made these closes them after `stop`.
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
        self._watchdog = watchdog or Watchdog()
        self._capacity = slots + max(slots, MIN_WAITING_ROOM)
        self._adapters = adapters or AdapterShelf(model, context)
        self._adapters.follow(self.post)
        self._tools = PickerTools(model.vocab)
        self._dry = DryStages(model.vocab)
        bounds = Bounds(slots, n_ctx, ram_bytes)
        link = None if disk is None else partial(DiskLink, disk, post=self.post)
        self._stepper = Stepper(context, bounds, self._adapters, self._watchdog.black_box, self._ended, link)
        self._disk = disk
        self._write_out_s = write_out_s
        self._written_out = False
        self._step_number = 0
        self._num_used = self._num_idle = 0
        self._adapter_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._look_again_at = 0.0
        self._stopping = self._over = False
        # The mailbox: acts to carry out on the engine thread.
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        # Guards what `submit` decides on: the calls that are alive, and whether more are taken.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._refusal: Failure | None = None
        self._cancelled: set[int] = set()
        self.at_rest = SlotDoor(self._stepper.slots, self.post)
        """What the slots hold when no call runs in them."""
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Take the call. Raises CallFailed: CONTEXT_OVERFLOW, BUSY, DRAINING, INTERNAL (the engine has crashed),
        INVALID_REQUEST and UNSUPPORTED for what this model can't do.
        """
        self._check_request(request)
        with self._lock:
            if self._refusal is not None:
                raise CallFailed(self._refusal)
            if request.key in self._open:
                raise ValueError(f"call {request.key} is already in the engine")
            if len(self._open) >= self._capacity:
                raise CallFailed(_busy(self.slots, self._capacity - self.slots))
            self._open.add(request.key)
        try:
            # Not under the lock, which the engine's thread needs: a DRY sampler takes a tenth of a second to make.
            sequence = self._sequence(request)
        except BaseException:
            self._ended(request.key)
            raise
        with self._lock:
            over, given_up = self._over, request.key in self._cancelled
            if not (over or given_up):
                self._mail.append(partial(self._stepper.join, sequence))
        if over or given_up:
            sequence.chain.close()
            self._adapters.release(sequence.adapter_set)
            self._ended(request.key)
        if over:
            raise CallFailed(self._refusal or _CRASHED)
        self._wake.set()

    def cancel(self, key: int) -> None:
        """End the call within one step; it emits nothing more. Unknown keys are ignored."""
        with self._lock:
            if key not in self._open:
                return
            self._cancelled.add(key)
            self._mail.append(partial(self._stepper.drop, key))
        self._wake.set()

    def post(self, act: Callable[[], None]) -> None:
        """Have `act` carried out on the engine thread between two steps. It must be quick and must not raise."""
        self._mail.append(act)
        self._wake.set()

    def load(self) -> EngineLoad:
        """A snapshot; the step that runs meanwhile may change it."""
        num_busy = self._stepper.num_running
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
        """A snapshot, as `load`; a few microseconds."""
        running, waiting = self._adapter_names
        return replace(
            self._stepper.counters,
            idle_cells=self._num_idle,
            disk=None if self._disk is None else self._disk.stats,
            adapters_loaded=self._adapters.num_loaded,
            max_adapters=self._adapters.max_adapters,
            adapters_running=running,
            adapters_waiting=waiting,
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
        self._dry.close()
        if self.crashed is None and not self._written_out:
            self._written_out = True
            self._stepper.write_out(self._write_out_s)

    def check_integrity(self) -> None:
        """Compare the book of slots and cells with llama.cpp's. Raises IntegrityError. Waits for the running step."""
        if not self._thread.is_alive():
            self._stepper.check()
            return
        result: Future[None] = Future()
        self._mail.append(partial(_answer, result, self._stepper.check))
        self._wake.set()
        result.result(timeout=60)

    def _check_request(self, request: EngineRequest) -> None:
        num_prompt = len(request.tokens)
        if num_prompt == 0:
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, "the prompt has no tokens; send some text"))
        if num_prompt >= self.n_ctx:
            raise CallFailed(_overflow(num_prompt, self.n_ctx))
        if request.context_shift and not self._context.memory.can_shift:
            message = (
                "`context_shift` moves tokens to other positions, which this model or its KV type does not allow; "
                "leave it out, or serve the model with a larger --ctx"
            )
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "context_shift"))

    def _sequence(self, request: EngineRequest) -> Sequence:
        """The call with all that it holds from now on. Raises CallFailed."""
        vocab = self._model.vocab
        banned = (*vocab.suppressed, *vocab.eog) if request.ignore_eos else vocab.suppressed
        adapters = self._adapters.resolve(request.adapters)
        try:
            masked = request.mask is not None
            chain = SamplerChain(vocab, request.sampling, n_ctx=self.n_ctx, banned=banned, masked=masked, dry=self._dry)
        except BaseException:
            self._adapters.release(adapters)
            raise
        return Sequence(request, chain, vocab, self.n_ctx, adapters, self._tools.picker(request, chain))

    # On the engine thread.

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._step()
                if not self._stepper.num_running:
                    self._rest()
        except BaseException as error:
            # The loop's edge: the process must learn that its engine is dead.
            log.exception("the engine's loop died while running %s", self._watchdog.black_box.text())
            self.crashed = error
            with self._lock:
                self._refusal = _CRASHED
        try:
            self._end_all()
        finally:
            self._watchdog.step_ended()
            if self.crashed is not None and self._on_crash is not None:
                self._on_crash(self.crashed)

    def _step(self) -> None:
        self._watchdog.step_began()
        self._take_mail()
        if time.monotonic() >= self._look_again_at:
            self._look()
        self._stepper.step()
        self._tell()
        self._watchdog.step_ended()

    def _take_mail(self) -> None:
        while self._mail:
            self._mail.popleft()()

    def _tell(self) -> None:
        events, self._stepper.events = self._stepper.events, []
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
        """What `load` and `counters` tell of things that only this thread may look through."""
        self._num_used, self._num_idle = self._stepper.num_cells_needed, self._stepper.num_cells_idle
        self._adapter_names = self._stepper.adapter_names
        self._look_again_at = time.monotonic() + LOOK_INTERVAL_S

    def _rest(self) -> None:
        """Nothing runs: check the books, then sleep until there is mail."""
        self._look()
        if not self._stepper.has_work and not self._mail:
            self._stepper.check_cells()
        while not (self._mail or self._stepper.has_work or self._stopping) and self._stepper.save_some():
            pass
        while not (self._mail or self._stepper.has_work or self._stopping):
            self._wake.wait()
            self._wake.clear()

    def _ended(self, key: int) -> None:
        with self._lock:
            self._open.discard(key)

    def _halt(self) -> None:
        self._stopping = True

    def _end_all(self) -> None:
        """The loop is over: end every call that is still in, and give back what they hold."""
        with self._lock:
            self._over = True
        self._take_mail()
        self._stepper.end_all(self._refusal or _CRASHED)
        self._tell()


_DRAINING = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
_CRASHED = Failure(FailureCode.INTERNAL, "this worker's engine has crashed; ask again")


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
