"""The adapter registry: which names stand for which LoRA weights, which calls use them, and which may be in memory.

Any thread may call `register`, `unload`, `resolve`, `release` and `infos`: names and counts are guarded by a lock that
is never held for long. A file is read and checked on the thread that registers it. Only the engine's thread touches
weights (`workers.engine.adapters.memory`): in `enter`, `apply`, and the functions that `register` and `unload` post.
"""

from __future__ import annotations

import itertools
import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np

from workers.engine.adapters.memory import AdapterMemory
from workers.engine.adapters.turns import NO_ADAPTERS, AdapterSet, Entry
from workers.engine.counters import Distribution
from workers.engine.request import IntegrityError
from workers.llama.adapters import AdapterError, AdapterFile, AdapterUnreadable, inspect
from workers.llama.context import Context
from workers.llama.model import Model
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.queries import AdapterInfo
from workers.protocol.requests import AdapterUse

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
"""Function that queues another function, to be called on the engine's thread between two steps."""

MAX_SCALE = 16.0
"""Largest absolute scale. A scale of a million makes infinities in the KV cache; attention without flash attention
multiplies other calls' cells by zero instead of skipping them, so every call on the worker would get NaN (measured)."""

MAX_SET = 8
"""Maximum adapters of one call; each adds matrix products of its own to every layer."""

MAX_NAMES = 4096
MAX_INSPECTED = 64
"""Maximum number of checked files that are remembered. A remembered file is checked again only if it changes."""
LOAD_S = 120.0
"""Maximum seconds that `register` waits until the engine's thread has taken the adapter."""
LOOK_S = 0.25
"""Seconds between two checks, while `register` waits, whether that thread has ended."""

LOAD_STEP_S = 0.02
"""Seconds of loading after which no more adapters are loaded until the next step, since streams wait meanwhile."""

PATIENCE_S = 2.0
"""Seconds for which a call that waits for room for its adapters may be overtaken by calls whose adapters are in use."""


