"""Conversations that outgrow their context: ended, or moved on without harm to those who share cells with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from tests.integration.engine.test_prefix_cache import STORY, held
from tests.support.lone_context import cells_by_position
from tests.support.small_models import SMALL_MODELS, WORDS
from workers.engine.cache.cached_sequence import CachedSequence
from workers.engine.cache.prompt import BLOCK_TOKENS
from workers.engine.pace import MOVE_S
from workers.engine.request import EngineRequest
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Plan
from workers.llama.memory import CellPositions, Memory
from workers.llama.model import Model
from workers.llama.native import StateUnusable
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallFailed, FailureCode, FinishReason


def test_an_answer_goes_on_past_the_context(stories: Model) -> None:
    with running(stories, n_ctx=64, kv_tokens=256) as bench:
        call = changed(bench.request("Once upon a time", 300, ignore_eos=True), context_shift=True)
        text = bench.answer(call)
        finished = bench.heard.finished(call.key)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 300)
        plain = bench.answer(bench.request("Once upon a time", None, ignore_eos=True))
        assert text.startswith(plain)
        assert len(set(text[-200:])) > 8, "it still says something"


def test_what_is_kept_decides_what_follows(stories: Model) -> None:
    """The same conversation with other tokens kept goes on otherwise: the kept ones are still there."""
    with running(stories, n_ctx=64, kv_tokens=256) as bench:
        calls = [
            changed(bench.request(STORY[:160], 60, ignore_eos=True), context_shift=True, n_keep=n_keep)
            for n_keep in (0, -1, 10_000)
        ]
        texts = [bench.answer(call) for call in calls]
        assert len(set(texts)) == 3
        assert [bench.heard.finished(call.key).usage.completion_tokens for call in calls] == [60, 60, 60]


def test_who_keeps_all_moves_seldom(stories: Model) -> None:
    """Each time llama.cpp turns the keys of the whole cache, everybody's: it did so for every second token."""
    with running(stories, n_ctx=128, kv_tokens=256) as bench:
        moves: list[int] = []
        shift = bench.engine._stepper._cache.shift

        def counted(sequence: CachedSequence, start: int, end: int, until: float) -> bool:
            moves.append(end - start)
            return shift(sequence, start, end, until)

        bench.engine._stepper._cache.shift = counted  # type: ignore[method-assign]
        call = changed(bench.request(STORY[:100], 200, ignore_eos=True), context_shift=True, n_keep=2**31 - 1)
        bench.answer(call)
        assert bench.heard.finished(call.key).usage.completion_tokens == 200
        assert len(moves) > 3
        assert min(moves) >= 128 // 16


def test_a_live_sharer_says_what_it_says_alone(any_model: Model) -> None:
    """Both hold the cells of one prompt; one of them moves its half of the conversation several times."""
    with running(any_model, n_ctx=128, kv_tokens=1024) as bench:
        prompt = bench.tokens(STORY)[:100]
        alone = bench.answer(changed(bench.request(prompt, 28, ignore_eos=True), cache_prompt=False))
        gate = held(bench)
        first = bench.submit(changed(bench.request(prompt, 200, ignore_eos=True), context_shift=True))
        others = [bench.submit(bench.request(prompt, 28, ignore_eos=True)) for _ in range(2)]
        gate.set()
        bench.heard.until(lambda: len(bench.heard.calls[first]) > 60)
        late = bench.submit(bench.request(prompt, 28, ignore_eos=True))
        bench.wait(first, late, *others)
        assert [bench.heard.text(key) for key in (*others, late)] == [alone] * 3
        assert bench.heard.finished(late).usage.cached_tokens == 99
        again = bench.request(prompt, 28, ignore_eos=True)
        assert bench.answer(again) == alone, "nothing that was moved is ever shared"


def test_a_shifted_conversation_that_is_thrown_out_comes_back(stories: Model) -> None:
    with running(stories, slots=3, n_ctx=128, kv_tokens=256) as bench:
        gate = held(bench)
        keys = [
            bench.submit(changed(bench.request(prompt, 300, ignore_eos=True), context_shift=True))
            for prompt in ("The dog", "A cat", "Tim said")
        ]
        gate.set()
        bench.wait(*keys)
        assert [bench.heard.finished(key).usage.completion_tokens for key in keys] == [300] * 3
        assert bench.engine.counters.num_preempted > 0


