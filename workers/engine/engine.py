"""The engine: advances every conversation on one llama.cpp context, one step at a time (`workers.engine.step.stepper`).

Its thread and mailbox are in `workers.engine.thread`; `workers.engine.request` decides which calls are admitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from workers.engine.adapters.registry import AdapterRegistry
from workers.engine.cache.report import CacheReportProxy
from workers.engine.cache.slots import SlotProxy
from workers.engine.counters import EngineCounters
from workers.engine.disk.link import DiskLink
from workers.engine.disk.tier import NO_DISK, DiskTier
from workers.engine.encoder import MediaEncoder
from workers.engine.request import EngineLoad, EngineRequest, Intake, IntegrityError
from workers.engine.step.media import MediaSpans
from workers.engine.step.sampling import SamplerTools
from workers.engine.step.sequence import Sequence
from workers.engine.step.shares import overdraft_of
from workers.engine.step.speculator import DraftSources
from workers.engine.step.stepper import Stepper
from workers.engine.thread import EngineThread, Work
from workers.engine.watchdog import Watchdog
from workers.llama.context import Context
from workers.llama.model import Model
from workers.llama.sampling.samplers import DryStages, SamplerChain
from workers.protocol.events import CallEvent, CallFailed, Failure, FailureCode, context_overflow

__all__ = ["Engine", "EngineLoad", "EngineRequest", "IntegrityError"]

Emit = Callable[[int, list[CallEvent]], None]

DEFAULT_RAM_BYTES = 256 << 20
LOOK_INTERVAL_S = 0.1
AS_IT_PAYS = DraftSources()


class Engine:
    """Serves `slots` calls at once and lets some more wait (`workers.engine.request`); several teams take turns.

    `submit`, `cancel`, `end`, `drain`, `retire`, `stay` and `load` may be called from any thread and do not block.
    `emit(step, events)` is called on the engine thread, once per step that has events, with `step` rising by one; it
    must be quick and must not raise. The events of a call come in the order that `workers.protocol.events` describes.
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
        adapters: AdapterRegistry | None = None,
        watchdog: Watchdog | None = None,
        disk: DiskTier | None = None,
        write_out_s: float = 5.0,
        speculation: DraftSources = AS_IT_PAYS,
        encoder: MediaEncoder | None = None,
    ) -> None:
        """`n_ctx`: maximum tokens of one conversation. `on_crash` is called on the engine thread.

        `ram_bytes`: maximum memory for prefixes that left the KV cache; 0: none are kept. `adapters`: LoRA adapters
        that calls may name. `watchdog`: ends the process if a step hangs. `disk`: the tier behind RAM; `stop`
        spends at most `write_out_s` seconds on writing everything to it. The caller closes adapters, watchdog and disk
        after `stop`. `speculation`: where drafts of answers come from. `encoder`: makes embeddings of pictures and
        sounds; None: the model reads text only. The caller stops it after the engine."""
        _check_sizes(context, slots, n_ctx)
        self.slots, self.n_ctx = slots, n_ctx
        self._model, self._context, self._emit = model, context, emit
        watchdog = watchdog or Watchdog()
        self._intake = Intake(slots, beyond=overdraft_of(slots))
        self._thread = EngineThread(
            Work(self._step, self._rest, self._end_all, self._check), self._intake, watchdog, on_crash
        )
        self.post = self._thread.post
        """Queues a function for the engine thread to call between two steps. It must be quick and must not raise."""
        self._adapters = adapters or AdapterRegistry(model, context)
        self._adapters.follow(self.post, lambda: self._thread.has_ended)
        self._tools = SamplerTools(model.vocab)
        self._dry = DryStages(model.vocab)
        link = None if disk is None else partial(DiskLink, disk, post=self.post)
        self._encoder = encoder
        self._stepper = Stepper(
            context,
            self._adapters,
            watchdog.black_box,
            self._intake.leave,
            link,
            slots=slots,
            n_ctx=n_ctx,
            ram_bytes=ram_bytes,
            drafts=speculation,
            media=MediaSpans(encoder, context, self._thread.wake),
        )
        self.slot_contents = SlotProxy(self._stepper.slots, self.post)
        """Copies, restores and erases the conversations that slots hold while no call runs in them."""
        self.cache_report = CacheReportProxy(self._stepper.cache_report, self.post)
        """Reports how much of each conversation that ended is still cached."""
        self._disk, self._write_out_s, self._written_out = disk, write_out_s, False
        self._step_number = self._num_used = self._num_idle = 0
        self._adapter_names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._look_again_at = 0.0

    # Any thread may call these.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Accept a call and queue it for the engine thread. Raises CallFailed: CONTEXT_OVERFLOW, BUSY, DRAINING,
        INTERNAL (the engine has crashed), INVALID_REQUEST, or UNSUPPORTED if this model can't do what is asked."""
        self._check_request(request)
        self._intake.enter(request.key)
        try:
            # Not under the intake's lock, which the engine's thread needs: making a DRY sampler takes 0.1 s.
            sequence = self._sequence(request)
        except BaseException:
            self._intake.leave(request.key)
            raise
        if not self._intake.hand_over(request.key, partial(self.post, partial(self._stepper.join, sequence))):
            sequence.chain.close()
            self._adapters.release(sequence.adapter_set)
            self._intake.leave(request.key)
            if self._intake.is_over:
                raise CallFailed(self._intake.refusal)

    def cancel(self, key: int) -> None:
        """End the call `key` within one step; no more events come for it. Unknown keys are ignored."""
        self._intake.cancel(key, partial(self.post, partial(self._stepper.drop, key)))

    def end(self, key: int, num_tokens: int) -> None:
        """End the call `key` after `num_tokens` tokens of its answer, because its caller wants no more. Emits Finished
        (STOP) between two steps. Unknown keys are ignored."""
        self.post(partial(self._end, key, num_tokens))

    @property
    def crashed(self) -> BaseException | None:
        """Return the error that ended the engine's loop; None: the loop runs, or was stopped."""
        return self._thread.crashed

    def load(self) -> EngineLoad:
        """Return a snapshot of the load; if a step runs meanwhile, some numbers are from before and some from after."""
        num_busy = self._stepper.num_running
        running, backlog_tokens = self._stepper.calls_left
        return EngineLoad(
            slots=self.slots,
            slots_busy=num_busy,
            waiting=max(0, self._intake.num_open - num_busy),
            kv_tokens=self._context.kv_tokens,
            kv_tokens_used=self._num_used,
            backlog_tokens=backlog_tokens,
            running=running,
            answer_tokens=self._stepper.lengths.usual,
            prefill_s=self._stepper.prefill_s,
            encode_s=0.0 if self._encoder is None else self._encoder.cell_s,
            overdraft=overdraft_of(self.slots),
        )

    @property
    def counters(self) -> EngineCounters:
        """Return a snapshot of the counters, in a few microseconds; a step that runs meanwhile may change some."""
        running, waiting = self._adapter_names
        return replace(
            self._stepper.counters,
            idle_cells=self._num_idle,
            disk=NO_DISK if self._disk is None else self._disk.stats,
            adapters_loaded=self._adapters.num_loaded,
            adapter_load_s=self._adapters.load_s,
            num_adapter_failures=self._adapters.num_failures,
            max_adapters=self._adapters.max_adapters,
            adapters_running=running,
            adapters_waiting=waiting,
        )

    def drain(self) -> None:
        """Refuse new calls with DRAINING; admitted calls go on."""
        self._intake.drain()

    def retire(self) -> None:
        """Begin to write idle prefixes to disk for other workers, because the process is about to end or is reserved.
        Calls go on meanwhile; `stop` writes the prefixes that are left."""
        self.post(self._stepper.retire)

    def stay(self) -> None:
        """Undo `retire`, because the process is released."""
        self.post(self._stepper.stay)

    def stop(self) -> None:
        """End the loop after the running step and join the thread. Unfinished calls end as Failed (DRAINING)."""
        self._thread.stop()
        self._dry.close()
        if self.crashed is None and not self._written_out:
            self._written_out = True
            self._stepper.write_out(self._write_out_s)

    def check_integrity(self) -> None:
        """Compare the engine's records with llama.cpp's cache; waits for the running step. Raises IntegrityError."""
        self._thread.check()

    def _check_request(self, request: EngineRequest) -> None:
        num_prompt = len(request.prompt)
        if num_prompt == 0:
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, "the prompt has no tokens; send some text"))
        if num_prompt >= self.n_ctx:
            raise CallFailed(context_overflow(num_prompt, self.n_ctx))
        if request.prompt.spans:
            self._check_media(request)
        num_tokens = self._model.vocab.num_tokens
        for position, token in enumerate(request.asked.stop_tokens):
            if not 0 <= token < num_tokens:
                message = f"`stop_token_ids.{position}`: there is no token {token}; this model's are 0 to "
                raise CallFailed(
                    Failure(FailureCode.INVALID_REQUEST, f"{message}{num_tokens - 1}", f"stop_token_ids.{position}")
                )
        if request.asked.context_shift and not self._context.memory.can_shift:
            message = (
                "`context_shift` moves tokens to other positions, which this model or its KV type does not allow; "
                "leave it out, or serve the model with a larger --ctx"
            )
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "context_shift"))

    def _check_media(self, request: EngineRequest) -> None:
        if self._encoder is None:
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, "this model reads text only; send no pictures or sounds"))
        if request.asked.context_shift:
            message = "`context_shift` would cut pictures or sounds in two; leave it out"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "context_shift"))
        if request.asked.prompt_probs:
            message = "`echo` with `logprobs` tells the probabilities of texts only; leave it out, or the media"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "echo"))

    def _sequence(self, request: EngineRequest) -> Sequence:
        """Make the sequence of a new call, with its sampler, and mark its adapters as used. Raises CallFailed."""
        vocab = self._model.vocab
        banned = vocab.suppressed
        if request.asked.ignore_eos:
            banned = (*banned, *(vocab.eog - frozenset(request.asked.stop_tokens)))
        masked = request.mask is not None or request.asked.min_tokens > 0
        with ExitStack() as undo:
            adapters = self._adapters.resolve(request.asked.adapters)
            undo.callback(self._adapters.release, adapters)
            chain = SamplerChain(vocab, request.sampling, n_ctx=self.n_ctx, banned=banned, masked=masked, dry=self._dry)
            undo.callback(chain.close)
            # Takes tens of milliseconds if penalties look back on a long prompt.
            chain.accept_prompt(request.prompt.texts())
            sequence = Sequence(request, chain, vocab, self.n_ctx, adapters, self._tools.sampler(request, chain))
            sequence.drafts = self._stepper.speculator.drafts_for(sequence, request.prediction)
            undo.pop_all()
        return sequence

    # The engine thread calls these.

    def _step(self) -> bool:
        if time.monotonic() >= self._look_again_at:
            self._look()
        self._stepper.step()
        self._tell()
        return self._stepper.has_work

    def _end(self, key: int, num_tokens: int) -> None:
        self._stepper.end(key, num_tokens)
        self._tell()

    def _tell(self) -> None:
        events, self._stepper.events = self._stepper.events, []
        # A call can be cancelled while a step runs: its events of that step are dropped.
        cancelled = self._intake.take_cancelled()
        if cancelled:
            events = [event for event in events if event.call not in cancelled]
        if events:
            self._step_number += 1
            self._emit(self._step_number, events)

    def _look(self) -> None:
        """Update the parts of `load` and `counters` that only the engine thread may compute."""
        self._num_used, self._num_idle = self._stepper.num_cells_needed, self._stepper.num_cells_idle
        self._adapter_names = self._stepper.adapter_names
        self._stepper.cache_report.look()
        self._look_again_at = time.monotonic() + LOOK_INTERVAL_S

    def _rest(self) -> None:
        """Compare the counts of KV cells with llama.cpp's, then copy idle prefixes to RAM. Called when no call runs."""
        self._look()
        if not self._thread.is_wanted:
            self._stepper.check_cells()
        while not self._thread.is_wanted and self._stepper.save_some():
            pass
        while not self._thread.is_wanted and self._stepper.cache_report.look(at_rest=True):
            pass

    def _check(self) -> None:
        self._stepper.check()

    def _end_all(self) -> None:
        self._stepper.end_all(self._intake.refusal)
        self._tell()


def _check_sizes(context: Context, slots: int, n_ctx: int) -> None:
    if n_ctx > context.kv_tokens:
        raise ValueError(f"n_ctx {n_ctx} is more than the {context.kv_tokens} cells that all slots share")
    if slots > context.slots:
        raise ValueError(f"{slots} slots on a context made for {context.slots} sequences")