class AdapterRegistry:
    """The adapters that calls may name: known from `register` on, and loaded for the first call that names them.

    At most `max_adapters` adapters and `max_bytes` of them (0: no bound) are in memory. The adapter used longest ago
    makes room; adapters that running calls use and pinned adapters stay. A call that finds no room waits until other
    calls end, or calls of other teams are preempted for it (`workers.engine.step.scheduler`)."""

    def __init__(
        self,
        model: Model,
        context: Context,
        *,
        max_adapters: int = 8,
        max_bytes: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.max_adapters = max_adapters
        self._patience_s = patience_s
        self._model = model
        self._memory = AdapterMemory(model, context, max_adapters=max_adapters, max_bytes=max_bytes)
        self._post: Post = _at_once
        self._has_ended: Callable[[], bool] = _never
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._leaving: list[Entry] = []
        self._inspected: dict[Path, AdapterFile] = {}
        self._ticks = itertools.count(1)
        self._held: frozenset[Entry] = frozenset()
        """Adapters of the calls last given as `running` or entered since. Written on the engine's thread."""
        self._is_awaited = False
        """Whether a call waits for room in memory. Later calls that need room too do not overtake it."""
        self._awaited_since = math.inf
        """When the call that waits for room in memory began to wait, `time.monotonic` seconds; infinite: none waits."""
        self._coming: frozenset[Entry] = frozenset()
        """Adapters of a call that is loading them over several rounds; the loaded ones stay in memory meanwhile."""
        self._is_coming_asked = False
        """Whether the call that loads `_coming` tried again this round. If not, the next round gives `_coming` up."""
        self._load_left_s = LOAD_STEP_S
        """Seconds of this round that are left for loading adapters."""

    # Any thread may call these.

    def follow(self, post: Post, has_ended: Callable[[], bool]) -> None:
        """Have all work on weights done through `post`; before, the thread that asks for it does it. `has_ended`
        returns whether what is posted is not done any more."""
        self._post, self._has_ended = post, has_ended

    def inspect(self, name: str, path: Path, *, pinned: bool = False, sha256: str = "") -> AdapterInfo:
        """Check a file and return what `register` would return, without registering it. Raises the same errors."""
        file = self._checked(name, path, sha256)
        with self._lock:
            known = self._entries.get(name)
            if known is not None and known.fixed:
                return self._as_fixed(known, file)
            entry = Entry(name, file, pinned)
            if pinned:
                self._require_room(entry, self._pinned - {known})
            return entry.info()

    def register(
        self, name: str, path: Path, *, pinned: bool = False, sha256: str = "", fixed: bool = False
    ) -> AdapterInfo:
        """Check a file and give it a name; load it if it is `pinned`. Blocks for as long as reading the file takes.

        If the name stands for other contents, the new contents replace them; calls that use the old contents keep
        them. `sha256`: the hash that the file must have, in hex; empty: any. `fixed`: the name can't be replaced or
        unloaded while the worker runs. Raises AdapterError, and CallFailed: INVALID_REQUEST (a fixed name for other
        contents, or too many names), BUSY (no room for a pinned adapter), DRAINING (the engine has ended), INTERNAL (no
        answer in `LOAD_S`)."""
        file = self._checked(name, path, sha256)
        with self._lock:
            known = self._entries.get(name)
            if known is not None and known.fixed:
                return self._as_fixed(known, file)
            if known is None and len(self._entries) >= MAX_NAMES:
                raise _refused(f"{MAX_NAMES} adapters are known; unload some first", "name")
        done: Future[AdapterInfo] = Future()
        self._post(partial(_answer, done, partial(self._place, Entry(name, file, pinned, fixed))))
        until = time.monotonic() + LOAD_S
        while time.monotonic() < until:
            has_ended = self._has_ended()
            try:
                return done.result(0.0 if has_ended else LOOK_S)
            except TimeoutError:
                if has_ended:
                    message = f"this worker ends and takes no adapter {name!r} any more; ask another one"
                    raise CallFailed(Failure(FailureCode.DRAINING, message)) from None
        message = f"the engine did not take adapter {name!r} within {LOAD_S:.0f} s; ask again"
        raise CallFailed(Failure(FailureCode.INTERNAL, message))

    def unload(self, name: str) -> AdapterInfo:
        """Refuse new calls that name an adapter; free it when its last call has ended. Raises CallFailed."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise self._unknown(name)
            if entry.fixed:
                raise _refused(f"adapter {name!r} stands in this worker's settings; take it out there", "name")
            del self._entries[name]
            self._retire(entry)
            info = entry.info()
        self._post(self._sweep)
        return info

    def infos(self) -> list[AdapterInfo]:
        """Return the registered adapters, sorted by name, then the adapters that are being unloaded."""
        with self._lock:
            return [entry.info() for entry in (*sorted(self._entries.values(), key=_name), *self._leaving)]

    @property
    def num_loaded(self) -> int:
        """Return how many adapters are in memory."""
        return len(self._memory.resident)

    @property
    def load_s(self) -> Distribution:
        """Return a histogram of the seconds that each load of an adapter into memory took."""
        return self._memory.load_s

    @property
    def num_failures(self) -> int:
        """Return how often an adapter could not be loaded."""
        return self._memory.num_failures

    @property
    def load_ms(self) -> float:
        """Return the median milliseconds of the newest loads of an adapter; 0: not known yet."""
        return self._memory.load_ms

    @property
    def room(self) -> int:
        """Return how many more adapters could be loaded now beside the pinned ones and those that running calls use."""
        with self._lock:
            fixed = self._pinned | self._in_use
            largest = max((entry.file.size for entry in self._entries.values()), default=0)
        places, max_bytes = self.max_adapters - len(fixed), self._memory.max_bytes
        if max_bytes and largest:
            places = min(places, (max_bytes - sum(entry.file.size for entry in fixed)) // largest)
        return max(0, places)

    def resolve(self, uses: tuple[AdapterUse, ...]) -> AdapterSet:
        """Return the adapters that a call names. They stay usable until `release`, which the caller must call once.
        Raises CallFailed: INVALID_REQUEST, or BUSY if pinned adapters leave no room for them."""
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
            self._require_place(frozenset(entry for entry, _ in chosen))
            for entry, _ in chosen:
                entry.num_calls += 1
                entry.last_use = next(self._ticks)
        parts = sorted(((_part(entry, scale), entry, scale) for entry, scale in chosen), key=lambda part: part[0])
        return AdapterSet(b"".join(part[0] for part in parts), tuple((entry, scale) for _, entry, scale in parts))

    def release(self, adapters: AdapterSet) -> None:
        """Give back a set that `resolve` returned, because its call has ended."""
        with self._lock:
            for entry, _ in adapters.uses:
                entry.num_calls -= 1
            is_last = any(entry.leaving and not entry.num_calls for entry, _ in adapters.uses)
        if is_last:
            self._post(self._sweep)

    # The engine's thread calls these.

    def begin_round(self, running: Iterable[AdapterSet]) -> None:
        """Begin a round of admission, before waiting calls `enter`. `running`: the sets of calls that hold a slot."""
        self._held = _entries(running)
        if not self._is_awaited:
            self._awaited_since = math.inf
        self._is_awaited = False
        if not self._is_coming_asked:
            self._coming = frozenset()
        self._is_coming_asked = False
        self._load_left_s = LOAD_STEP_S

    def enter(self, adapters: AdapterSet) -> bool:
        """Load the weights of a resolved set and keep them while its call runs. Return False if there is no room now,
        or this round has no time to load all of them.

        Call it for the waiting calls, in their order. Raises CallFailed if a file is gone, has changed or can't be
        opened now, or pinned adapters leave no room any more."""
        wanted = adapters.entries
        if not wanted or (wanted <= self._held and not self._is_overdue):
            return True
        if self._is_awaited or not self._bring(wanted):
            self._awaited_since = min(self._awaited_since, time.monotonic())
            self._is_awaited = True
            return False
        return True

    def fits(self, adapters: AdapterSet, running: Iterable[AdapterSet]) -> bool:
        """Return whether a set fits in memory together with the `running` sets and other adapters that must stay."""
        with self._lock:
            return self._memory.fits(_entries(running) | self._pinned | self._coming | adapters.entries)

    def enter_beside(self, adapters: AdapterSet, running: Iterable[AdapterSet]) -> bool:
        """Do what `enter` does, for a call that may overtake waiting calls. `running`: the sets of running calls."""
        self._held = _entries(running)
        return self._bring(adapters.entries)

    def apply(self, adapters: AdapterSet) -> bool:
        """Make llama.cpp use an entered set in the next step. Return whether it used other adapters before."""
        return self._memory.apply(adapters)

    def check(self, held: Iterable[AdapterSet]) -> None:
        """Compare the registry's counts with the sets that unfinished calls hold. Raises IntegrityError."""
        counts: dict[Entry, int] = {}
        for adapters in held:
            for entry, _ in adapters.uses:
                counts[entry] = counts.get(entry, 0) + 1
        with self._lock:
            resident = {entry for entry in self._all() if entry.adapter is not None}
            for entry, count in counts.items():
                if entry.num_calls < count:
                    raise IntegrityError(f"adapter {entry.name}: {count} calls use it, {entry.num_calls} by the book")
        if resident != set(self._memory.resident):
            raise IntegrityError("adapters are in memory that nobody knows, or the other way round")
        if len(resident) > self.max_adapters:
            raise IntegrityError(f"{len(resident)} adapters are in memory, {self.max_adapters} may be")

    def close(self) -> None:
        """Free all adapters. Call it after the engine's last call, and before the context is closed."""
        with self._lock:
            self._entries.clear()
            self._leaving.clear()
        for entry in self._memory.resident:
            self._memory.free(entry)

    def _place(self, new: Entry) -> AdapterInfo:
        with self._lock:
            known = self._entries.get(new.name)
            entry = known if known is not None and known.file.digest == new.file.digest else new
            if new.pinned:
                self._require_room(entry, self._pinned - {known})
            keep = self._pinned | self._in_use | {entry}
        if new.pinned and entry.adapter is None:
            entry.file = new.file
            self._memory.load(entry, keep)
        with self._lock:
            entry.file, entry.pinned, entry.fixed, entry.last_use = new.file, new.pinned, new.fixed, next(self._ticks)
            self._entries[new.name] = entry
            if known is not None and known is not entry:
                self._retire(known)
            info = entry.info()
        self._sweep()
        return info

    @property
    def _is_overdue(self) -> bool:
        """Return whether a call has waited so long for room that later calls may no longer overtake it."""
        return self._is_awaited and time.monotonic() - self._awaited_since > self._patience_s

    def _bring(self, wanted: frozenset[Entry]) -> bool:
        """Load the adapters of `wanted` that are not in memory; return False if there is no room, or no time for all.

        Raises CallFailed."""
        self._is_coming_asked |= self._coming <= wanted
        with self._lock:
            self._require_place(wanted)
            keep = self._held | self._pinned | self._coming | wanted
        if not self._memory.fits(keep):
            return False
        for entry in wanted:
            if entry.adapter is None and not self._load(entry, keep):
                self._coming = self._coming or wanted
                self._is_coming_asked |= self._coming <= wanted
                return False
        if self._coming <= wanted:
            self._coming = frozenset()
        self._held |= wanted
        return True

    def _load(self, entry: Entry, keep: frozenset[Entry]) -> bool:
        """Load an adapter if this round has time left for loading; return whether it was loaded. Raises CallFailed."""
        if self._load_left_s <= 0:
            return False
        began = time.perf_counter()
        try:
            self._memory.load(entry, keep)
        except AdapterUnreadable as error:
            logger.warning("adapter %s can't be brought into memory now: %s", entry.name, error)
            message = f"adapter {entry.name!r} can't be read now; the worker's log says why. Send the request again"
            raise CallFailed(Failure(FailureCode.UNAVAILABLE, message, "adapters")) from None
        except AdapterError as error:
            logger.error("adapter %s can't be brought into memory: %s", entry.name, error)
            message = f"adapter {entry.name!r} can't be brought into memory; the worker's log says why"
            raise CallFailed(Failure(FailureCode.INTERNAL, message, "adapters")) from None
        finally:
            self._load_left_s -= time.perf_counter() - began
        return True

    def _sweep(self) -> None:
        """Free the adapters that are being unloaded and that no call uses any more."""
        with self._lock:
            gone = [entry for entry in self._leaving if not entry.num_calls]
        for entry in gone:
            self._memory.free(entry)
        with self._lock:
            self._leaving = [entry for entry in self._leaving if entry not in gone]

    def _checked(self, name: str, path: Path, sha256: str) -> AdapterFile:
        """Check an adapter's file and return it. Raises AdapterError."""
        with self._lock:
            file = self._inspected.pop(path, None)
        if file is None or not file.is_unchanged():
            file = inspect(path, self._model.header, max_bytes=self._memory.max_bytes)
        with self._lock:
            self._inspected[path] = file
            while len(self._inspected) > MAX_INSPECTED:
                del self._inspected[next(iter(self._inspected))]
        if sha256 and file.digest.hex() != sha256:
            raise AdapterError(
                f"{path.name}: holds other contents (SHA-256 {file.digest.hex()}) than adapter {name!r} has in the "
                f"fleet ({sha256}); give every worker the same file, or load the adapter again under its name"
            )
        return file

    # These are called with the lock held.

    @property
    def _pinned(self) -> frozenset[Entry]:
        return frozenset(entry for entry in self._entries.values() if entry.pinned)

    @property
    def _in_use(self) -> frozenset[Entry]:
        """Return the adapters in `_held` that are still in use: some of the calls with a slot may have ended since."""
        return frozenset(entry for entry in self._held if entry.num_calls)

    def _all(self) -> Iterable[Entry]:
        return itertools.chain(self._entries.values(), self._leaving)

    def _retire(self, entry: Entry) -> None:
        entry.leaving = True
        self._leaving.append(entry)

    def _as_fixed(self, known: Entry, file: AdapterFile) -> AdapterInfo:
        """Return what `register` returns if the name is fixed already. Raises CallFailed if the contents differ."""
        if file.digest != known.file.digest:
            raise _refused(
                f"adapter {known.name!r} stands in this worker's settings with other contents (SHA-256 "
                f"{known.file.digest.hex()}) than the file has ({file.digest.hex()}); change it there, or use another "
                "name",
                "name",
            )
        return known.info()

    def _require_place(self, entries: frozenset[Entry]) -> None:
        """Raise CallFailed if `entries` don't fit beside the pinned adapters: their call would wait for ever."""
        pinned = self._pinned
        if not self._memory.fits(pinned | entries):
            message = f"{len(pinned)} pinned adapters leave no room for these {len(entries)}{self._limit}"
            raise CallFailed(Failure(FailureCode.BUSY, message, "adapters"))

    def _require_room(self, entry: Entry, pinned: frozenset[Entry | None]) -> None:
        """Raise CallFailed if an adapter to pin does not fit beside `pinned` ones and those that running calls use."""
        fixed = {one for one in pinned | self._in_use if one is not None}
        if not self._memory.fits({*fixed, entry}):
            message = f"calls in progress and pinned adapters leave no room for one that is pinned{self._limit}"
            raise CallFailed(Failure(FailureCode.BUSY, message, "adapters"))

    @property
    def _limit(self) -> str:
        num_bytes = f" and adapters_mib {self._memory.max_bytes >> 20}" if self._memory.max_bytes else ""
        return f" (max_adapters {self.max_adapters}{num_bytes}); unpin some, or raise the limit"

    def _unknown(self, name: str) -> CallFailed:
        names = sorted(self._entries)
        known = f"use one of: {', '.join(names[:20])}" if names else "none is loaded"
        return _refused(f"no adapter is named {name[:128]!r}; {known}")


def _at_once(act: Callable[[], None]) -> None:
    act()


def _never() -> bool:
    return False


def _entries(sets: Iterable[AdapterSet]) -> frozenset[Entry]:
    return frozenset().union(*(adapters.entries for adapters in sets))


def _name(entry: Entry) -> str:
    return entry.name


def _part(entry: Entry, scale: float) -> bytes:
    return entry.file.digest + struct.pack("<f", scale)


def _checked_scale(use: AdapterUse) -> float:
    """Return the scale rounded to 32 bits, which llama.cpp uses. Raises CallFailed if it is out of bounds."""
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
