"""Decides which calls run and which wait: admits calls, lets them wait for each other's prefixes, and preempts them.

Calls are ordered by priority, then deadline, then arrival. A call enters (gets a slot) as soon as there are free KV
cells for its prompt and for the tokens that all answers are likely to add. If cells run out nevertheless, the last call
in order is preempted: its cells go to RAM, it waits again, and continues later without loss. The first call in order is
never preempted, so each call's turn comes. A call of a team that has more than its share is also preempted if a call of
a team that has less (`workers.engine.step.shares`) needs its slot, its cells or the memory that its adapters take.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Iterator

from workers.engine.adapters.registry import AdapterRegistry
from workers.engine.cache.cached_sequence import NOWHERE
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prompt import common
from workers.engine.counters import PromptTally
from workers.engine.pace import MOVE_S, AnswerLengths, PrefillPace
from workers.engine.step.sampling import within_share
from workers.engine.step.sequence import Sequence
from workers.engine.step.shares import FIRST_SLICE, gives_way, goes_before, is_shared, last_of, next_in
from workers.engine.step.step_plan import ROWS_MULTIPLES, Beside, Chunk, Limits, Plan, plan_step
from workers.protocol.events import CallEvent, CallFailed, Failure

MIN_WAIT_TOKENS = 16
"""Minimum number of tokens for which a call waits for another call's prefix; fewer are computed sooner."""

SPARE_CELLS = 3
"""Number of free KV cells kept for the empty rows with which a step may be padded (`BatchLayouts`)."""

CALM_STEPS = 64
"""Maximum number of steps in a row that repeat the last plan, without checking whether anything has to be decided."""

LATELY_S = 0.25
"""Seconds after an answer's end for which steps stay as short as while it ran: its team is likely to ask again soon."""


