"""Memory that can't be had within a step: the call that wanted it ends, or the worker does, and says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, Heard, changed, running
from tests.integration.engine.test_prefix_cache import behind_others
from tests.support.small_models import WORDS
from workers.constraint.mask import Bits
from workers.engine.engine import Engine
from workers.llama.context import Batch, Context
from workers.llama.memory import Memory
from workers.llama.model import Model
from workers.llama.native import StateUnusable
from workers.protocol.events import CallFailed, Failed, FailureCode, FinishReason

LONG = "There was a little girl named Lily. She had a red ball and a big dog. " * 3

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "paddock-demo.gguf"


class HungryMask:
    """A form that wants more memory than there is after some tokens."""

    is_done = False

    def __init__(self) -> None:
        self._num_tokens = 0

    def forced(self) -> tuple[int, ...]:
        return ()

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
        hungry = bench.submit(changed(bench.request("Once upon a time", 60), mask=HungryMask()))
        bench.wait(hungry, other)
        assert failure_code(bench, hungry) is FailureCode.OUT_OF_MEMORY
        assert bench.heard.text(other) == alone
        assert bench.answer(bench.request("Once upon a time", 60)) == alone
        bench.engine.check_integrity()


def test_without_memory_for_a_step_calls_are_given_back_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp would end the process: its C++ throws where a small block can't be had, and nobody catches that."""
    with Model.load(DEMO, ONE_THREAD) as model, running(model) as bench:
        alone = bench.answer(bench.request("Once upon a time", 60))
        with monkeypatch.context() as short:
            short.setattr(bench.engine._stepper._probe, "_take", lambda num_bytes: False)
            # Long enough that memory is looked for while they run, which is done every few steps.
            keys = [bench.submit(bench.request("Once upon a time", 200, ignore_eos=True)) for _ in range(2)]
            bench.wait(*keys)
        assert [failure_code(bench, key) for key in keys] == [FailureCode.OUT_OF_MEMORY] * 2
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


@contextmanager
def no_copies(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Iterator[list[int]]:
    """No state of a sequence can be copied meanwhile; the list has an entry for each try."""
    tries: list[int] = []

    def save(memory: Memory, sequence: int, part: int) -> bytes:
        tries.append(sequence)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Memory, "_save", save)
        yield tries


SHORT = [MemoryError(), StateUnusable("llama.cpp saved nothing of sequence 1: std::bad_alloc")]


