"""Averages of this worker's calls and their costs, from which it predicts how long the next call would wait."""

from __future__ import annotations

import time
from itertools import accumulate

from workers.engine.counters import EngineCounters
from workers.engine.request import EngineLoad
from workers.protocol.heartbeat import Load

_WEIGHT = 0.1
"""Weight of the newest call, against all before it."""

_GAP_WEIGHT = 0.3
"""Weight of the gaps between tokens since the last look, against all before."""


class Rates:
    """The averages. For one event loop."""

    def __init__(self) -> None:
        self._num_bytes = self._num_tokens = 0.0
        self._hold_s = 0.0
        self._decode_s = 0.0
        self._gaps = (0, 0.0)
        """Number and sum of gaps, at the last look."""

    def accepted(self, num_bytes: int, num_tokens: int) -> None:
        """Count a prompt, its bytes as its prefix hashes count them."""
        keep = 1 - _WEIGHT
        self._num_bytes = self._num_bytes * keep + num_bytes
        self._num_tokens = self._num_tokens * keep + num_tokens

    def held(self, started_at: float) -> None:
        """Count a call that gave its slot back, however it ended. `started_at`: `time.monotonic` seconds."""
        seconds = time.monotonic() - started_at
        self._hold_s += (seconds - self._hold_s) * (_WEIGHT if self._hold_s else 1.0)

    def load(self, engine: EngineLoad, counters: EngineCounters) -> Load:
        self._look(counters)
        return Load(
            slots_busy=engine.slots_busy,
            waiting=engine.waiting,
            kv_tokens_used=engine.kv_tokens_used,
            backlog_tokens=engine.backlog_tokens,
            free_in_ms=_rounded(self._free_in_s(engine) * 1e3),
            prefill_ms=_rounded(engine.prefill_s * 1e3),
            decode_ms=_rounded(self._decode_s * 1e3),
            hold_ms=_rounded(self._hold_s * 1e3),
            answer_tokens=engine.answer_tokens,
            bytes_per_token=_rounded(self._num_bytes / self._num_tokens) if self._num_tokens else 0.0,
            preempted=counters.num_preempted,
        )

    def _look(self, counters: EngineCounters) -> None:
        count, total = sum(counters.gap_s.counts), counters.gap_s.total
        more, seconds = count - self._gaps[0], total - self._gaps[1]
        if more > 0:
            self._decode_s += (seconds / more - self._decode_s) * (_GAP_WEIGHT if self._decode_s else 1.0)
            self._gaps = count, total

    def _free_in_s(self, engine: EngineLoad) -> float:
        """Return the seconds until a slot comes free. Prompts are computed in sequence, answers beside each other."""
        if engine.slots_busy < engine.slots or not engine.running:
            return 0.0
        prompts = accumulate(call.num_prompt for call in engine.running)
        return min(
            before * engine.prefill_s + call.num_answer * self._decode_s
            for before, call in zip(prompts, engine.running, strict=True)
        )


def _rounded(value: float) -> float:
    """Return the value with three digits, so that noise is no news."""
    return float(f"{value:.3g}")
