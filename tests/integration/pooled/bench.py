"""A pooled engine under test, and what it told of each call."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from workers.engine.cache.prompt import Prompt
from workers.engine.encoder import MediaEncoder
from workers.engine.pooled.engine import Outcome, PooledEngine, PooledRequest
from workers.engine.pooled.jobs import Vectors
from workers.llama.context import Tokens
from workers.llama.model import Model
from workers.llama.pooling import PooledContext, PooledInputs, pooling_of
from workers.models.spec import LlamaSettings
from workers.protocol.events import Failure


def settings(pooling: str = "auto", *, n_ubatch: int = 512) -> LlamaSettings:
    return LlamaSettings(n_threads=1, pooling=pooling, n_ubatch=n_ubatch)


Input = str | Sequence[int] | Prompt


class PooledBench:
    """Submits calls and waits for them."""

    def __init__(self, context: PooledContext, slots: int, encoder: MediaEncoder | None = None) -> None:
        self.context = context
        self.inputs = PooledInputs(context.model, context.pooling, context.model)
        self.engine = PooledEngine(context, slots=slots, tell=self._tell, encoder=encoder)
        self.ended: list[int] = []
        """Keys, in the order in which the calls ended."""
        self.on_end: Callable[[int], None] | None = None
        self._told: dict[int, Outcome] = {}
        self._changed = threading.Condition()
        self._keys = itertools.count(1)

    @staticmethod
    def tokens(tokens: Sequence[int]) -> Tokens:
        return np.asarray(tokens, dtype=np.int32)

    def submit(self, inputs: Sequence[Input], normalize: int = 2, team: str = "", salt: str = "") -> int:
        key = next(self._keys)
        tokens = [self.inputs.of_text(one) if isinstance(one, str) else one for one in inputs]
        self.engine.submit(PooledRequest(key, tokens, normalize, tenant=team, salt=salt))
        return key

    def outcome(self, key: int) -> Outcome:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._told, 30), "it did not happen in time"
            return self._told[key]

    def vectors(
        self, inputs: Sequence[Input], normalize: int = 2, team: str = "", salt: str = ""
    ) -> tuple[Vectors, ...]:
        outcome = self.outcome(self.submit(inputs, normalize, team, salt))
        assert not isinstance(outcome, Failure), outcome
        return outcome

    def _tell(self, key: int, outcome: Outcome) -> None:
        with self._changed:
            assert key not in self._told
            self._told[key] = outcome
            self.ended.append(key)
            self._changed.notify_all()
        if self.on_end is not None:
            self.on_end(key)


@contextmanager
def running(
    model: Model,
    llama: LlamaSettings,
    *,
    slots: int = 4,
    n_ctx: int = 512,
    kv_tokens: int = 1024,
    start: bool = True,
    encoder: MediaEncoder | None = None,
) -> Iterator[PooledBench]:
    """An engine that is checked for lost sequences and cells when the test is over."""
    pooling = pooling_of(model, llama)
    with PooledContext(model, llama, pooling=pooling, n_ctx=n_ctx, kv_tokens=kv_tokens, num_sequences=slots) as context:
        bench = PooledBench(context, slots, encoder)
        engine = bench.engine
        if start:
            engine.start()
        try:
            yield bench
            engine.check_integrity()
        finally:
            engine.stop()
        assert engine.crashed is None
        engine.check_integrity()
        assert engine.load().slots_busy == 0