@pytest.mark.parametrize("ram_bytes", [64 << 20, 0])
def test_a_shifted_conversation_that_gives_way_is_not_read_again(demo: Model, ram_bytes: int) -> None:
    """Another team's calls take its only slot; what is kept of it meanwhile is gone when it has ended."""
    with running(demo, slots=1, n_ctx=256, kv_tokens=512, ram_bytes=ram_bytes) as bench:
        call = changed(bench.request("Once upon a time", 800, ignore_eos=True), context_shift=True, tenant="red")
        alone = bench.answer(call)
        read: list[int] = []
        run = bench.engine._stepper._run

        def look(plan: Plan[Sequence], num_empty: int = 0) -> None:
            read.extend(chunk.num_tokens for chunk in plan.prefill if chunk.sequence.shifted)
            run(plan, num_empty)

        bench.engine._stepper._run = look  # type: ignore[method-assign]
        again = bench.submit(bench.again(call))
        bench.heard.until(lambda: len(bench.heard.calls[again]) > 280)
        for number in range(4):
            end = bench.request(f"The dog {number}", 40, ignore_eos=True)
            bench.answer(changed(end, tenant="blue"))
        bench.wait(again)
        assert bench.engine.counters.num_sliced > 1
        assert read
        assert max(read) == 1, "the newest token"
        assert bench.heard.text(again) == alone
        index = bench.engine._stepper._cache.index
        assert not [node for node in index._all() if node.scope is not None and node.scope.own]


@contextmanager
def slow_copies(bench: Bench, monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None]) -> Iterator[list[int]]:
    """Each copy takes a step's time for copies -> the cells copied in each step, after which the books are right.

    `then(n)` is called when the `n`th copy is about to come into the cache.
    """
    stepper, copied = bench.engine._stepper, [0]
    load, step = Memory.load, stepper.step

    def slow(memory: Memory, sequence: int, state: bytes, positions: CellPositions | None = None) -> None:
        then(sum(num > 0 for num in copied))
        load(memory, sequence, state, positions)
        copied[-1] += memory.last_position(sequence) + 1 - memory.first_position(sequence)
        time.sleep(MOVE_S)

    def checked() -> None:
        copied.append(0)
        step()
        stepper.check()

    with monkeypatch.context() as patched:
        patched.setattr(Memory, "load", slow)
        patched.setattr(stepper, "step", checked)
        yield copied


def sharers(bench: Bench) -> tuple[EngineRequest, EngineRequest]:
    """One that is to be shifted, and gives way first, and one that ends a little later; they share 150 cells."""
    prompt = bench.tokens(STORY * 2)[:170]
    moving = changed(bench.request(prompt, 150, ignore_eos=True), context_shift=True, n_keep=4, priority=-1)
    return moving, bench.request(prompt[:150], None, ignore_eos=True)


