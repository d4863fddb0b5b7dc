"""The disk tier: blocks of saved KV in files, which outlive the worker and may be shared by several.

Its own thread does all the work on files. The engine hands blocks over with `put`, which never waits, and asks for
blocks with `fetch`, which is answered on the tier's thread. Nothing that goes wrong with a file reaches the engine: a
file that can't be trusted is removed with one line in the log, and counts as missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.engine.disk_folder import CacheFolder, Leaf, Place
from workers.engine.disk_index import DiskIndex
from workers.engine.disk_names import BlockName, CacheKeys, version_folder
from workers.engine.sealed import HEADER, SEAL_BYTES, FileRefused, Kind, Label, SealedReader, discard, write_sealed

QUEUE_BYTES = 256 << 20
MAX_BLOCK_BYTES = 512 << 20
"""A file that is larger is refused before it is read."""

TOUCH_S = 60.0
"""How often reading a file renews its time of last use, at most."""

SYNC_FILES = 32
"""So many new names are synced at once, or what there is when nothing is left to write."""

COMPLAIN_S = 60.0
"""How often one kind of trouble is logged."""

_WEIGHT = 0.2
"""Of the newest measurement in a rate."""

log = logging.getLogger(__name__)

Stop = Callable[[], bool]
Identify = Callable[[Stop], bytes | None]
"""Finds the fingerprint (32 bytes), which may take a minute; None: there is none, or it was told to stop."""


@dataclass(frozen=True, slots=True)
class DiskStats:
    num_bytes: int
    """In the whole folder, as far as this process knows."""
    num_files: int
    num_written: int
    num_read: int
    num_dropped: int
    """Times that a block was not taken or not written: the queue was full, or the tier was closed."""
    num_refused: int
    """Files that were removed because they could not be trusted."""
    num_failed: int
    """Files that could not be read or written for the system's reasons."""
    num_evicted: int
    queued_bytes: int
    read_bytes_per_s: float
    """0 until measured; sealing and checking included."""
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Fetch:
    names: Sequence[BlockName]
    on_done: Callable[[list[bytes]], None]


