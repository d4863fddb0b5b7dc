"""Makes the embeddings of pictures and sounds on a thread of its own, beside `llama_decode`, and keeps the newest.

Embeddings are found again within their scope only (team and salt): whether a picture is known tells nothing to another
team. A call pins those that it needs as long as it holds their `Encoding`. Teams take turns.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.engine.cache.prompt import MediaCells
from workers.llama.native import EncodeFailed
from workers.protocol.events import Failure, FailureCode

log = logging.getLogger("paddock.engine")

Embeddings = NDArray[np.float32]

DEFAULT_MAX_BYTES = 256 << 20
"""Memory for embeddings that no call uses: those of some 60 pictures of 1,024 cells with 1,024 numbers each."""

_WEIGHT = 0.2
"""Weight of the newest measurement in the mean time per cell."""

_FAILED = Failure(
    FailureCode.INVALID_REQUEST,
    "the model's projector could not encode a picture or sound of this request; send another one",
    "messages",
)
_ENDED = Failure(FailureCode.DRAINING, "this worker is stopping; ask again, another one will answer")
_NO_MEMORY = Failure(
    FailureCode.OUT_OF_MEMORY, "the worker has no memory for the embeddings of a picture or sound; send it again"
)


class Encodes(Protocol):
    """The part of a projector that makes embeddings."""

    def encode(self, chunk: Any) -> Embeddings:
        """Return the embeddings of what the same projector has read: float32 [cells, width]. Raises EncodeFailed."""


Key = tuple[str, str, bytes]
"""Team, salt, and digest of the chunk."""


class Encoding:
    """The embeddings of one chunk: still to come, there, or not to be had."""

    __slots__ = ("__weakref__", "_waiters", "chunk", "failure", "key", "rows")

    def __init__(self, key: Key, chunk: MediaCells) -> None:
        self.key = key
        self.chunk: MediaCells | None = chunk
        """What is to be encoded: some megabytes. None: that is over, and those who need the cells hold them."""
        self.rows: Embeddings | None = None
        """The embeddings, float32 [cells, width]; None: they are still to come, or failed."""
        self.failure: Failure | None = None
        """Why there are none."""
        self._waiters: list[Callable[[], None]] = []

    @property
    def is_over(self) -> bool:
        return self.rows is not None or self.failure is not None

    def add_waiter(self, waiter: Callable[[], None]) -> None:
        """Have `waiter` called once the encoding is over. The encoder's lock must be held."""
        self._waiters.append(waiter)

    def end(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter()


class MediaEncoder:
    """Encodes one chunk at a time. Any thread may call its methods."""

    def __init__(self, projector: Encodes, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """`max_bytes`: bound on embeddings that are kept for calls to come."""
        self._projector = projector
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._known: weakref.WeakValueDictionary[Key, Encoding] = weakref.WeakValueDictionary()
        """Encodings that a call or `_kept` holds."""
        self._kept: OrderedDict[Key, Encoding] = OrderedDict()
        """Encodings that are over, the latest used last."""
        self._num_bytes = 0
        self._queues: OrderedDict[str, deque[weakref.ref[Encoding]]] = OrderedDict()
        """Team -> its encodings to come; the team whose turn is next comes first. Those that no call wants any more
        are gone by their turn."""
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="media-encoder", daemon=True)
        self.cell_s = 0.0
        """Mean seconds that encoding took per cell lately; 0: not known yet."""
        self.num_encoded = self.num_found = 0
        """Chunks so far that were encoded, and that were there already."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the chunk in progress. Encodings to come fail."""
        self._fail_all(())
        if self._thread.ident is not None:
            self._thread.join()

    def _fail_all(self, begun: Iterable[Encoding]) -> None:
        """Have all encodings fail that are still to come, and those of `begun` that are not over."""
        with self._changed:
            self._stopped = True
            left = [one for queue in self._queues.values() for ref in queue if (one := ref()) is not None]
            left += [one for one in begun if not one.is_over]
            self._queues.clear()
            for one in left:
                one.failure = _ENDED
            self._changed.notify()
        for one in left:
            one.end()

    def want(self, team: str, salt: str, chunk: MediaCells, on_end: Callable[[], None]) -> Encoding:
        """Return the encoding of a chunk, which is made now unless it is known. Hold it as long as it is needed.

        `on_end` is called, on the encoder's thread, once it is over, unless it is already."""
        key = (team, salt, chunk.digest)
        with self._changed:
            found = self._known.get(key)
            if found is not None and found.failure is None:
                self.num_found += 1
                if key in self._kept:
                    self._kept.move_to_end(key)
                if not found.is_over:
                    found.add_waiter(on_end)
                return found
            made = Encoding(key, chunk)
            if self._stopped:
                made.failure = _ENDED
                return made
            self._known[key] = made
            made.add_waiter(on_end)
            self._queues.setdefault(team, deque()).append(weakref.ref(made))
            self._changed.notify()
            return made

    def _run(self) -> None:
        while (one := self._next()) is not None:
            is_whole = False
            try:
                self._encode(one)
                is_whole = True
            finally:
                if not is_whole:  # an error that nobody foresaw ends the thread: no call may wait for it
                    self._fail_all((one,))
            del one  # a call that ends must not find its embeddings held by this frame

    def _next(self) -> Encoding | None:
        """Wait for the next encoding that a call still wants; None: the encoder is stopped."""
        with self._changed:
            while True:
                if self._stopped:
                    return None
                while self._queues:
                    team, queue = self._queues.popitem(last=False)
                    one = queue.popleft()()
                    if queue:
                        self._queues[team] = queue
                    if one is not None:
                        return one
                self._changed.wait()

    def _encode(self, one: Encoding) -> None:
        began = time.perf_counter()
        rows, failure = None, None
        chunk, one.chunk = one.chunk, None
        try:
            rows = self._projector.encode(chunk)
        except EncodeFailed as error:
            log.warning("a picture or sound could not be encoded: %s", error)
            failure = _FAILED
        except MemoryError:
            failure = _NO_MEMORY
        with self._changed:
            one.rows, one.failure = rows, failure
            self.num_encoded += 1
            if rows is not None:
                self._note(time.perf_counter() - began, len(rows))
                self._keep(one, rows)
        one.end()

    def _note(self, seconds: float, num_cells: int) -> None:
        cell_s = seconds / num_cells
        self.cell_s += _WEIGHT * (cell_s - self.cell_s) if self.cell_s else cell_s

    def _keep(self, one: Encoding, rows: Embeddings) -> None:
        self._kept[one.key] = one
        self._num_bytes += rows.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= 0 if oldest.rows is None else oldest.rows.nbytes
