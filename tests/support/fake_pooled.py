"""An engine for pooled work without a model: an input's vector is made of its tokens, its score of their number."""

from __future__ import annotations

import numpy as np

from tests.support.fake_text import FakeVocab
from workers.engine.counters import EngineCounters
from workers.engine.pooled.engine import PooledRequest, Tell
from workers.engine.pooled.jobs import Vectors, tokens_of
from workers.engine.request import EngineLoad
from workers.protocol.events import CallFailed, Failure, FailureCode

WIDTH = 8


class FakeInputs:
    """Text to tokens, about four bytes to each."""

    def __init__(self) -> None:
        self._vocab = FakeVocab()

    def of_text(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(self._vocab.tokenize(text, add_special=add_special, parse_special=True))

    def of_pair(self, query: str, document: str) -> list[int]:
        return self.of_text(query) + self.of_text(document)


class FakePooledEngine:
    """Answers at once. The seam of the real engine for pooled work."""

    def __init__(self, slots: int, n_ctx: int, width: int, tell: Tell) -> None:
        self.slots = slots
        self.n_ctx = n_ctx
        self.counters = EngineCounters()
        self._width = width
        self._tell = tell

    def submit(self, request: PooledRequest) -> None:
        for number, tokens in enumerate(request.inputs):
            if len(tokens) > self.n_ctx:
                message = f"input {number} has {len(tokens)} tokens, the context {self.n_ctx}; send a shorter one"
                raise CallFailed(Failure(FailureCode.CONTEXT_OVERFLOW, message, "input"))
        self._tell(request.key, tuple(self._vectors(list(tokens_of(one))) for one in request.inputs))

    def cancel(self, key: int) -> None:
        """Nothing runs."""

    def load(self) -> EngineLoad:
        return EngineLoad(self.slots, 0, 0, self.slots * self.n_ctx, 0)

    def start(self) -> None:
        """There is no thread."""

    def stop(self) -> None:
        """There is none."""

    def _vectors(self, tokens: list[int]) -> Vectors:
        if self._width == 1:
            return np.full((1, 1), len(tokens), dtype=np.float32)
        row = np.array([token % 97 + 1 for token in (tokens * self._width)[: self._width]], dtype=np.float32)
        return (row / np.linalg.norm(row)).reshape(1, self._width)