@pytest.mark.parametrize("error", SHORT, ids=["of_our_own", "of_llama_cpp"])
def test_idle_prefixes_that_no_copy_can_be_made_of_are_dropped(
    any_model: Model, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """They can be computed again: beside a stream, where others need their cells, and at rest."""
    with running(any_model, slots=2, n_ctx=512, kv_tokens=512) as bench:
        alone = bench.answer(changed(bench.request("Once upon a time", 300, ignore_eos=True), cache_prompt=False))
        other = bench.answer(changed(bench.request(LONG, 20), cache_prompt=False))
        with no_copies(monkeypatch, error) as tries:
            stream = bench.submit(bench.request("Once upon a time", 300, ignore_eos=True))
            for number in range(4):
                bench.answer(bench.request(f"{number} {LONG}", 4))
            bench.wait(stream)
            assert bench.heard.text(stream) == alone
            assert bench.answer(bench.request(LONG, 20)) == other
        assert tries
        bench.engine.check_integrity()
        assert bench.engine.crashed is None
        again = bench.request(LONG, 20)
        assert bench.answer(again) == other
        assert bench.answer(bench.again(again)) == other


@pytest.mark.parametrize("error", SHORT, ids=["of_our_own", "of_llama_cpp"])
def test_cells_that_no_copy_can_be_made_of_stay_where_they_are(
    stories: Model, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Others have left, and the engine would move a stream's cells down; its steps are slower then, and right."""
    relocate, tries = Memory.relocate, list[int]()

    def short(memory: Memory, holders: Sequence[int], scratch: int, start: int, end: int) -> int:
        with no_copies(monkeypatch, error) as tried:
            try:
                return relocate(memory, holders, scratch, start, end)
            finally:
                tries.extend(tried)

    with running(stories, slots=4, n_ctx=512, kv_tokens=2048) as bench:
        long = bench.request("The dog", 300, ignore_eos=True)
        alone = bench.answer(changed(long, cache_prompt=False))
        with monkeypatch.context() as patched:
            patched.setattr(Memory, "relocate", short)
            key = behind_others(bench, long)
        assert tries
        assert bench.engine.crashed is None
        assert bench.engine.counters.num_packed == 0
        assert bench.heard.text(key) == alone
        bench.engine.check_integrity()
        for _ in range(5):  # a slow machine may be done with the stream before the others' cells have been saved
            if not bench.engine.counters.num_packed:
                behind_others(bench, long)
        assert bench.engine.counters.num_packed > 0, "it moves as soon as there is memory"


def test_a_conversation_that_no_copy_can_be_made_of_ends_where_it_would_move(
    stories: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two share their beginning: the first that is full needs cells of its own."""
    with running(stories, slots=2, n_ctx=128, kv_tokens=512) as bench:
        with no_copies(monkeypatch, MemoryError()) as tries:
            moving = changed(bench.request(LONG, 300, ignore_eos=True), context_shift=True)
            keys = [bench.submit(moving), bench.submit(bench.again(moving))]
            bench.wait(*keys)
        assert tries
        assert FinishReason.LENGTH in {bench.heard.finished(key).reason for key in keys}
        bench.engine.check_integrity()
        assert bench.engine.crashed is None


def test_a_conversation_whose_copy_finds_no_cells_ends_where_it_would_move(
    stories: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp takes the copy back in vain: the cells are gone by then, and must not pass for a prefix."""
    with running(stories, slots=2, n_ctx=128, kv_tokens=512) as bench:
        alone = bench.answer(changed(bench.request(LONG, 20), cache_prompt=False))
        tries: list[int] = []

        def load(memory: Memory, sequence: int, state: bytes, part: int) -> None:
            tries.append(sequence)
            memory.remove(sequence)
            raise StateUnusable("llama.cpp could not restore a saved state: no free cells")

        with monkeypatch.context() as patched:
            patched.setattr(Memory, "_load", load)
            moving = changed(bench.request(LONG, 300, ignore_eos=True), context_shift=True)
            keys = [bench.submit(moving), bench.submit(bench.again(moving))]
            bench.wait(*keys)
        assert tries
        assert FinishReason.LENGTH in {bench.heard.finished(key).reason for key in keys}
        bench.engine.check_integrity()
        assert bench.engine.crashed is None
        assert bench.answer(bench.request(LONG, 20)) == alone


def test_a_slot_that_no_copy_can_be_made_of_fails_its_request_only(
    stories: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(stories) as bench:
        bench.answer(bench.request(LONG, 4))
        with no_copies(monkeypatch, MemoryError()), pytest.raises(CallFailed) as failed:
            bench.engine.slot_contents.copy(0, "", "").result(20)
        assert failed.value.failure.code is FailureCode.OUT_OF_MEMORY
        assert bench.engine.slot_contents.copy(0, "", "").result(20) is not None
        bench.engine.check_integrity()


@pytest.mark.parametrize("kind", ["window", "recurrent", "hybrid"])
def test_states_that_no_copy_can_be_made_of_are_computed_again(
    small_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Checkpoints of prompts and answers are copies as well."""
    with Model.load(small_models[kind], ONE_THREAD) as model, running(model, slots=2, kv_tokens=512) as bench:

        def answers() -> list[str]:
            keys = [bench.submit(bench.request([*WORDS[:100], *WORDS[:number]], 8)) for number in range(3, 6)]
            bench.wait(*keys)
            return [bench.heard.text(key) for key in keys]

        with no_copies(monkeypatch, MemoryError()) as tries:
            without = answers()
            bench.engine.check_integrity()
        assert tries
        assert bench.engine.crashed is None
        assert answers() == without
        bench.engine.check_integrity()
