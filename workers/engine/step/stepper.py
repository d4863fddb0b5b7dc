"""Runs steps: schedules calls, runs `llama_decode` for them, and draws each call's next token from the logits.

Only the engine's thread may use what is here, unless a docstring says otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from workers.engine.adapters.registry import AdapterRegistry
from workers.engine.adapters.turns import AdapterTurns, chosen
from workers.engine.cache.prefix_tree import Block
from workers.engine.cache.report import CacheReport
from workers.engine.cache.slots import SlotContents
from workers.engine.cache.window_cells import cache_class
from workers.engine.counters import EngineCounters, Tally, TokenGaps
from workers.engine.disk.link import DiskLink, DrainWriter
from workers.engine.pace import MOVE_S, AnswerLengths, MovePace, PrefillPace
from workers.engine.request import CallLeft, IntegrityError
from workers.engine.step.health import MemoryProbe, Spoilage
from workers.engine.step.media import MediaSpans
from workers.engine.step.scheduler import SPARE_CELLS, Scheduler
from workers.engine.step.sequence import NO_MEMORY, NOT_A_NUMBER, PENDING, Outcome, Pending, Sequence
from workers.engine.step.speculator import DraftSources, Speculator
from workers.engine.step.step_plan import (
    MULTIPLE,
    ROWS_MULTIPLES,
    BatchLayouts,
    Chunk,
    Decode,
    Layout,
    Limits,
    Plan,
    in_parts,
    padding,
    tile_padding,
)
from workers.llama.context import Context
from workers.llama.memory import MemoryKind
from workers.metrics.types import DECODE_S
from workers.process.black_box import BlackBox
from workers.protocol.events import CallEvent, Failed, Failure, FinishReason

log = logging.getLogger("paddock.engine")

MIN_PREFILL = 32

PENDING_S = 0.005
"""Maximum seconds that a step with nothing to compute waits for a call's mask. A new call may have to wait as long."""
KEPT_SHARE = 7 / 8
"""Maximum share of the context that `n_keep` keeps: shifts must be rare, as llama.cpp rotates the keys of all cells."""


