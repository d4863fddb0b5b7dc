"""Reports how much of each ended conversation is still cached here. Gateways place the next calls by these reports.

Conversations are looked up like a new call's prompt, so the report covers cells, RAM and disk and any kind of memory.
They are looked up again after something cached was lost, a few at a time between two steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from workers.engine.cache.cached_sequence import CachedSequence
from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.cache.prompt import Path

LOOK_S = 0.0005
"""Seconds after which one `look` stops, and the next goes on. 16k tokens take 30 us, or up to 2 ms with the disk."""

PASS_S = 1.0
"""Minimum seconds between two passes over all conversations. One begins if cached tokens were lost since the last."""

DISK_S = 30.0
"""Seconds until conversations are looked up on disk again, as other workers write there. A lookup hashes each block."""

MAX_CONVERSATIONS = 8192

MAX_TOKENS = 16 << 20
"""Maximum tokens of all conversations (64 MiB; 2,048 for each of `MAX_CONVERSATIONS`). The oldest are dropped first."""


class DiskLookup(Protocol):
    """The part of `workers.engine.disk.link.DiskLink` that the report needs."""

    def num_known(self, path: Path, known: int, limit: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Found:
    """How much of one conversation is cached. `key`: the key of the conversation's last call."""

    key: int
    num_known: int
    """Number of the conversation's first tokens that need not be computed; 0: none, or it is no longer looked up."""
    stops: tuple[int, ...] | None = None
    """Lengths at which another conversation can branch off, ascending; None: any length up to `num_known`."""


@dataclass(slots=True)
class _Entry:
    path: Path
    told: Found | None = None
    """The finding that was last handed out by `take`, or waits for it; None: there was none yet."""
    in_memory: int = -1
    """Number of the conversation's first tokens in memory when `on_disk` was last looked up; -1: never looked up."""
    on_disk: int = 0
    """Number of the conversation's first tokens that are in memory or on disk."""
    until: float = 0.0
    """Time until which `on_disk` counts as current, `time.monotonic` seconds."""


class CacheReport:
    """Looks up what is cached of ended conversations. Belongs to the engine's thread; any thread may call `take`."""

    def __init__(
        self, cache: PrefixCache, disk: DiskLookup | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self._num_tokens = 0
        self._due: deque[int] = deque()
        self._found: deque[Found] = deque()
        self._num_losses = 0
        self._began_at = clock()

    def ended(self, sequence: CachedSequence) -> None:
        """Begin to look up the conversation of a call that has ended, and whose prefix other calls may share."""
        path = sequence.path()
        if sequence.shifted:
            path = Path(sequence.prompt.ids(), sequence.scope, sequence.num_public)
        self._remove(sequence.key)
        self._entries[sequence.key] = _Entry(path)
        self._num_tokens += len(path.tokens)
        self._due.appendleft(sequence.key)
        while len(self._entries) > MAX_CONVERSATIONS or self._num_tokens > MAX_TOKENS:
            oldest = next(iter(self._entries))
            self._remove(oldest)
            self._found.append(Found(oldest, 0))

    def forget(self, keys: Iterable[int]) -> None:
        """Stop looking up these conversations; unknown ones are ignored."""
        for key in keys:
            self._remove(key)

    def look(self, seconds: float = LOOK_S, *, at_rest: bool = False) -> bool:
        """Look up due conversations for about `seconds`; return whether more are due. `at_rest`: the engine is idle, so
        a pass need not wait for `PASS_S`."""
        if not self._due:
            self._begin(at_rest)
        until = time.perf_counter() + seconds
        while self._due:
            key = self._due.popleft()
            entry = self._entries.get(key)
            if entry is not None:
                self._tell(key, entry)
                if time.perf_counter() >= until:
                    break
        return bool(self._due)

    def take(self) -> list[Found]:
        """Return the findings that changed since `take` was last called. Any thread may call this."""
        return [self._found.popleft() for _ in range(len(self._found))]

    def _begin(self, at_rest: bool) -> None:
        since = self._clock() - self._began_at
        lost = self._cache.index.num_losses != self._num_losses and (at_rest or since >= PASS_S)
        if self._entries and (lost or (self._disk is not None and since >= DISK_S)):
            self._began_at = self._clock()
            self._num_losses = self._cache.index.num_losses
            self._due.extend(self._entries)

    def _tell(self, key: int, entry: _Entry) -> None:
        found = self._look_up(key, entry)
        if found == entry.told:
            return
        entry.told = found
        self._found.append(found)
        if not found.num_known:
            self._remove(key)

    def _remove(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_tokens -= len(entry.path.tokens)

    def _look_up(self, key: int, entry: _Entry) -> Found:
        path, end, index = entry.path, len(entry.path.tokens), self._cache.index
        if not self._cache.needs_stops:
            return Found(key, self._with_disk(entry, index.match(path, end).num_known, end))
        stops = index.stops(path, end)
        in_memory = stops[-1] if stops else 0
        known = self._with_disk(entry, in_memory, end)
        return Found(key, known, stops if known == in_memory else (*stops, known))

    def _with_disk(self, entry: _Entry, in_memory: int, end: int) -> int:
        if self._disk is None or in_memory >= end - 1:
            return in_memory
        now = self._clock()
        if entry.in_memory != in_memory or now >= entry.until:
            entry.on_disk = self._disk.num_known(entry.path, in_memory, end)
            entry.in_memory, entry.until = in_memory, now + DISK_S
        return entry.on_disk


class CacheReportProxy:
    """The part of the cache report that any thread may use."""

    def __init__(self, report: CacheReport, post: Callable[[Callable[[], None]], None]) -> None:
        self._report = report
        self._post = post

    def take(self) -> list[Found]:
        return self._report.take()

    def forget(self, keys: Iterable[int]) -> None:
        self._post(partial(self._report.forget, list(keys)))
