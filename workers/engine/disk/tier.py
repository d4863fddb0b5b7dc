"""The disk tier: blocks of saved KV, or whole states, in files which outlive the worker and which workers may share.

The tier's own thread does all the work on files. The engine hands blocks over with `put`, which never waits, and asks
for blocks with `fetch`, which is answered on the tier's thread. The engine sees no file errors: a file that can't be
trusted is removed with one line in the log, and counts as missing.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.engine.cache.prompt import BlockName
from workers.engine.disk.folder import CacheFolder, DiskIndex, Leaf, Place
from workers.engine.disk.sealed import (
    HEADER,
    SEAL_BYTES,
    CacheKeys,
    FileRefused,
    Kind,
    Label,
    SealedReader,
    discard,
    version_folder,
    write_sealed,
)

QUEUE_BYTES = 256 << 20
"""Maximum bytes of blocks that wait to be written; further blocks are dropped."""

MAX_BLOCK_BYTES = 512 << 20
"""Maximum bytes of a block. A larger one is not written, and a larger file is refused before it is read."""

CLOSE_S = 5.0
"""Seconds that `close` waits for a file system that does not answer."""

TOUCH_S = 60.0
"""Minimum seconds between two updates of a file's time of last use; reading it updates that time."""

SYNC_FILES = 32
"""Number of new files whose names are synced to the disk together; fewer if nothing is left to write."""

LEFT_LOOK_S = 0.5
"""Seconds between two checks of whether a worker that is about to end has written files (`CacheFolder.left_at`)."""

COMPLAIN_S = 60.0
"""Minimum seconds between two log lines about one kind of trouble."""

_WEIGHT = 0.2
"""Weight of the newest measurement in a running mean."""

log = logging.getLogger(__name__)

Stop = Callable[[], bool]
Identify = Callable[[Stop], bytes | None]
"""Function that finds the KV's fingerprint (32 bytes), which can take a minute; None: not found, or told to stop."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    num_bytes: int = 0
    """Bytes of all files in the folder, according to this process's index."""
    num_files: int = 0
    num_written: int = 0
    num_read: int = 0
    num_dropped: int = 0
    """Times that a block was not taken or not written: the queue was full, it was too large, or the tier was closed."""
    num_refused: int = 0
    """Files that could not be trusted, or that llama.cpp could not load; each is removed if that is possible."""
    num_failed: int = 0
    """Files that could not be read or written because of an OSError."""
    num_evicted: int = 0
    queued_bytes: int = 0
    read_bytes_per_s: float = 0.0
    """Rate of reading, including the check of the seal; 0: not measured yet."""
    write_bytes_per_s: float = 0.0
    """Rate of writing, including the making of the seal; 0: not measured yet."""


NO_DISK = DiskStats()


@dataclass(frozen=True, slots=True)
class _Fetch:
    names: Sequence[BlockName]
    on_done: Callable[[list[bytes]], None]