class DiskTier:
    """`put`, `has`, `fetch`, `flush` and `close` may be called from any thread."""

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
        """Takes over the folder. `max_bytes`: cap on all files in it, other workers' included."""
        self._folder = folder
        self._keys = keys
        self._identify = identify
        self._queue_bytes = queue_bytes
        self._max_block_bytes = max_block_bytes
        self._index = DiskIndex(folder, max_bytes)
        self._fingerprint = b""
        self._tenants: dict[str | None, str] = {}
        self._changed = threading.Condition()
        self._puts: deque[BlockName] = deque()
        self._fetches: deque[_Fetch] = deque()
        self._pending: dict[BlockName, bytes] = {}
        """What is queued or being written."""
        self._pending_bytes = 0
        self._unsynced: dict[Leaf, None] = {}
        self._num_unsynced = 0
        self._closing = self._ended = False
        self._read_rate = self._write_rate = 0.0
        self._written = self._read = self._dropped = self._refused = self._failed = self._evicted = 0
        self._complained: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the fingerprint is known; until then blocks queue up and nothing is found."""
        return bool(self._fingerprint)

    @property
    def closed(self) -> bool:
        """Whether it has stopped: asked to, or because the model can't be told for sure (the log says why)."""
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
        """Queue a block to be written. Never waits. -> False: dropped, since the queue is full; later it may not be.

        A tier that is closed, or never found its fingerprint, takes blocks to nowhere.
        """
        if self.has(name):
            return True
        with self._changed:
            if self._closing or self._pending_bytes + len(state) > self._queue_bytes:
                self._dropped += 1
                return self._closing
            if name not in self._pending:
                self._pending[name] = state
                self._pending_bytes += len(state)
                self._puts.append(name)
                self._changed.notify_all()
        return True

    def has(self, name: BlockName) -> bool:
        """Whether the block was there lately, without looking; takes microseconds."""
        return name in self._pending or (self.ready and self._index.knows(self._place(name)))

    def num_known(self, names: Sequence[BlockName]) -> int:
        """How many of these blocks, from the first one, `has` says are there."""
        return next((count for count, name in enumerate(names) if not self.has(name)), len(names))

    def fetch(self, names: Sequence[BlockName], on_done: Callable[[list[bytes]], None]) -> bool:
        """Read blocks up to the first one that is missing, then call `on_done` on the tier's thread, once.

        False: not now (no fingerprint yet, or closed); `on_done` is not called.
        """
        with self._changed:
            if self._closing or not self.ready:
                return False
            self._fetches.append(_Fetch(names, on_done))
            self._changed.notify_all()
        return True

    def discard(self, name: BlockName) -> None:
        """The block's contents were of no use to llama.cpp: remove the file. Blocks for one unlink."""
        if self.ready:
            place = self._place(name)
            self._folder.remove(place)
            with self._changed:
                self._index.forget(place)
            self._complain("unusable", f"{place.name}: llama.cpp could not load it; removed")

    def flush(self, deadline_s: float) -> bool:
        """Wait until everything queued is written and synced, at most so long -> whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not (self._pending or self._unsynced), deadline_s)
            return not (self._ended or self._pending or self._unsynced)

    def close(self) -> None:
        """Stop the thread after what it does now; fetches that wait are answered with nothing. Call `flush` before."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._folder.close()

    def _run(self) -> None:
        try:
            fingerprint = self._identify(lambda: self._closing)
            if fingerprint is not None:
                self._refresh()
                self._fingerprint = fingerprint
                while not self._closing:
                    self._turn()
        except Exception:  # the edge of a thread: the worker serves on without it
            log.exception("the disk tier stopped; prompts are kept in memory only until the worker restarts")
        finally:
            self._end()

    def _turn(self) -> None:
        """One thing, the most urgent one first; waits where there is none."""
        if self._fetches:
            self._serve()
        elif self._puts and not (self._num_unsynced >= SYNC_FILES):
            self._write(self._puts[0])
        elif self._unsynced:
            self._sync()
        elif time.monotonic() >= self._index.next_scan_at:
            self._refresh()
        else:
            with self._changed:
                until = self._index.next_scan_at - time.monotonic()
                self._changed.wait_for(lambda: self._puts or self._fetches or self._closing, max(until, 0.0))

    def _end(self) -> None:
        with self._changed:
            self._closing = self._ended = True
            self._dropped += len(self._pending)
            self._puts.clear()
            self._pending.clear()
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
            if time.time() - file.status.st_mtime > TOUCH_S:
                file.touch()
        return state

    def _write(self, name: BlockName) -> None:
        state, place = self._pending[name], self._place(name)
        if not self._index.knows(place):
            started = time.perf_counter()
            try:
                with self._folder.opened(*place.leaf.parts, create=True) as leaf:
                    size = write_sealed(leaf, place.name, self._keys.seal, self._label(name), [state])
            except OSError as error:
                self._failed += 1
                self._complain("write", f"a block of {len(state):,} bytes can't be written: {error.strerror}")
            else:
                self._written += 1
                self._num_unsynced += 1
                self._unsynced[place.leaf] = None
                self._write_rate = _mean(self._write_rate, len(state), time.perf_counter() - started)
                with self._changed:
                    self._index.add(place, size)
        with self._changed:
            self._puts.popleft()
            del self._pending[name]
            self._pending_bytes -= len(state)
            self._changed.notify_all()
        if self._index.full:
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

    def _make_room(self) -> None:
        self._refresh()
        if self._index.full and not self._closing:
            self._evicted += self._index.shrink()

    def _refresh(self) -> None:
        """Scan the folder, answering fetches in between."""
        try:
            for _ in self._index.scan():
                while self._fetches and not self._closing:
                    self._serve()
                if self._closing:
                    return
        except OSError as error:
            self._complain("scan", f"{self._folder.path} can't be listed: {error.strerror}")

    def _place(self, name: BlockName) -> Place:
        tenant = self._tenants.get(name.tenant)
        if tenant is None:
            tenant = self._tenants[name.tenant] = self._keys.tenant_folder(name.tenant)
        return Place(version_folder(self._fingerprint), tenant, self._keys.file_name(self._fingerprint, name.digest))

    def _label(self, name: BlockName) -> Label:
        return Label(Kind.BLOCK, self._fingerprint, name.digest, name.start, name.end)

    def _complain(self, kind: str, text: str) -> None:
        now = time.monotonic()
        if now - self._complained.get(kind, -COMPLAIN_S) >= COMPLAIN_S:
            self._complained[kind] = now
            log.warning("disk tier: %s", text)


def _mean(rate: float, num_bytes: int, seconds: float) -> float:
    newest = num_bytes / max(seconds, 1e-9)
    return newest if not rate else rate + _WEIGHT * (newest - rate)
