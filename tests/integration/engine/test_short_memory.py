"""Memory that can't be had within a step: the call that wanted it ends, or the worker does, and says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, Heard, running
from workers.constraint.mask import Bits
from workers.engine.engine import Engine
from workers.llama.batch import Batch
from workers.llama.context import Context
from workers.llama.model import Model
from workers.protocol.events import Failed
from workers.protocol.failures import CallFailed, FailureCode

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"


class HungryMask:
    """A form that wants more memory than there is after some tokens."""

    is_done = False

    def __init__(self) -> None:
        self._num_tokens = 0

    def permits(self, token: int) -> bool:
        if self._num_tokens > 3:
            raise MemoryError
        return True

    def allowed(self) -> Bits | None:
        return None

    def accept(self, token: int) -> None:
        self._num_tokens += 1


def failure_code(bench: Bench, key: int) -> FailureCode:
    last = bench.heard.calls[key][-1]
    assert isinstance(last, Failed), last
    return last.failure.code


def test_a_call_that_can_t_have_memory_ends_and_others_go_on() -> None:
    with Model.load(DEMO, ONE_THREAD) as model, running(model) as bench:
        alone = bench.answer(bench.request("Once upon a time", 60))
        other = bench.submit(bench.request("Once upon a time", 60))
        hungry = bench.submit(replace(bench.request("Once upon a time", 60), mask=HungryMask()))
        bench.wait(hungry, other)
        assert failure_code(bench, hungry) is FailureCode.OUT_OF_MEMORY
        assert bench.heard.text(other) == alone
        assert bench.answer(bench.request("Once upon a time", 60)) == alone
        bench.engine.check_integrity()


def test_where_no_call_is_to_blame_all_are_told_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def decode(context: Context, batch: Batch) -> None:
        raise MemoryError

    heard = Heard()
    with Model.load(DEMO, ONE_THREAD) as model, Context(model, ONE_THREAD, slots=2, kv_tokens=512) as context:
        engine = Engine(model, context, slots=2, n_ctx=256, emit=heard.emit)
        bench = Bench(model, engine, heard)
        monkeypatch.setattr(Context, "decode", decode)
        with caplog.at_level(logging.ERROR, "paddock.engine"):
            keys = [bench.submit(bench.request("Once upon a time", 60)) for _ in range(2)]
            engine.start()
            bench.wait(*keys)
            engine.stop()
        assert {failure_code(bench, key) for key in keys} == {FailureCode.OUT_OF_MEMORY}
        assert isinstance(engine.crashed, MemoryError)
        assert "ran out of memory and ends while running" in caplog.text
        with pytest.raises(CallFailed) as refused:
            bench.submit(bench.request("Once upon a time", 60))
        assert refused.value.failure.code is FailureCode.OUT_OF_MEMORY