class Stepper:
    """Advances all calls that have joined, one step at a time, until each is over."""

    def __init__(
        self,
        context: Context,
        adapters: AdapterRegistry,
        black_box: BlackBox,
        on_end: Callable[[int], None],
        disk: Callable[[MovePace, bool], DiskLink] | None = None,
        *,
        slots: int,
        n_ctx: int,
        ram_bytes: int,
        drafts: DraftSources,
        media: MediaSpans,
    ) -> None:
        """`on_end(key)` is called when a call is over and its slot, cells and adapters are released.

        `disk(pace, by_range)` makes the link to the disk tier; `by_range`: it saves blocks of tokens, not whole states.
        `n_ctx`: maximum length of one conversation, tokens. `ram_bytes`: maximum memory for prefixes in RAM. `drafts`:
        where drafts of answers come from."""
        self.events: list[CallEvent] = []
        """Events of the last steps; the caller takes them out."""
        self._context, self._n_ctx = context, n_ctx
        self._adapters = adapters
        self._black_box = black_box
        self._on_end = on_end
        limits = Limits(context.n_batch, context.n_ubatch, min_prefill=min(MIN_PREFILL, context.n_ubatch))
        self._pace = PrefillPace(MIN_PREFILL, context.n_ubatch, ROWS_MULTIPLES[0] if context.attends_in_tiles else 0)
        move = MovePace(self._pace)
        by_range = context.memory.kind.by_range
        self._disk = disk(move, by_range) if disk is not None and ram_bytes else None
        self._cache = cache_class(context.memory)(
            context.memory,
            kv_tokens=context.kv_tokens,
            num_sequences=context.num_sequences,
            ram_bytes=ram_bytes,
            pace=move,
            on_evict=self._evicted,
            on_unusable=self._unusable,
        )
        self.lengths = AnswerLengths()
        self._scheduler = Scheduler(self._cache, adapters, slots, limits, self._pace, self.lengths)
        self.slots = SlotContents(self._cache, self._scheduler.running, self._disk, num_slots=slots, n_ctx=n_ctx)
        self.cache_report = CacheReport(self._cache, self._disk)
        self._batch = context.new_batch()
        self._media = media
        self._adapter_turns: AdapterTurns[bytes] = AdapterTurns()
        self._can_pad = by_range and not context.memory.window  # which the rows of one micro-batch may be too many for
        self._layouts = BatchLayouts(fixed=context.on_gpu, can_pad=self._can_pad)
        self.speculator = Speculator(drafts, context, lambda: self._pace.steady_s, self.lengths, n_ctx=n_ctx)
        self._empty_tokens = np.full(ROWS_MULTIPLES[0], self._batch.padding_token, np.int32)
        self._scratch = context.num_sequences - 1
        self._num_decodes = self._num_busy = self._num_switches = 0
        self._decode_s = Tally(DECODE_S)
        self._gaps = TokenGaps()
        self._decoded_at = 0.0
        self._pending: list[Sequence] = []
        """Calls whose next token is drawn, but whose mask could not say yet whether the token is allowed."""
        self._drain_writer: DrainWriter | None = None
        self._probe, self._spoilage = MemoryProbe(), Spoilage()

    @property
    def num_running(self) -> int:
        """Return the number of calls that hold a slot."""
        return len(self._scheduler.running)

    @property
    def calls_left(self) -> tuple[tuple[CallLeft, ...], int]:
        """Return what each call with a slot has left to compute, and all prompt tokens left. For any thread."""
        lengths, calls = self.lengths, self._scheduler.running[:]
        running = tuple(CallLeft(one.num_prompt_left, lengths.left(one.num_predicted, one.limit)) for one in calls)
        waiting = sum(one.num_prompt_left for one in self._scheduler.waiting[:])
        return running, waiting + sum(one.num_prompt for one in running)

    @property
    def prefill_s(self) -> float:
        """Return the seconds that computing a prompt token takes; 0: not known yet."""
        return self._pace.steady_s

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self.slots.has_work

    @property
    def num_cells_needed(self) -> int:
        """Return the number of KV cells that running calls hold; idle prefixes can be evicted and do not count."""
        return self._cache.num_used - self._cache.num_idle

    @property
    def num_cells_idle(self) -> int:
        """Return the number of KV cells of idle prefixes."""
        return self._cache.num_idle

    @property
    def adapter_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of adapters that running calls use, and those that waiting calls use."""
        return _names(self._scheduler.running), _names(self._scheduler.waiting)

    @property
    def counters(self) -> EngineCounters:
        """Return a snapshot of the counters. For any thread; a step that runs meanwhile may be counted in part."""
        cache, prompts = self._cache, self._scheduler.prompts
        return EngineCounters(
            num_decodes=self._num_decodes,
            num_busy=self._num_busy,
            num_preempted=self._scheduler.num_preempted,
            num_sliced=self._scheduler.num_sliced,
            num_packed=cache.num_packed,
            num_restored=cache.num_restored,
            num_fetched=self._disk.num_fetched if self._disk else 0,
            num_queried=prompts.num_queried,
            sources=prompts.sources,
            decode_s=self._decode_s.distribution,
            gap_s=self._gaps.tally.distribution,
            ram_bytes=cache.ram.num_bytes,
            ram_blocks=cache.ram.num_blocks,
            num_switches=self._num_switches,
            num_drafts=self.speculator.num_drafts,
            num_drafted=tuple(self.speculator.num_drafted),
            num_accepted=tuple(self.speculator.num_accepted),
        )

    def join(self, sequence: Sequence) -> None:
        """Add a new call."""
        self._scheduler.join(sequence)
        self.speculator.join(sequence)
        if sequence.prompt.spans:
            self._media.want(sequence, self._num_kept(sequence))
        self._black_box.began(sequence.key, sequence.request.label)

    def _num_kept(self, sequence: Sequence) -> int:
        """Return how many of a call's tokens are in memory or on disk."""
        known = self._cache.lookup(sequence).num_known
        return known if self._disk is None else self._disk.num_known(sequence.path(), known, sequence.num_known - 1)

    def drop(self, key: int) -> None:
        """Remove a call that was cancelled, without an event; unknown keys are ignored."""
        sequence = self._scheduler.find(key)
        if sequence is not None:
            self._forget(sequence)

    def end(self, key: int, num_tokens: int) -> None:
        """End an answer after its first `num_tokens` tokens, as its caller wants no more; unknown keys are ignored."""
        sequence = self._scheduler.find(key)
        if sequence is not None:
            num_dropped = max(0, sequence.num_predicted - num_tokens)
            sequence.num_predicted -= num_dropped
            if self._cache.truncate(sequence, sequence.num_known - num_dropped):
                sequence.cut(num_dropped)
            self._finish(sequence, FinishReason.STOP)

    def step(self) -> None:
        started_at = time.perf_counter()
        if self._pending:
            self._resume()
        plan = self._schedule()
        if not self._probe.has_memory(plan):
            for sequence in tuple(self._scheduler.running):
                self._fail(sequence, NO_MEMORY)
            return
        if plan.prefill:
            for part in self._parts(plan):
                self._run(part, self._num_empty(part))
                self._sample(part)
        elif plan.decode:
            self._decode(plan, started_at)
        if plan.media is not None:
            self._read_media(plan.media)
        elif not plan.num_tokens:
            self._wait()

    def _wait(self) -> None:
        """Wait a little for what calls with a slot wait for, since there is nothing to compute."""
        if any(one.encoding for one in self._scheduler.running):
            self._media.wait(PENDING_S)
        elif self._pending and (is_ready := self._pending[0].pending) is not None:
            is_ready(PENDING_S)

    def end_all(self, failure: Failure) -> None:
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._fail(sequence, failure)
        self.slots.close(failure)

    def save_some(self) -> bool:
        """Copy a part of an idle prefix to RAM, while no call runs; return whether there is more to copy."""
        return self._cache.save_some()

    def retire(self) -> None:
        """Begin to write idle prefixes to disk, if there is a disk tier: a part in each step."""
        if self._disk is not None and self._drain_writer is None:
            self._drain_writer = DrainWriter(self._cache, self._disk)

    def stay(self) -> None:
        """Write to disk only what leaves RAM again: undo `retire`."""
        self._drain_writer = None

    def write_out(self, deadline_s: float) -> None:
        """Write all prefixes to disk within `deadline_s`, if there is a disk tier. Called last, when an engine ends."""
        if self._disk is not None:
            until = time.monotonic() + deadline_s
            self._cache.save_idle(partial(self._disk.write, until=until))
            self._disk.write_out(list(self._cache.ram.blocks), until)

    def check_cells(self) -> None:
        """Do the quick part of `check`: compare each sequence's cells with llama.cpp's. Raises IntegrityError."""
        self._cache.check_cells()

    def check(self) -> None:
        """Check that the engine's records agree with each other and with llama.cpp's cache. Raises IntegrityError."""
        try:
            self._scheduler.check()
        except ValueError as error:
            raise IntegrityError(str(error)) from error
        self._cache.check()
        self.speculator.check()
        self._adapters.check(one.adapter_set for one in (*self._scheduler.running, *self._scheduler.waiting))

    def _schedule(self) -> Plan[Sequence]:
        """Admit calls that fit, then decide what this step computes."""
        scheduler = self._scheduler
        if self._spoilage.is_noted and not scheduler.running:
            self._clean()
        plan = scheduler.calm_plan()
        if plan is None:
            self._admit()
            self._media.look(scheduler.running)
            scheduler.begin(self.events)
            self._shift_full()
            plan = scheduler.plan(self._of_one_turn)
        self._cache.tidy(self._num_decodes, MOVE_S)
        self.slots.move(MOVE_S)
        if self._drain_writer is not None:
            self._drain_writer.go_on(MOVE_S)
        return plan

    def _admit(self) -> None:
        scheduler = self._scheduler
        scheduler.admit(self._may_enter)
        refused, scheduler.refused = scheduler.refused, []
        for sequence, failure in refused:
            self._fail(sequence, failure)
        for sequence, failure in self._media.unreadable((*scheduler.running, *scheduler.waiting)):
            self._fail(sequence, failure)

    def _clean(self) -> None:
        """Clear the cache: without flash attention, a cell with a NaN spoils all sequences, even a free cell."""
        log.error("a call ended because its logits were not numbers; all cached prompts are forgotten")
        self._cache.forget_all()
        self._spoilage.clear()

    def _parts(self, plan: Plan[Sequence]) -> Iterable[Plan[Sequence]]:
        """Cut a step into batches that llama.cpp can compute: with a sliding window, at most `n_ubatch` tokens each."""
        memory, n_ubatch = self._context.memory, self._context.n_ubatch
        alike = memory.kind is MemoryKind.HYBRID and bool(plan.prefill)
        if not memory.window or (plan.num_tokens <= n_ubatch and not alike):
            return (plan,)
        return in_parts(plan, n_ubatch, alike=alike)

    def _num_empty(self, plan: Plan[Sequence]) -> int:
        """Return how many empty rows to add to a step with prompts, since some numbers of rows are computed faster.

        Those that make a number even are not added for a single sequence, as in llama-server. No rows are added if the
        KV cache or the batch has no room for them."""
        most = min(self._scheduler.num_spare, self._batch.capacity - plan.num_tokens)
        if self._context.attends_in_tiles and self._can_pad:
            parts = [(one.num_tokens, one.sequence.num_cells) for one in plan.decode]
            parts += [(one.num_tokens, one.sequence.num_cells) for one in plan.prefill]
            if 0 < (num_empty := tile_padding(parts)) <= most:
                return num_empty
        alone = len(plan.decode) + len(plan.prefill) == 1
        return 0 if alone or most < MULTIPLE else self._layouts.num_empty(plan.num_tokens)

    def _decode(self, plan: Plan[Sequence], started_at: float) -> None:
        """Run a step without prompts, with drafts if they pay, else in the quickest layout for its number of rows.

        `started_at`: time.perf_counter() when the step began to be planned."""
        num_media = 0 if plan.media is None else plan.media.num_tokens
        drafted = self.speculator.extend(plan, partial(self._has_room, num_media))
        if drafted is not None:
            self._decode_drafted(drafted, started_at)
            return
        num_rows = plan.num_tokens
        layout = self._layouts.choose(num_rows)
        start = time.perf_counter()
        if layout is Layout.SINGLY:
            for one in plan.decode:
                alone = Plan([one], plan.prefill)
                self._run(alone)
                self._sample(alone)
        else:
            has_room = self._scheduler.num_spare >= SPARE_CELLS
            num_empty = padding(num_rows) if layout is Layout.PADDED and has_room else 0
            for part in self._parts(plan):
                self._run(part, num_empty)
                self._sample(part)
        self._layouts.note(num_rows, layout, time.perf_counter() - start)
        self.speculator.note_plain(num_rows, time.perf_counter() - started_at)

    def _decode_drafted(self, plan: Plan[Sequence], started_at: float) -> None:
        """Run a step with drafts, and draw tokens as far as they are the drafted ones."""
        before = _num_predicted(plan)
        self._run(plan)
        self._sample(plan)
        num_tokens = _num_predicted(plan) - before
        self._scheduler.note_taken(num_tokens - len(plan.decode))
        self.speculator.note_drafted(plan, num_tokens, time.perf_counter() - started_at)

    def _has_room(self, num_media: int, num_cells: int) -> bool:
        """Return whether cells are free for so many rows, beside those of a picture that the step reads after them."""
        return self._cache.make_room(num_media + num_cells + SPARE_CELLS)

    def _run(self, plan: Plan[Sequence], num_empty: int = 0) -> None:
        """Compute the rows of a plan, and `num_empty` more that belong to no call, by one `llama_decode`."""
        batch = self._batch
        batch.clear()
        add_token = batch.add_token
        for decode in plan.decode:
            sequence = decode.sequence
            num_cells = sequence.num_cells
            sequence.row = add_token(sequence.token, num_cells - sequence.position_lag, sequence.id)
            if decode.draft:
                for token in decode.draft:
                    num_cells += 1
                    add_token(token, num_cells - sequence.position_lag, sequence.id)
            sequence.num_cells = num_cells + 1
        for chunk in plan.prefill:
            sequence = chunk.sequence
            position = sequence.prompt.position(sequence.num_cells)
            tokens = sequence.take_chunk(chunk.num_tokens)
            num_logits = len(tokens) if sequence.tells_prompt else int(sequence.num_prompt_left == 0)
            sequence.row = batch.add_prompt(tokens, position, sequence.id, num_logits=num_logits)
        if plan.prefill and num_empty > MULTIPLE:  # they fill a tile of attention's; logits would cost more than that
            batch.add_prompt(self._empty_tokens[:num_empty], 0, self._scratch, num_logits=0)
        else:
            for position in range(num_empty):
                add_token(batch.padding_token, position, self._scratch)
        first = plan.decode[0] if plan.decode else plan.prefill[0]
        switched = self._adapters.apply(first.sequence.adapter_set)
        start = time.perf_counter()
        self._context.decode(batch)
        self._decoded_at = time.perf_counter()
        seconds = self._decoded_at - start
        if num_empty:
            self._context.memory.remove(self._scratch)
        if not plan.has_drafts:
            self._pace.note(plan.num_tokens, seconds)
        is_plain = not (plan.prefill or plan.has_drafts)
        self._adapter_turns.note_step(seconds, switched=switched, comparable=is_plain)
        self._decode_s.add(seconds)
        self._gaps.note(plan.decoding, self._decoded_at)
        self._num_decodes += 1
        self._num_busy += self.num_running
        self._num_switches += switched

    def _read_media(self, chunk: Chunk[Sequence]) -> None:
        """Compute cells of a picture or sound."""
        sequence = chunk.sequence
        switched = self._adapters.apply(sequence.adapter_set)
        start = time.perf_counter()
        self._media.compute(chunk)
        self._decoded_at = time.perf_counter()
        self._pace.note(chunk.num_tokens, self._decoded_at - start)
        self._decode_s.add(self._decoded_at - start)
        self._num_decodes += 1
        self._num_busy += self.num_running
        self._num_switches += switched
        self._sample(Plan([], [chunk]))

    def _of_one_turn(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the calls whose adapters have the turn. At most one of them is a call that wants the probabilities of
        its prompt's tokens: there is memory for the logits of only one prompt."""
        ready = chosen(self._adapter_turns, ready, time.perf_counter())
        later = [one for one in ready if one.tells_prompt][1:]
        return [one for one in ready if one not in later] if later else ready

    def _shift_full(self) -> None:
        """Drop the older half of each conversation that fills its context, except the tokens that `n_keep` keeps. This
        may take several steps. End a conversation if there is no room for this."""
        until = time.perf_counter() + MOVE_S
        for sequence in [one for one in self._scheduler.running if one.is_full]:
            num_kept = sequence.num_prompt if sequence.request.asked.n_keep < 0 else sequence.request.asked.n_keep
            num_kept = min(num_kept, int(self._n_ctx * KEPT_SHARE))
            end = num_kept + (sequence.num_cells - num_kept) // 2
            if not self._cache.shift(sequence, num_kept, end, until):
                self._finish(sequence, FinishReason.LENGTH)

    def _sample(self, plan: Plan[Sequence]) -> None:
        context, events = self._context, self.events
        ended: list[tuple[Sequence, Outcome]] = []
        if not plan.has_drafts and all(sequence.is_plain for sequence in plan.decoding):
            self._pick_likeliest(plan.decoding, ended)
        else:
            for one in plan.decode:
                outcome = self._pick(one.sequence)
                if one.draft:
                    outcome = self._verify(one, outcome)
                if outcome is not None:
                    ended.append((one.sequence, outcome))
        for chunk in plan.prefill:
            sequence = chunk.sequence
            sequence.tell_progress(self._decoded_at, events)
            if sequence.tells_prompt and (failure := sequence.tell_prompt(context, events)) is not None:
                ended.append((sequence, failure))
                continue
            if not sequence.num_prompt_left or sequence.num_cells in sequence.stops:
                self._cache.reached(sequence)
            if not sequence.num_prompt_left and (outcome := self._first(sequence)) is not None:
                ended.append((sequence, outcome))
        self._end(ended)

    def _resume(self) -> None:
        """Continue with the drawn tokens of calls whose masks can now say whether the token is allowed."""
        waiting, self._pending = self._pending, []
        ended: list[tuple[Sequence, Outcome]] = []
        for sequence in waiting:
            if sequence.pending is None or not sequence.decoding:
                continue  # the call is over, or was preempted: then its mask is asked again when it is back
            outcome: Outcome = PENDING
            if sequence.pending(0.0):
                outcome = self._pick(sequence, again=True)
            if outcome is not None:
                ended.append((sequence, outcome))
        self._end(ended)

    def _pick(self, sequence: Sequence, *, again: bool = False) -> Outcome:
        """Draw a call's next token; `again`: continue with the one already drawn. Record the processor time used."""
        before = time.thread_time()
        outcome = sequence.resume(self.events) if again else sequence.pick(self._context, self.events)
        cost = sequence.cost
        cost.note(time.thread_time() - before)
        if cost.is_quick:
            return outcome
        self._scheduler.disturb()
        return (None if self.num_running == 1 else cost.failure()) or outcome

    def _pick_likeliest(self, sequences: list[Sequence], ended: list[tuple[Sequence, Outcome]]) -> None:
        """Draw the next token of calls that draw the likeliest one, which have the batch's first rows. Add those that
        are over to `ended`. As these draws take microseconds, no time is measured for each."""
        if not sequences:
            return
        context, events = self._context, self.events
        for sequence, token in zip(sequences, context.likeliest_of(len(sequences)), strict=True):
            outcome = sequence.pick_likeliest(token, context, events)
            if outcome is not None:
                ended.append((sequence, outcome))

    def _verify(self, one: Decode[Sequence], outcome: Outcome) -> Outcome:
        """Draw tokens until one differs from the draft or ends the answer; drop the cells of the rest of the draft.

        Each token is drawn from the logits after the tokens before it, so the answer is the same as without a draft."""
        sequence, num_accepted, num_kept = one.sequence, 0, 0
        if not self._context.is_number(sequence.row + len(one.draft), 0):
            self._spoilage.note()  # by cells of a guess perhaps, so that the call may go on
        for token in one.draft:
            if isinstance(outcome, Failure | Pending) or sequence.token != token:
                break
            num_accepted += 1
            if outcome is not None:
                break
            sequence.row += 1
            num_kept += 1
            outcome = self._pick(sequence)
        self._cache.truncate(sequence, sequence.num_cells - len(one.draft) + num_kept, is_draft=True)
        self._gaps.tally.add(0.0, num_accepted)  # they come with the token before them
        self.speculator.note_verified(one, num_accepted)
        return outcome

    def _first(self, sequence: Sequence) -> Outcome:
        """Draw a token for a call whose prompt, and answer so far after a preemption, have just been computed."""
        outcome: Outcome = FinishReason.LENGTH
        if sequence.limit:
            if sequence.token_at:
                self._gaps.note((sequence,), self._decoded_at)
            sequence.token_at = self._decoded_at
            sequence.slice.resume(self._decoded_at, again=sequence.num_predicted > 0)
            outcome = self._pick(sequence)
            sequence.decoding = True
        if not sequence.first_token_at:
            sequence.first_token_at = time.perf_counter()
        return outcome

    def _end(self, ended: Iterable[tuple[Sequence, Outcome]]) -> None:
        """End the calls that are over; note in `_pending` those whose mask can't say yet if the token is allowed."""
        for sequence, outcome in ended:
            if isinstance(outcome, Pending):
                self._pending.append(sequence)
                self._scheduler.disturb()
            elif isinstance(outcome, Failure):
                self._fail(sequence, outcome)
            elif outcome is not None:
                self._finish(sequence, outcome)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.events.append(sequence.finished(reason, time.perf_counter()))
        self.lengths.note(sequence.num_predicted)
        self._forget(sequence)

    def _fail(self, sequence: Sequence, failure: Failure) -> None:
        if failure is NOT_A_NUMBER:
            self._spoilage.note()
        self._forget(sequence, keep=failure is not NOT_A_NUMBER)
        self.events.append(Failed(sequence.key, failure))

    def _forget(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Release everything that the call holds. `keep`: its prefix stays in the cache for later calls."""
        sequence.chain.close()
        sequence.pending = None
        sequence.encodings.clear()
        if keep:
            self.speculator.ended(sequence)
        self._adapters.release(sequence.adapter_set)
        self.slots.ended(sequence, keep=keep)
        self._scheduler.remove(sequence, keep=keep)
        if sequence.started_at and sequence.cache_prompt:
            self.cache_report.ended(sequence)
        self._black_box.ended(sequence.key)
        self._on_end(sequence.key)

    def _may_enter(self, sequence: Sequence) -> bool:
        if self._spoilage.is_fresh:
            return False
        if self._disk is not None and not self._disk.may_enter(sequence, self._cache):
            return False
        return self._media.may_enter(sequence, self._cache)

    def _evicted(self, block: Block) -> None:
        if self._disk is not None:
            self._disk.evicted(block)

    def _unusable(self, block: Block) -> None:
        if self._disk is not None:
            self._disk.unusable(block)


def _num_predicted(plan: Plan[Sequence]) -> int:
    return sum(sequence.num_predicted for sequence in plan.decoding)


def _names(sequences: list[Sequence]) -> tuple[str, ...]:
    return tuple(sorted({entry.name for one in sequences for entry, _ in one.adapter_set.uses}))
