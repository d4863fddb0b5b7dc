"""Counts what an engine does: plain numbers that the engine's thread adds to and any thread may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.disk.tier import NO_DISK, DiskStats
from workers.engine.speculation.hit_rates import Source
from workers.engine.step.sequence import Sequence
from workers.metrics.types import DECODE_S, GAP_S, LOAD_S


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram: for each pair of neighbouring bounds, how many values fell between them."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """For each bound, the number of values up to it and above the bound before; then the number above all bounds."""
    total: float = 0.0
    """Sum of the values."""


class Tally:
    """A histogram that values are added to. Adding one takes some tenths of a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    @property
    def distribution(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


class TokenGaps:
    """Measures the seconds between a call's tokens, by the times at which steps made them, not when text is sent."""

    def __init__(self) -> None:
        self.tally = Tally(GAP_S)

    def note(self, sequences: Iterable[Sequence], now: float) -> None:
        """Record that a step which ended at `now` made a further token, not the first, for each of the sequences.

        Neighbours in `sequences` that got their previous token at the same time, as most do, are counted in one go."""
        last_at, count = now, 0
        for sequence in sequences:
            if sequence.token_at != last_at:
                if count:
                    self.tally.add(now - last_at, count)
                last_at, count = sequence.token_at, 0
            count += 1
            sequence.token_at = now
        if count:
            self.tally.add(now - last_at, count)


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Counts the prompt tokens of all calls that have begun, by the place that their KV came from."""

    computed: int = 0
    kv: int = 0
    """Tokens whose KV another sequence still had in the KV cache."""
    ram: int = 0
    disk: int = 0
    """Tokens that came from disk, through RAM."""


class PromptTally:
    """Counts the prompt tokens of each call once, when it begins."""

    def __init__(self) -> None:
        self.num_queried = 0
        """Prompt tokens of calls that may use the cache (`cache_prompt`)."""
        self._computed = self._kv = self._ram = self._disk = 0

    def note(self, sequence: Sequence) -> None:
        """Count a call's prompt. To be called once `num_cached` is known, before anything is computed for the call."""
        num_restored = min(sequence.num_restored, sequence.num_cached)
        num_disk = min(sequence.num_fetched, num_restored)
        self._computed += sequence.num_prompt - sequence.num_cached
        self._kv += sequence.num_cached - num_restored
        self._ram += num_restored - num_disk
        self._disk += num_disk
        if sequence.cache_prompt:
            self.num_queried += sequence.num_prompt

    @property
    def sources(self) -> PromptSources:
        return PromptSources(self._computed, self._kv, self._ram, self._disk)


NO_DRAFTS = (0,) * len(Source)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """A snapshot of what an engine has done since it started. Counters of things that the engine never does stay 0."""

    num_decodes: int = 0
    """Times that `llama_decode` was called."""
    num_busy: int = 0
    """Sum, over all runs of `llama_decode`, of the number of calls that held a slot during the run."""
    num_preempted: int = 0
    """Times that a call lost its KV cells for a while because no free cells were left."""
    num_sliced: int = 0
    """Times that a call of a team over its share gave its slot for a while to a call of another team."""
    num_packed: int = 0
    """Tokens that were moved within the KV cache to close gaps of free cells."""
    num_restored: int = 0
    """Tokens restored from RAM, for calls that begin and for calls that continue after a pause."""
    num_fetched: int = 0
    """Tokens fetched from disk to RAM."""
    num_queried: int = 0
    """Prompt tokens of calls that may use the cache (`cache_prompt`)."""
    sources: PromptSources = PromptSources()
    decode_s: Distribution = Tally(DECODE_S).distribution
    """Seconds that each run of `llama_decode` took."""
    gap_s: Distribution = Tally(GAP_S).distribution
    """Seconds between two consecutive tokens of a call."""
    idle_cells: int = 0
    """KV cells of prefixes that no running call uses."""
    ram_bytes: int = 0
    """Bytes of saved prefixes in RAM now."""
    ram_blocks: int = 0
    disk: DiskStats = NO_DISK
    """Counters of the disk tier; all zero without a disk tier."""
    num_switches: int = 0
    """Steps before which llama.cpp had to change adapters."""
    num_drafts: int = 0
    """Drafts that steps have computed, one for each call and step."""
    num_drafted: tuple[int, ...] = NO_DRAFTS
    """Tokens of these drafts, and (`num_accepted`) those of them that were drawn, by `Source`."""
    num_accepted: tuple[int, ...] = NO_DRAFTS
    adapters_loaded: int = 0
    """Adapters in memory now."""
    adapter_load_s: Distribution = Tally(LOAD_S).distribution
    """Seconds that each load of an adapter into memory took."""
    num_adapter_failures: int = 0
    """Adapter loads that failed."""
    max_adapters: int = 0
    adapters_running: tuple[str, ...] = ()
    """Names of the adapters that calls with a slot use, sorted."""
    adapters_waiting: tuple[str, ...] = ()
