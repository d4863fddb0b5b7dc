"""The shelf of LoRA adapters: which names stand for which weights, who uses them, and which ones stay in memory.

Two sides use it. Any thread may `load`, `unload`, `resolve`, `release` and `infos`: names and counts are guarded by a
lock that is never held for long. Weights are touched on the engine's thread alone (`bring`, `apply`, and what `load`
and `unload` post there), because llama.cpp's list of a model's adapters has no lock of its own and `llama_decode` walks
it. A file is read and checked on the thread that loads it, so what is left for the engine is a copy from the page
cache: for 35 MB 19 ms three times (about a step of a 0.5 B model) and 110 ms once.
"""

from __future__ import annotations

import itertools
import math
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from workers.engine.adapter_set import NO_ADAPTERS, AdapterSet, Entry
from workers.engine.cache import IntegrityError
from workers.llama.adapters import Adapter, AdapterError, AdapterFile, AppliedAdapters, inspect
from workers.llama.context import Context
from workers.llama.model import Model
from workers.protocol.adapters import AdapterInfo
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import AdapterUse

Post = Callable[[Callable[[], None]], None]
"""Has an act carried out on the engine's thread, between two steps."""

MAX_SCALE = 16.0
"""Either way. A scale of a million makes infinities in the KV cache; attention without flash attention multiplies the
cells of other sequences by zero instead of skipping them, so every call on the worker would get NaN (measured)."""

MAX_SET = 8
"""Adapters of one call; each adds its own products to every layer."""

MAX_NAMES = 4096
LOAD_S = 120.0

NUM_LOADS = 8
"""The last ones, of which `load_ms` is the median."""


