"""Keeps the weights of LoRA adapters in memory, and sets which adapters a context computes with.

Everything here belongs to the engine's thread, because llama.cpp's list of a model's adapters has no lock of its own
and `llama_decode` walks it. An adapter's file is read and checked beforehand, so loading copies it from the page cache.
Loading 35 MB took 19 ms in three of four runs (about as long as a step of a 0.5 B model), and 110 ms in one.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Collection

from workers.engine.adapters.turns import AdapterSet, Entry
from workers.engine.counters import Distribution, Tally
from workers.engine.request import IntegrityError
from workers.llama.adapters import Adapter, AdapterError, AppliedAdapters
from workers.llama.context import Context
from workers.llama.model import Model
from workers.metrics.types import LOAD_S

NUM_LOADS = 8
"""Number of loads, the newest ones, whose median duration is `load_ms`."""


class AdapterMemory:
    """The adapters in memory: at most `max_adapters` of them, with at most `max_bytes` in all (0: no bound)."""

    def __init__(self, model: Model, context: Context, *, max_adapters: int, max_bytes: int) -> None:
        self.max_adapters = max_adapters
        self.max_bytes = max_bytes
        self.resident: tuple[Entry, ...] = ()
        """Adapters in memory. May be read on any thread."""
        self._model = model
        self._applied = AppliedAdapters(context.pointer)
        self._load_ms: deque[float] = deque(maxlen=NUM_LOADS)
        self._load_s = Tally(LOAD_S)
        self.num_failures = 0
        """Loads that failed. May be read on any thread."""

    @property
    def load_s(self) -> Distribution:
        """Return a histogram of the seconds that each load took. Any thread may call this."""
        return self._load_s.distribution

    @property
    def load_ms(self) -> float:
        """Return the median milliseconds of the newest loads; 0: not known yet. Any thread may call this."""
        return statistics.median(self._load_ms.copy()) if self._load_ms else 0.0

    def fits(self, entries: Collection[Entry]) -> bool:
        """Return whether these adapters could be in memory together. Any thread may call this."""
        size = sum(entry.file.size for entry in entries)
        return len(entries) <= self.max_adapters and (not self.max_bytes or size <= self.max_bytes)

    def load(self, entry: Entry, keep: Collection[Entry]) -> None:
        """Copy an adapter's weights into memory; free others that are not in `keep` to make room. Raises AdapterError.

        None is freed for an adapter whose file can't be opened. Those without calls are freed first, the one used
        longest ago before others; then those with waiting calls; last those with calls that are being unloaded: the
        file may have changed. `keep` and `entry` must fit together.
        """
        try:
            entry.file.require_openable()
            evictable = sorted((one for one in self.resident if one not in keep), key=_worth)
            while evictable and not self.fits([*self.resident, entry]):
                self.free(evictable.pop(0))
            started = time.perf_counter()
            entry.adapter = Adapter.load(self._model, entry.file)
        except AdapterError:
            self.num_failures += 1
            raise
        took_s = time.perf_counter() - started
        self._load_ms.append(took_s * 1e3)
        self._load_s.add(took_s)
        self.resident = (*self.resident, entry)

    def free(self, entry: Entry) -> None:
        """Free an adapter's weights; does nothing if they are not in memory."""
        adapter, entry.adapter = entry.adapter, None
        if adapter is not None:
            self.resident = tuple(one for one in self.resident if one is not entry)
            self._applied.drop(adapter)
            adapter.close()

    def apply(self, adapters: AdapterSet) -> bool:
        """Make llama.cpp compute the next step with these adapters; return whether they differ from the last step's."""
        return self._applied.apply(tuple((_weights(entry), scale) for entry, scale in adapters.uses))


def _worth(entry: Entry) -> tuple[bool, bool, int]:
    return entry.leaving and entry.num_calls > 0, entry.num_calls > 0, entry.last_use


def _weights(entry: Entry) -> Adapter:
    if entry.adapter is None:
        raise IntegrityError(f"adapter {entry.name} is to be computed with and is not in memory")
    return entry.adapter