class Scheduler:
    """Keeps the calls of one engine, running and waiting. Only the engine's thread uses it and its sequences."""

    def __init__(
        self,
        cache: PrefixCache,
        adapters: AdapterRegistry,
        slots: int,
        limits: Limits,
        pace: PrefillPace,
        lengths: AnswerLengths,
    ) -> None:
        self.running: list[Sequence] = []
        """Calls that hold a slot, in order."""
        self.waiting: list[Sequence] = []
        self.num_preempted = 0
        self.num_sliced = 0
        """Times that a call was preempted for another team's call."""
        self.num_spare = 0
        """Number of KV cells that the planned step leaves free, after making room for `SPARE_CELLS` if possible."""
        self.prompts = PromptTally()
        self.refused: list[tuple[Sequence, Failure]] = []
        """Calls whose adapters could not be loaded; the caller of `admit` ends them."""
        self._cache = cache
        self._adapters = adapters
        self._limits = limits
        self._pace = pace
        # Slots are taken from the end: low numbers first, and the slot that was freed last is used next.
        self._free_slots = list(range(slots - 1, -1, -1))
        self._lengths = lengths
        self._was_media = False
        """Whether the last step that could choose computed cells of a picture or sound."""
        self._calm_steps = 0
        self._calm: Plan[Sequence] | None = None
        """The last plan, which the next `_calm_steps` steps repeat."""
        self._ended_at: dict[str, float] = {}
        """Team -> time.perf_counter() at the end of its last answer; entries are dropped after `LATELY_S`."""

    @property
    def has_work(self) -> bool:
        """Return whether a step can do something: whether a call runs, or waits for something other than the disk
        and the encoder."""
        return bool(self.running) or any(not (one.fetching or one.encoding) for one in self.waiting)

    def calm_plan(self) -> Plan[Sequence] | None:
        """Return the last plan if the next step can repeat it (all calls go on decoding, and have room); else None."""
        if self._calm_steps <= 0:
            return None
        self._calm_steps -= 1
        return self._calm

    def join(self, sequence: Sequence) -> None:
        self.disturb()
        sequence.waits_since = time.perf_counter()
        bisect.insort(self.waiting, sequence, key=_order)

    def disturb(self) -> None:
        """Have the next step planned anew instead of repeating the last plan."""
        self._calm_steps, self._calm = 0, None

    def note_taken(self, num_cells: int) -> None:
        """Note that a step took more cells than the one for each of its calls that was planned for it."""
        if self._calm is not None and num_cells > 0:
            self._calm_steps -= -(-num_cells // len(self._calm.decode))

    def find(self, key: int) -> Sequence | None:
        return next((one for one in (*self.running, *self.waiting) if one.key == key), None)

    def remove(self, sequence: Sequence, *, keep: bool) -> None:
        """Remove a call that is over. `keep`: leave its prefix in the cache, unless no other call may use it."""
        if sequence.slot == NOWHERE:
            self.waiting.remove(sequence)
            sequence.fetching = False
            if sequence.is_alone:
                self._cache.erase(sequence.path())
            return
        if sequence.num_predicted > 1:  # an answer of a single token is not followed by its reader
            self._ended_at[sequence.team] = time.perf_counter()
        self._step_down(sequence, keep=keep and not sequence.is_alone)
        if sequence.is_alone:
            self._cache.erase(sequence.path())

    def admit(self, may_enter: Callable[[Sequence], bool]) -> None:
        """Give slots to waiting calls that fit, preempting calls of other teams that have more than their share.

        `may_enter` returns whether nothing else keeps a call from entering, such as a prefix still to come from disk.
        """
        now = time.perf_counter()
        waiting, shared = self.waiting.copy(), self._is_shared
        roomless: list[Sequence] = []
        self._adapters.begin_round(one.adapter_set for one in self.running)
        while waiting and (self._free_slots or shared):
            sequence = next_in(waiting, self.running) if shared else waiting[0]
            waiting.remove(sequence)
            if not self._free_slots and self._giving_way(sequence, self.running, now) is None:
                break
            if not may_enter(sequence):
                continue
            if not self._has_adapters(sequence, roomless, now):
                continue
            if not self._make_way(sequence, now):
                break
            self.waiting.remove(sequence)
            sequence.slot = self._free_slot(sequence.request.asked.slot)
            sequence.slice.enter(now, sequence.num_predicted)
            sequence.read_at = now  # it does not go before those that have waited for their turn to read
            bisect.insort(self.running, sequence, key=_order)
            self._enter(sequence)
        self._enter_blocked()
        self._restore()

    def begin(self, events: list[CallEvent]) -> None:
        """Tell which calls begin: those in a slot of which this step can compute something for the first time."""
        for sequence in self.running:
            if sequence.ready and not sequence.started_at:
                sequence.num_cached = sequence.num_cells
                self.prompts.note(sequence)
                sequence.start(sequence.slot, time.perf_counter(), events)

    def plan(self, chosen: Callable[[list[Sequence]], list[Sequence]]) -> Plan[Sequence]:
        """Plan the next step and free the cells it needs. `chosen` picks the ready calls that can share a batch."""
        now, may_pass = time.perf_counter(), True
        while True:
            ready = chosen([sequence for sequence in self.running if sequence.ready])
            ready = within_share(ready, now if may_pass else math.inf)
            reader, ready = self._turn_of_media(ready)
            num_decode = sum(sequence.decoding for sequence in ready)
            if not (self._cache.make_room(num_decode + SPARE_CELLS) or self._cache.make_room(num_decode)):
                self._preempt()
                continue
            left = sum(sequence.num_prompt_left for sequence in ready)
            if left:
                # At least a tile of rows: a step of fewer may be padded.
                self._cache.make_room(num_decode + min(max(left, ROWS_MULTIPLES[0]), self._limits.n_ubatch))
            beside = self._beside(ready if reader is None else [reader, *ready], now)
            num_media = 0 if reader is None else self._num_media(reader, num_decode, beside)
            room = self._cache.num_free - num_media
            plan = plan_step(ready, self._limits, beside, room)
            if reader is not None and num_media:
                plan.media, reader.read_at = Chunk(reader, num_media), now
            if may_pass and left and not plan.prefill:
                may_pass = False  # no prompt could be computed after all, so no slow call has to be left out
                continue
            if plan.num_tokens or plan.media or not (ready or reader):
                self.num_spare = room - plan.num_tokens
                self._calm, self._calm_steps = plan, self._num_calm(plan, room)
                return plan
            self._preempt()

    def _turn_of_media(self, ready: list[Sequence]) -> tuple[Sequence | None, list[Sequence]]:
        """Return the call of which a step computes a picture or sound, or None, and the calls whose tokens it computes.

        Where both wait, pictures and prompts take turns, so that no step is longer for it. Answers go on in each."""
        readers = [one for one in ready if one.reads_media]
        if not readers:
            return None, ready
        others = [one for one in ready if not one.reads_media]
        self._was_media = not (self._was_media and any(one.num_prompt_left for one in others))
        if not self._was_media:
            return None, others
        return min(readers, key=_read_at), [one for one in others if not one.num_prompt_left]

    def _num_media(self, reader: Sequence, num_decode: int, beside: Beside) -> int:
        """Return how many cells of its picture or sound a step computes for a call; 0: there is no room for them."""
        num_cells, limits = reader.num_next, self._limits
        is_causal = reader.prompt.spans[reader.span].cells.is_causal
        if is_causal:
            most = min(max(beside.prompts, limits.min_prefill), beside.most) if beside.streams else limits.n_ubatch
            num_cells = min(num_cells, most)
        self._cache.make_room(num_decode + num_cells)
        room = self._cache.num_free - num_decode
        if num_cells <= room:
            return num_cells
        return max(0, room) if is_causal else 0

    def _beside(self, ready: list[Sequence], now: float) -> Beside:
        """Return the limits on a step's prompt tokens: lower ones if other teams' answers run or soon may."""
        pace = self._pace
        streams = [one.team for one in self.running if one.decoding]
        reading = {one.team for one in ready if one.num_prompt_left and not one.is_back}
        self._ended_at = {team: at for team, at in self._ended_at.items() if now - at < LATELY_S}
        soon = [team for team in self._ended_at if team not in streams and {team} != reading]
        are_others = bool(reading) and any(len(reading) > 1 or team not in reading for team in (*streams, *soon))
        most = pace.gentle if are_others else self._limits.n_ubatch
        return Beside(pace.budget, pace.again, most, len(streams) + len(soon))

    def check(self) -> None:
        """Raise ValueError if two calls hold one slot, a free slot is held, or a waiting call holds a slot or cells."""
        slots = [sequence.slot for sequence in self.running]
        if len(set(slots)) != len(slots) or set(slots) & set(self._free_slots):
            raise ValueError(f"slots are held twice: {slots}, free {self._free_slots}")
        if any(sequence.slot != NOWHERE or sequence.id != NOWHERE for sequence in self.waiting):
            raise ValueError("a waiting call holds a slot or cells")

    def _free_slot(self, wanted: int) -> int:
        """Take a free slot and return it: `wanted` if free, else another. All slots share the cached prompts."""
        if wanted not in self._free_slots:
            return self._free_slots.pop()
        self._free_slots.remove(wanted)
        return wanted

    @property
    def _is_shared(self) -> bool:
        """Return whether there is a waiting call, and calls (running or waiting) of at least two teams."""
        return bool(self.waiting) and is_shared(self.running, self.waiting)

    def _giving_way(self, newcomer: Sequence, running: list[Sequence], now: float) -> Sequence | None:
        keeps_parts = self._cache.keeps_parts
        part = 1.0 if any(one.team == newcomer.team for one in running) else FIRST_SLICE

        def has_had_slice(one: Sequence) -> bool:
            keeps_prompt = keeps_parts and not one.shifted
            return one.slice.is_over(now, one.num_predicted, keeps_prompt=keeps_prompt, part=part)

        return gives_way(running, newcomer, has_had_slice)

    def _make_way(self, sequence: Sequence, now: float) -> bool:
        """Free a slot and cells for a call, preempting other teams' calls if needed; return whether there is room."""

        def is_enough(staying: list[Sequence], leaving: list[Sequence]) -> bool:
            return bool(self._free_slots or leaving) and self._fits(sequence, staying, leaving)

        leaving = self._leaving(sequence, self.running, now, is_enough)
        self._slice(leaving or ())
        return leaving is not None

    def _has_adapters(self, sequence: Sequence, roomless: list[Sequence], now: float) -> bool:
        """Load a call's adapters; return whether they are in memory. If they find no room, add the call to `roomless`,
        this round's list of such calls, unless its team uses more adapters than its share (`_wide_teams`)."""
        try:
            return self._adapters.enter(sequence.adapter_set) or self._make_adapter_room(sequence, roomless, now)
        except CallFailed as failed:
            self.refused.append((sequence, failed.failure))
            return False

    def _make_adapter_room(self, sequence: Sequence, roomless: list[Sequence], now: float) -> bool:
        """Preempt other teams' calls to make room for a call's adapters; return whether the adapters are loaded now.
        Raises CallFailed.

        Only calls with adapters count towards a team's share. The call does not overtake calls in `roomless` of its own
        team, or of teams with a smaller share. It may overtake all others: otherwise one call that waits for its own
        team's calls to end would hold up every team. A wide team (`_wide_teams`) takes room only from wide teams."""
        users = [one for one in self.running if one.adapter_set.uses]
        wide = self._wide_teams([*users, sequence])
        is_wide = sequence.team in wide
        kept = [one for one in users if is_wide and one.team not in wide]
        owing = [one for one in users if one not in kept] if kept else users

        def fits(staying: list[Sequence], _: list[Sequence]) -> bool:
            return self._adapters.fits(sequence.adapter_set, (one.adapter_set for one in (*kept, *staying)))

        leaving = self._leaving(sequence, owing, now, fits)
        if leaving is None or any(goes_before(other, sequence, users) for other in roomless):
            if not is_wide:  # a wide team's call may wait for long, and must not hold back other teams' calls
                roomless.append(sequence)
            return False
        for one in reversed(leaving):
            others = [other for other in leaving if other is not one]
            if fits([other for other in owing if other not in others], others):
                leaving = others
        self._slice(leaving)
        return self._adapters.enter_beside(sequence.adapter_set, (one.adapter_set for one in self.running))

    def _wide_teams(self, users: Iterable[Sequence]) -> set[str]:
        """Return the wide teams: each uses more than one adapter, and more than `max_adapters` divided by the number of
        teams. Returns an empty set if all `users` are of one team."""
        own: dict[str, set[object]] = {}
        for one in users:
            own.setdefault(one.team, set()).update(one.adapter_set.entries)
        most = max(1, self._adapters.max_adapters // len(own))
        return {team for team, entries in own.items() if len(own) > 1 and len(entries) > most}

    def _leaving(
        self,
        sequence: Sequence,
        running: list[Sequence],
        now: float,
        is_enough: Callable[[list[Sequence], list[Sequence]], bool],
    ) -> list[Sequence] | None:
        """Return the calls of `running` to preempt so that `sequence` gets room; None: too few can be preempted.
        They are chosen one by one, until `is_enough(staying, leaving)` returns True."""
        leaving: list[Sequence] = []
        staying = running.copy()
        while not is_enough(staying, leaving):
            one = self._giving_way(sequence, staying, now)
            if one is None:
                return None
            staying.remove(one)
            leaving.append(one)
        return leaving

    def _slice(self, leaving: Iterable[Sequence]) -> None:
        """Preempt these calls for another team's call."""
        for one in leaving:
            self.num_sliced += 1
            one.slice.num_cut += not one.slice.resumed_at
            self._put_off(one)

    def _fits(self, sequence: Sequence, running: list[Sequence], leaving: list[Sequence]) -> bool:
        """Return whether, with `leaving` preempted, cells suffice for the call and what `running` will likely add."""
        if not running:
            return True
        match = self._cache.lookup(sequence)
        shared = match.num_held if any(one.id == match.holder for one in running) else 0
        demand = sequence.num_known - shared + self._growth(sequence)
        for one in running:
            demand += one.num_prompt_left - (one.waits_until if one.waits_for else 0) + self._growth(one)
        return demand <= self._cache.num_free + self._cache.num_idle_without(leaving)

    def _num_calm(self, plan: Plan[Sequence], room: int) -> int:
        """Return how many of the next steps can repeat the plan (see `CALM_STEPS`)."""
        calls = plan.decoding
        open_question = self.waiting and (self._free_slots or self._is_shared)
        if not calls or len(calls) < len(self.running) or plan.num_tokens > len(calls) or open_question:
            return 0
        if len({one.adapter_set.key for one in calls}) > 1 or any(one.request.asked.context_shift for one in calls):
            return 0
        return min(CALM_STEPS, (room - SPARE_CELLS) // len(calls) - 1)

    def _growth(self, sequence: Sequence) -> int:
        return int(self._lengths.left(sequence.num_predicted, sequence.limit))

    def _enter(self, sequence: Sequence) -> None:
        """Enter a call into the cache or, if another is computing a prefix of its prompt now, have it wait for that."""
        sequence.waits_for = None
        known = self._cache.lookup(sequence).num_known
        for source, num_common in self._sources(sequence):
            if num_common - known >= MIN_WAIT_TOKENS:
                sequence.waits_for, sequence.waits_until, known = source, num_common, num_common
        if sequence.waits_for is None:
            self._cache.enter(sequence)
        elif self._cache.needs_stops:
            sequence.waits_for.stops.add(sequence.waits_until)

    def _sources(self, sequence: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Yield each call that is computing a prefix of this call's prompt, with the number of tokens they share."""
        if not sequence.cache_prompt or sequence.shifted:
            return
        most = sequence.num_known - 1
        for one in self.running:
            if one is sequence or one.id == NOWHERE or one.decoding or one.shifted or not one.cache_prompt:
                continue
            if one.scope != sequence.scope:
                if one.scope.adapters != sequence.scope.adapters:
                    continue
                most = min(most, one.num_public, sequence.num_public)
            num_common = sequence.prompt.floor(min(common(one.tokens(), sequence.tokens()), most))
            if num_common > one.num_cells:
                yield one, num_common

    def _enter_blocked(self) -> None:
        for sequence in self.running:
            source = sequence.waits_for
            if source is not None and (source.id == NOWHERE or source.num_cells >= sequence.waits_until):
                self._enter(sequence)

    def _restore(self) -> None:
        """Restore saved prefixes of running calls, for about `MOVE_S` per step, so that other calls don't wait long."""
        until = time.perf_counter() + MOVE_S
        for sequence in self.running:
            while sequence.restores:
                self._cache.restore(sequence)
                if time.perf_counter() >= until:
                    return

    def _preempt(self) -> None:
        """Preempt one call because cells ran out, never the first in order."""
        holders = [sequence for sequence in self.running if sequence.id != NOWHERE]
        if len(holders) < 2:
            raise RuntimeError("one conversation does not fit the KV cache alone; this must not be possible")
        self.num_preempted += 1
        self._put_off(last_of(holders[1:]))

    def _put_off(self, sequence: Sequence) -> None:
        """Preempt a call: take its slot and cells away, and have it wait for them again."""
        sequence.num_preempted += 1
        sequence.decoding = False
        self._step_down(sequence, keep=True)
        self.join(sequence)

    def _step_down(self, sequence: Sequence, *, keep: bool) -> None:
        self.disturb()
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = NOWHERE
        sequence.waits_for = None
        if sequence.id != NOWHERE:
            self._cache.leave(sequence, keep=keep)


def _read_at(sequence: Sequence) -> float:
    return sequence.read_at


def _order(sequence: Sequence) -> tuple[float, float, int]:
    return sequence.order