class AdapterShelf:
    """At most `max_adapters` adapters and `max_bytes` of them (0: no bound) are in memory.

    The one used longest ago makes room; one that a call uses, or that is pinned, stays. Evicted ones come back from
    their files when they are named. A worker's memory is bounded by refusing calls, not by letting them wait: where
    calls in progress use all places, a call for yet another adapter is refused as BUSY.
    """

    def __init__(self, model: Model, context: Context, *, max_adapters: int = 8, max_bytes: int = 0) -> None:
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self._model = model
        self._applied = AppliedAdapters(context.pointer)
        self._post: Post = _at_once
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._leaving: list[Entry] = []
        self._ticks = itertools.count(1)
        self._load_ms: deque[float] = deque(maxlen=NUM_LOADS)

    # From any thread.

    def follow(self, post: Post) -> None:
        """From here on an engine's thread carries out what touches weights. Until then it is the caller's own."""
        self._post = post

    def load(self, name: str, path: Path, *, pinned: bool = False) -> AdapterInfo:
        """Check and load a file under a name; blocks for as long as reading it takes.

        A name that stands for other contents gets the new ones; calls that use the old ones keep them. Raises
        AdapterError, and CallFailed: BUSY (no room), INTERNAL (the engine is gone).
        """
        file = inspect(path, self._model.header, max_bytes=self.max_bytes)
        with self._lock:
            if name not in self._entries and len(self._entries) >= MAX_NAMES:
                raise _refused(f"{MAX_NAMES} adapters are known; unload some first", "name")
        done: Future[AdapterInfo] = Future()
        self._post(partial(_answer, done, partial(self._place, name, file, pinned)))
        try:
            return done.result(LOAD_S)
        except TimeoutError:
            message = f"the engine did not take adapter {name!r} within {LOAD_S:.0f} s; ask again"
            raise CallFailed(Failure(FailureCode.INTERNAL, message)) from None

    def unload(self, name: str) -> AdapterInfo:
        """Refuse new calls with it; free it when the last call that uses it has ended. Raises CallFailed."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                raise self._unknown(name)
            self._retire(entry)
            info = entry.info()
        self._post(self._sweep)
        return info

    def infos(self) -> list[AdapterInfo]:
        """Known ones by name, then those that are leaving."""
        with self._lock:
            return [entry.info() for entry in (*sorted(self._entries.values(), key=_name), *self._leaving)]

    @property
    def num_loaded(self) -> int:
        """Adapters in memory."""
        with self._lock:
            return sum(entry.adapter is not None for entry in self._all())

    @property
    def load_ms(self) -> float:
        """What bringing one into memory took lately, its median; 0: not known yet."""
        return statistics.median(self._load_ms) if self._load_ms else 0.0

    @property
    def room(self) -> int:
        """Adapters that could be brought into memory now: those in use, and pinned ones, stay."""
        with self._lock:
            fixed = [entry for entry in self._all() if entry.num_calls or entry.pinned]
            sizes = [entry.file.size for entry in self._entries.values()]
        places = self.max_adapters - len(fixed)
        if not self.max_bytes or not sizes:
            return places
        return max(0, min(places, (self.max_bytes - sum(entry.file.size for entry in fixed)) // max(sizes)))

    def resolve(self, uses: tuple[AdapterUse, ...]) -> AdapterSet:
        """Names -> weights that stay until `release`, due once. Raises CallFailed: INVALID_REQUEST, BUSY."""
        if not uses:
            return NO_ADAPTERS
        if len({use.name for use in uses}) < len(uses) or len(uses) > MAX_SET:
            raise _refused(f"a call may use at most {MAX_SET} adapters, each once; {len(uses)} are named")
        with self._lock:
            chosen: list[tuple[Entry, float]] = []
            for use in uses:
                scale = _checked_scale(use)
                entry = self._entries.get(use.name)
                if entry is None:
                    raise self._unknown(use.name)
                if scale:
                    chosen.append((entry, scale))
            self._require_room([entry for entry, _ in chosen])
            for entry, _ in chosen:
                entry.num_calls += 1
                entry.last_use = next(self._ticks)
        parts = sorted(((_part(entry, scale), entry, scale) for entry, scale in chosen), key=lambda part: part[0])
        return AdapterSet(b"".join(part[0] for part in parts), tuple((entry, scale) for _, entry, scale in parts))

    def release(self, adapters: AdapterSet) -> None:
        """The call is over."""
        with self._lock:
            for entry, _ in adapters.uses:
                entry.num_calls -= 1
            is_last = any(entry.leaving and not entry.num_calls for entry, _ in adapters.uses)
        if is_last:
            self._post(self._sweep)

    # On the engine's thread.

    def bring(self, adapters: AdapterSet) -> None:
        """Have the weights of a held set in memory. Raises CallFailed: a file is gone or has changed."""
        for entry, _ in adapters.uses:
            if entry.adapter is None:
                try:
                    self._load(entry)
                except AdapterError as error:
                    message = f"adapter {entry.name!r} can't be brought back: {error}"
                    raise CallFailed(Failure(FailureCode.INTERNAL, message, "adapters")) from None

    def apply(self, adapters: AdapterSet) -> bool:
        """Compute the next step with a set that `bring` had in memory -> whether llama.cpp has to switch."""
        return self._applied.apply(tuple((_weights(entry), scale) for entry, scale in adapters.uses))

    def check(self, held: Iterable[AdapterSet]) -> None:
        """Compare the book with the sets that live calls hold. Raises IntegrityError."""
        counts: dict[Entry, int] = {}
        for adapters in held:
            for entry, _ in adapters.uses:
                counts[entry] = counts.get(entry, 0) + 1
        with self._lock:
            resident = [entry for entry in self._all() if entry.adapter is not None]
            for entry, count in counts.items():
                if entry.num_calls < count:
                    raise IntegrityError(f"adapter {entry.name}: {count} calls use it, {entry.num_calls} by the book")
        if len(resident) > self.max_adapters:
            raise IntegrityError(f"{len(resident)} adapters are in memory, {self.max_adapters} may be")

    def close(self) -> None:
        """Free everything; no call may be left. After the engine's end, before the context's."""
        with self._lock:
            entries = list(self._all())
            self._entries.clear()
            self._leaving.clear()
        for entry in entries:
            self._free(entry)

    def _place(self, name: str, file: AdapterFile, pinned: bool) -> AdapterInfo:
        with self._lock:
            known = self._entries.get(name)
            entry = known if known is not None and known.file.digest == file.digest else Entry(name, file)
            if pinned:
                self._require_room([entry])
        if entry.adapter is None:
            entry.file = file
            self._load(entry)
        with self._lock:
            entry.file, entry.pinned, entry.last_use = file, pinned, next(self._ticks)
            self._entries[name] = entry
            if known is not None and known is not entry:
                self._retire(known)
            info = entry.info()
        self._sweep()
        return info

    def _load(self, entry: Entry) -> None:
        """Raises AdapterError, and CallFailed (BUSY)."""
        with self._lock:
            resident = [one for one in self._all() if one.adapter is not None]
            evictable = sorted((one for one in resident if not one.num_calls and not one.pinned), key=_last_use)
            evicted: list[Entry] = []
            while not self._fits([*resident, entry]):
                if not evictable:
                    raise self._full()
                evicted.append(evictable.pop(0))
                resident.remove(evicted[-1])
        for one in evicted:
            self._free(one)
        started = time.perf_counter()
        entry.adapter = Adapter.load(self._model, entry.file)
        self._load_ms.append((time.perf_counter() - started) * 1e3)

    def _sweep(self) -> None:
        """Free those that are leaving and that nobody uses any more."""
        with self._lock:
            gone = [entry for entry in self._leaving if not entry.num_calls]
            self._leaving = [entry for entry in self._leaving if entry.num_calls]
        for entry in gone:
            self._free(entry)

    def _free(self, entry: Entry) -> None:
        adapter, entry.adapter = entry.adapter, None
        if adapter is not None:
            self._applied.drop(adapter)
            adapter.close()

    # With the lock held.

    def _all(self) -> Iterable[Entry]:
        return itertools.chain(self._entries.values(), self._leaving)

    def _retire(self, entry: Entry) -> None:
        entry.leaving = True
        self._leaving.append(entry)

    def _fits(self, entries: list[Entry]) -> bool:
        size = sum(entry.file.size for entry in entries)
        return len(entries) <= self.max_adapters and (not self.max_bytes or size <= self.max_bytes)

    def _require_room(self, entries: list[Entry]) -> None:
        """These and all that can't be evicted have to fit, or a call that was accepted could not be computed."""
        fixed = [one for one in self._all() if (one.num_calls or one.pinned) and one not in entries]
        if not self._fits([*fixed, *entries]):
            raise self._full()

    def _full(self) -> CallFailed:
        limit = f"{self.max_adapters} adapters" + (f" or {self.max_bytes:,} bytes" if self.max_bytes else "")
        message = f"calls in progress and pinned adapters leave no room among {limit}; ask again, or raise max_adapters"
        return CallFailed(Failure(FailureCode.BUSY, message, "adapters"))

    def _unknown(self, name: str) -> CallFailed:
        names = sorted(self._entries)
        known = f"use one of: {', '.join(names[:20])}" if names else "none is loaded"
        return _refused(f"no adapter is named {name[:128]!r}; {known}")


def _at_once(act: Callable[[], None]) -> None:
    act()


def _name(entry: Entry) -> str:
    return entry.name


def _last_use(entry: Entry) -> int:
    return entry.last_use


def _weights(entry: Entry) -> Adapter:
    if entry.adapter is None:
        raise IntegrityError(f"adapter {entry.name} is to be computed with and is not in memory")
    return entry.adapter


def _part(entry: Entry, scale: float) -> bytes:
    return entry.file.digest + struct.pack("<f", scale)


def _checked_scale(use: AdapterUse) -> float:
    """As llama.cpp will see it: 32 bits."""
    if not math.isfinite(use.scale) or abs(use.scale) > MAX_SCALE:
        raise _refused(
            f"the scale of adapter {use.name[:128]!r} is {use.scale}; it must be -{MAX_SCALE:g} to {MAX_SCALE:g}"
        )
    return float(np.float32(use.scale))


def _refused(message: str, param: str = "adapters") -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message, param))


def _answer(done: Future[AdapterInfo], act: Callable[[], AdapterInfo]) -> None:
    try:
        done.set_result(act())
    except (AdapterError, CallFailed) as error:
        done.set_exception(error)