class DiskTier:
    """The disk tier: its queue, its thread and its rates. Any thread may call the public methods."""

    def __init__(
        self,
        folder: CacheFolder,
        keys: CacheKeys,
        *,
        max_bytes: int,
        identify: Identify,
        queue_bytes: int = QUEUE_BYTES,
        max_block_bytes: int = MAX_BLOCK_BYTES,
    ) -> None:
        """Take over the folder, which `close` closes. `max_bytes`: maximum for all files in it, of any worker."""
        self._folder = folder
        self._keys = keys
        self._identify = identify
        self._queue_bytes = queue_bytes
        self._max_block_bytes = max_block_bytes
        self._index = DiskIndex(folder, max_bytes)
        self._fingerprint = b""
        self._tenants: dict[str | None, str] = {}
        self._stems: set[tuple[str, str]] = set()
        """(team folder, `CacheKeys.mark_of` of the file name) of each whole state on disk; some may be gone by now."""
        self._changed = threading.Condition()
        self._puts: deque[BlockName] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._unusable: deque[BlockName] = deque()
        """Blocks whose files are to be removed, since llama.cpp could not load them."""
        self._pending: dict[BlockName, bytes] = {}
        """Blocks that are queued or being written."""
        self._pending_bytes = 0
        self._pending_stems: Counter[bytes] = Counter()
        """`BlockName.stem` -> how many whole states with it are queued or being written."""
        self._unsynced: dict[Leaf, None] = {}
        self._num_unsynced = 0
        self._closing = self._ended = False
        self._read_rate = self._write_rate = 0.0
        self._written = self._read = self._dropped = self._refused = self._failed = self._evicted = 0
        self._complained: dict[str, float] = {}
        self._left_at = 0
        """What `CacheFolder.left_at` returned just before the last scan; another value means that a new scan is due."""
        self._tells = False
        self._look_at = 0.0
        """Time of the next check of `CacheFolder.left_at`, `time.monotonic` seconds."""
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Return whether the fingerprint is known. Until then, `put` only queues blocks, and `fetch` reads nothing."""
        return bool(self._fingerprint)

    @property
    def closed(self) -> bool:
        """Return whether the tier has stopped: it was asked to, can't identify the model, or failed (see the log)."""
        return self._ended

    @property
    def stats(self) -> DiskStats:
        return DiskStats(
            self._index.num_bytes,
            self._index.num_files,
            self._written,
            self._read,
            self._dropped,
            self._refused,
            self._failed,
            self._evicted,
            self._pending_bytes,
            self._read_rate,
            self._write_rate,
        )

    def put(self, name: BlockName, state: bytes) -> bool:
        """Queue a block to be written, without waiting; return False if the queue is full and the block is dropped.

        Dropped blocks are counted, and logged once a minute. A tier that is closed, or never found its fingerprint,
        accepts blocks and drops them, as it does with blocks that are larger than a file may be."""
        if self.has(name):
            return True
        with self._changed:
            if self._closing:
                self._dropped += 1
                return True
            if len(state) > self._max_block_bytes:
                self._dropped += 1
                self._complain("size", f"{len(state):,} bytes are more than a file may have; not kept on disk")
                return True
            if not self._fits(len(state)):
                self._dropped += 1
                waiting = f"{self._pending_bytes >> 20:,} MiB wait to be written"
                self._complain("queue", f"{waiting}: what leaves RAM meanwhile is forgotten; the disk is too slow")
                return False
            if name not in self._pending:
                self._pending[name] = state
                self._pending_bytes += len(state)
                self._pending_stems[name.stem] += 1
                self._puts.append(name)
                self._changed.notify_all()
        return True

    def wait_room(self, num_bytes: int, deadline_s: float) -> bool:
        """Wait until the queue has room for `num_bytes` or the tier closes; return False after `deadline_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._fits(num_bytes), deadline_s)

    def has(self, name: BlockName) -> bool:
        """Return whether the block is queued, or on disk according to the index; takes microseconds."""
        return name in self._pending or (self.ready and self._index.knows(self._place(name)))

    def num_known(self, names: Sequence[BlockName]) -> int:
        """Return how many of these blocks, from the first one on, are queued or on disk (`has`)."""
        return next((count for count, name in enumerate(names) if not self.has(name)), len(names))

    def has_states(self, tenant: str | None, stem: bytes) -> bool:
        """Return whether a whole state of this team with this `BlockName.stem` may exist. Takes microseconds."""
        if stem in self._pending_stems:
            return True
        return self.ready and (self._folder_of(tenant), self._keys.stem_mark(self._fingerprint, stem)) in self._stems

    def num_fitting(self, names: Sequence[BlockName], max_bytes: int) -> int:
        """Return how many of these blocks, from the first one on, fit in `max_bytes`, as far as sizes are known."""
        sizes = itertools.accumulate(self._index.size(self._place(name)) for name in names)
        return bisect_right(list(sizes), max_bytes)

    def read_s(self, names: Sequence[BlockName]) -> float:
        """Return the seconds that reading these blocks takes, as far as sizes are known; 0: no rate is known yet."""
        rate = self._read_rate
        return sum(self._index.size(self._place(name)) for name in names) / rate if rate else 0.0

    def fetch(self, names: Sequence[BlockName], on_done: Callable[[list[bytes]], None]) -> bool:
        """Read blocks up to the first one that is missing, then call `on_done` on the tier's thread, once.

        Return False if that can't be done now (no fingerprint yet, or closed); `on_done` is not called then."""
        with self._changed:
            if self._closing or not self.ready:
                return False
            self._fetches.append(_Fetch(names, on_done))
            self._changed.notify_all()
        return True

    def tell(self) -> None:
        """Note that this worker is about to end: whenever its queue is written out, others look for the files."""
        self._tells = True

    def discard(self, name: BlockName) -> None:
        """Have the file of a block that llama.cpp could not load removed soon; does not block."""
        with self._changed:
            self._unusable.append(name)
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait up to `deadline_s` seconds until everything queued is written and synced; return whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not (self._pending or self._unsynced), deadline_s)
            return not (self._ended or self._pending or self._unsynced)

    def close(self) -> None:
        """Stop the thread, in the middle of a file if need be; waiting fetches get an answer without blocks.

        Call `flush` first: blocks that are still queued are dropped."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("disk tier: %s does not answer; what was being written there is lost", self._folder.path)
        else:
            if self._written:
                self._mark()
            self._folder.close()

    def _mark(self) -> None:
        try:
            self._folder.mark_left()
        except OSError as error:
            log.warning("disk tier: others find what was written later: %s", error.strerror)

    def _run(self) -> None:
        try:
            fingerprint = self._identify(lambda: self._closing)
            if fingerprint is not None:
                self._refresh()
                self._note_states(fingerprint)
                self._fingerprint = fingerprint
                while not self._closing:
                    self._turn()
        except Exception:  # the edge of a thread: the worker serves on without it
            log.exception("the disk tier stopped; prompts are kept in memory only until the worker restarts")
        finally:
            self._end()

    def _turn(self) -> None:
        """Do the most urgent piece of work; wait if there is none."""
        if self._fetches:
            self._serve()
        elif self._unusable:
            self._remove(self._unusable.popleft())
        elif self._puts and not (self._num_unsynced >= SYNC_FILES):
            self._write(self._puts[0])
        elif self._unsynced:
            self._sync()
        elif time.monotonic() >= self._index.next_scan_at or self._one_has_left():
            self._refresh()
        else:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._puts or self._fetches or self._unusable or self._closing, LEFT_LOOK_S
                )

    def _remove(self, name: BlockName) -> None:
        place, done = self._place(name), "removed"
        try:
            self._folder.remove(place)
        except OSError as error:
            done = f"it can't be removed: {error.strerror}"
        with self._changed:
            self._index.forget(place)
        self._refused += 1
        self._complain("unusable", f"{place.name}: llama.cpp could not load it; {done}")

    def _one_has_left(self) -> bool:
        """Return whether a worker that is about to end has written files in the folder since the last scan."""
        now = time.monotonic()
        if now < max(self._look_at, self._index.next_hurried_at):
            return False
        self._look_at = now + LEFT_LOOK_S
        return self._folder.left_at() != self._left_at

    def _end(self) -> None:
        with self._changed:
            self._closing = self._ended = True
            self._dropped += len(self._pending)
            self._puts.clear()
            self._pending.clear()
            self._pending_stems.clear()
            self._pending_bytes = 0
            fetches = list(self._fetches)
            self._fetches.clear()
            self._changed.notify_all()
        for fetch in fetches:
            fetch.on_done([])

    def _serve(self) -> None:
        fetch = self._fetches.popleft()
        blocks: list[bytes] = []
        try:
            for name in fetch.names:
                state = self._pending.get(name)
                if state is None and not self._closing:
                    state = self._load(name)
                if state is None:
                    break
                blocks.append(state)
        finally:
            fetch.on_done(blocks)

    def _load(self, name: BlockName) -> bytes | None:
        place = self._place(name)
        started = time.perf_counter()
        try:
            with self._folder.opened(*place.leaf.parts) as leaf:
                try:
                    state = self._unsealed(leaf, place, name)
                except FileRefused as error:
                    removed = discard(leaf, place.name)
                    self._refused += 1
                    log.warning(
                        "disk tier: %s/%s: %s%s", "/".join(place.leaf.parts), place.name, error, "; removed" * removed
                    )
                    state = None
        except FileNotFoundError:
            state = None
        except OSError as error:
            self._failed += 1
            self._complain("read", f"{place.name} can't be read: {error.strerror}")
            state = None
        if state is None:
            with self._changed:
                self._index.forget(place)
            return None
        self._read += 1
        self._read_rate = _mean(self._read_rate, len(state), time.perf_counter() - started)
        return state

    def _unsealed(self, leaf: int, place: Place, name: BlockName) -> bytes:
        most = self._max_block_bytes + HEADER.size + SEAL_BYTES
        with SealedReader(leaf, place.name, self._keys.seal, max_bytes=most) as file:
            label, length = file.label()
            state = file.take(length)
            file.verify()
            if label != self._label(name):
                raise FileRefused("it is another block's file under this name")
            if abs(time.time() - file.status.st_mtime) > TOUCH_S:  # in the future, since the clock stepped back
                file.touch()
        return state

    def _write(self, name: BlockName) -> None:
        state, place = self._pending[name], self._place(name)
        if not self._index.knows(place):
            started = time.perf_counter()
            try:
                with self._folder.opened(*place.leaf.parts, create=True) as leaf:
                    label = self._label(name)
                    size = write_sealed(leaf, place.name, self._keys.seal, label, [state], stop=lambda: self._closing)
            except OSError as error:
                if self._closing:
                    return
                self._failed += 1
                self._complain("write", f"a block of {len(state):,} bytes can't be written: {error.strerror}")
            else:
                self._written += 1
                self._num_unsynced += 1
                self._unsynced[place.leaf] = None
                self._write_rate = _mean(self._write_rate, len(state), time.perf_counter() - started)
                with self._changed:
                    self._index.add(place, size)
                    if name.stem:
                        self._stems.add((place.tenant, self._keys.mark_of(place.name)))
        with self._changed:
            self._puts.popleft()
            del self._pending[name]
            self._pending_bytes -= len(state)
            self._pending_stems[name.stem] -= 1
            if not self._pending_stems[name.stem]:
                del self._pending_stems[name.stem]
            self._changed.notify_all()
        if self._index.must_shrink or self._index.is_outdated:
            self._make_room()

    def _sync(self) -> None:
        leaves = list(self._unsynced)
        for leaf in leaves:
            try:
                self._folder.sync(leaf)
            except OSError as error:
                self._complain("sync", f"a folder can't be synced: {error.strerror}")
        with self._changed:
            self._num_unsynced = 0
            self._unsynced.clear()
            self._changed.notify_all()
        if self._tells and not self._puts:
            self._mark()

    def _make_room(self) -> None:
        self._refresh()
        if self._closing or not self._index.must_shrink:
            return
        try:
            self._evicted += self._index.shrink()
        except OSError as error:
            self._complain("evict", f"{self._folder.path} is too full, and keeps its files: {error.strerror}")

    def _refresh(self) -> None:
        """Scan the folder, answering fetches in between."""
        try:
            self._left_at = self._folder.left_at()
            for _ in self._index.scan():
                while self._fetches and not self._closing:
                    self._serve()
                if self._closing:
                    return
        except OSError as error:
            self._complain("scan", f"{self._folder.path} can't be listed: {error.strerror}")
        if self.ready:
            self._note_states(self._fingerprint)

    def _note_states(self, fingerprint: bytes) -> None:
        places = self._index.states(version_folder(fingerprint))
        self._stems = {(place.tenant, self._keys.mark_of(place.name)) for place in places}

    def _fits(self, num_bytes: int) -> bool:
        """Return whether a block fits in the queue; a block of any size fits in an empty one."""
        return not self._pending or self._pending_bytes + num_bytes <= self._queue_bytes

    def _folder_of(self, tenant: str | None) -> str:
        folder = self._tenants.get(tenant)
        if folder is None:
            folder = self._tenants[tenant] = self._keys.tenant_folder(tenant)
        return folder

    def _place(self, name: BlockName) -> Place:
        file = self._keys.file_name(self._fingerprint, name.digest, name.stem)
        return Place(version_folder(self._fingerprint), self._folder_of(name.tenant), file)

    def _label(self, name: BlockName) -> Label:
        kind = Kind.STATE if name.stem else Kind.BLOCK
        return Label(kind, self._fingerprint, name.digest, name.start, name.end)

    def _complain(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._complained.get(kind, -COMPLAIN_S) >= COMPLAIN_S:
            self._complained[kind] = now
            log.warning("disk tier: %s", text)


def _mean(rate: float, num_bytes: int, seconds: float) -> float:
    newest = num_bytes / max(seconds, 1e-9)
    return newest if not rate else rate + _WEIGHT * (newest - rate)