@pytest.mark.serial
def test_what_is_shared_is_copied_a_part_in_each_step_while_others_go_on(
    stories: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(stories, slots=3, n_ctx=256, kv_tokens=1024) as bench:
        moving, sharer = sharers(bench)
        alone = bench.answer(changed(bench.again(sharer), cache_prompt=False))
        told: list[int] = []
        cells: list[dict[int, bytes]] = []
        cache = bench.engine._stepper._cache
        shift, move = cache.shift, Memory.shift

        def look(sequence: CachedSequence, start: int, end: int, until: float) -> bool:
            cells.append(cells_by_position(cache._memory.save(sequence.id)))
            return shift(sequence, start, end, until)

        def moved(memory: Memory, sequence: int, start: int, end: int, by: int) -> None:
            cells.append(cells_by_position(memory.save(sequence)))
            move(memory, sequence, start, end, by)

        monkeypatch.setattr(cache, "shift", look)
        monkeypatch.setattr(Memory, "shift", moved)
        with slow_copies(bench, monkeypatch, lambda n: told.append(len(bench.heard.calls[stream]))) as copied:
            gate = held(bench)
            stream = bench.submit(changed(bench.request("The dog", 200, ignore_eos=True), tenant="blue"))
            keys = [bench.submit(call) for call in (moving, sharer)]
            gate.set()
            bench.wait(stream, *keys)
        assert (max(copied), sum(copied)) == (BLOCK_TOKENS, 150)
        assert told[-1] - told[0] >= 150 // BLOCK_TOKENS, "tokens of another team's stream"
        assert bench.heard.text(sharer.key) == alone
        first, *_, last = cells[: len(told) + 1]
        assert last.items() <= first.items()
        assert last.keys() == {*range(4), *range(130, 256)}


@pytest.mark.parametrize("end", ["cancelled", "gives way", "no memory"])
def test_a_conversation_may_end_or_give_way_while_it_is_copied(
    stories: Model, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    with running(stories, slots=2, n_ctx=256, kv_tokens=1024) as bench:
        moving, sharer = sharers(bench)
        alone = bench.answer(changed(bench.again(sharer), cache_prompt=False))
        other = changed(bench.request("The dog", 20, ignore_eos=True), tenant="blue")

        def then(number: int) -> None:
            if number == 2 and end == "cancelled":
                bench.engine.cancel(moving.key)
            elif number == 2 and end == "gives way":
                bench.submit(other)
            elif number == 2:
                raise StateUnusable("llama.cpp could not restore a saved state: no free cells")

        with slow_copies(bench, monkeypatch, then) as copied:
            gate = held(bench)
            keys = [bench.submit(call) for call in (moving, sharer)]
            gate.set()
            bench.wait(*(keys if end != "cancelled" else [sharer.key]))
        assert max(copied) == BLOCK_TOKENS
        assert bench.heard.text(sharer.key) == alone
        if end != "cancelled":
            finished = bench.heard.finished(moving.key)
            assert finished.reason is FinishReason.LENGTH
            assert finished.usage.completion_tokens == (150 if end == "gives way" else 256 - 170 + 1)
            assert finished.num_preempted == (end == "gives way")
        assert bench.answer(bench.again(sharer)) == alone, "what is kept of it is right"


def test_conversations_that_are_full_at_once_have_room_for_all_their_contexts(stories: Model) -> None:
    """They share a prompt, in a cache that has as many cells as both contexts."""
    with running(stories, slots=2, n_ctx=256, kv_tokens=512) as bench:
        gate = held(bench)
        prompt = bench.tokens(STORY)
        calls = [bench.request(prompt + more, 300, ignore_eos=True) for more in ([], prompt[1:2])]
        keys = [bench.submit(changed(call, context_shift=True, n_keep=4)) for call in calls]
        gate.set()
        bench.wait(*keys)
        assert [bench.heard.finished(key).usage.completion_tokens for key in keys] == [300] * 2


def test_a_full_conversation_gives_way_and_comes_back_in_a_cache_for_one(
    stories: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the newest token again before its context was shifted: there was no cell for it, and the worker ended."""
    with running(stories, slots=1, n_ctx=256, kv_tokens=256) as bench:
        call = changed(bench.request("Once upon a time", 300, ignore_eos=True), context_shift=True, tenant="red")
        alone = bench.answer(call)
        moving, other = bench.again(call), changed(bench.request("The dog", 5), tenant="blue")
        stepper = bench.engine._stepper
        step = stepper.step
        full: list[int] = []

        def then() -> None:
            step()
            one = stepper._scheduler.find(moving.key)
            if one is not None and one.is_full and not full:
                full.append(bench.submit(other))

        monkeypatch.setattr(stepper, "step", then)
        bench.submit(moving)
        bench.wait(moving.key, other.key)
        assert full
        assert bench.heard.finished(moving.key).num_preempted == 1
        assert bench.heard.text(moving.key) == alone


def test_without_the_wish_the_context_is_the_end(stories: Model) -> None:
    with running(stories, n_ctx=64, kv_tokens=256) as bench:
        call = bench.request("Once upon a time", 300, ignore_eos=True)
        bench.answer(call)
        usage = bench.heard.finished(call.key).usage
        assert usage.prompt_tokens + usage.completion_tokens == 64


@pytest.mark.parametrize("name", [name for name in SMALL_MODELS if name not in ("attention", "attention-latent")])
def test_models_whose_positions_are_fixed_refuse(name: str, small_models: dict[str, Path]) -> None:
    with Model.load(small_models[name], ONE_THREAD) as model, running(model) as bench:
        with pytest.raises(CallFailed) as caught:
            bench.submit(changed(bench.request(WORDS[:5], 5), context_shift=True))
        assert caught.value.failure.code is FailureCode.UNSUPPORTED
        assert caught.value.failure.param == "context_shift"


def test_a_kv_type_that_llama_cpp_cannot_turn_refuses(stories: Model) -> None:
    bf16 = LlamaSettings(n_threads=1, cache_type_k="bf16")
    with running(stories, llama=bf16) as bench, pytest.raises(CallFailed, match="context_shift"):
        bench.submit(changed(bench.request("Once", 5), context_shift=True))
