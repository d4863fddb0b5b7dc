"""What lies in a slot: copied out, brought back to another engine, forgotten; for its own team only."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from tests.integration.engine.test_prefix_cache import STORY, cached
from tests.support.small_models import SMALL_MODELS, WORDS
from workers.engine.cache.slots import CopiedSlot
from workers.engine.request import EngineRequest
from workers.llama.memory import Memory
from workers.llama.model import Model
from workers.protocol.events import CallFailed, FailureCode

T = TypeVar("T")


def got(future: Future[T]) -> T:
    return future.result(timeout=20)


def of_team(request: EngineRequest, tenant: str = "red", salt: str = "") -> EngineRequest:
    return changed(request, tenant=tenant, cache_salt=salt)


def copy_of(bench: Bench, slot: int = 0, tenant: str = "red", salt: str = "") -> CopiedSlot:
    copied = got(bench.engine.slot_contents.copy(slot, tenant, salt))
    assert copied is not None
    return copied


def told(bench: Bench) -> list[tuple[bool, int, int, str]]:
    infos = got(bench.engine.slot_contents.infos())
    assert [info.id for info in infos] == list(range(bench.engine.slots))
    return [(info.is_processing, info.n_prompt_tokens, info.n_decoded, info.tenant) for info in infos]


def spoken(bench: Bench, first: EngineRequest, answer: str) -> list[int]:
    """The conversation with a next question."""
    return [*first.prompt.tokens, *bench.tokens(answer)[1:], *bench.tokens(" What then?")[1:]]


def test_a_conversation_goes_on_in_another_engine(any_model: Model) -> None:
    with running(any_model, slots=2) as bench:
        first = of_team(bench.request(STORY, 20, ignore_eos=True))
        answer = bench.answer(first)
        copied = copy_of(bench)
        prompt = spoken(bench, first, answer)
        expected = bench.answer(changed(bench.request(prompt, 20), cache_prompt=False))
    saved = copied.conversation
    assert saved.tokens[: len(first.prompt.tokens)].tolist() == list(first.prompt.tokens)
    assert len(saved.tokens) == len(first.prompt.tokens) + 19, "the last token was not computed any more"
    assert [block.end for block in saved.blocks[:-1]] == [block.start for block in saved.blocks[1:]]
    with running(any_model, slots=2) as bench:
        assert got(bench.engine.slot_contents.restore(1, copied.scope, saved)) == len(saved.tokens)
        assert told(bench)[1] == (False, len(saved.tokens), 0, "red")
        again = of_team(bench.request(prompt, 20))
        assert bench.answer(again) == expected
        assert cached(bench, again.key) >= len(first.prompt.tokens)
        assert bench.engine.counters.num_restored >= len(first.prompt.tokens)
        stranger = of_team(bench.again(again), "blue")
        bench.answer(stranger)
        assert cached(bench, stranger.key) == 0


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_every_kind_of_memory(small_models: dict[str, Path], name: str) -> None:
    with Model.load(small_models[name], ONE_THREAD) as model:
        with running(model, slots=2, n_ctx=256, kv_tokens=512) as bench:
            bench.answer(of_team(bench.request(WORDS[:100], 1)))
            saved = copy_of(bench)
            prompt = WORDS[:120]
            expected = bench.answer(changed(bench.request(prompt, 8, ignore_eos=True), cache_prompt=False))
        assert saved.conversation.tokens.tolist() == WORDS[:100]
        with running(model, slots=2, n_ctx=256, kv_tokens=512) as bench:
            assert got(bench.engine.slot_contents.restore(0, saved.scope, saved.conversation)) == 100
            again = of_team(bench.request(prompt, 8, ignore_eos=True))
            assert bench.answer(again) == expected
            assert cached(bench, again.key) == 100
            assert got(bench.engine.slot_contents.erase(0, "red", "")) == 127
            anew = bench.again(again)
            assert bench.answer(anew) == expected
            assert cached(bench, anew.key) == 0


def test_what_moved_to_ram_is_copied_from_there(stories: Model) -> None:
    """From blocks that other conversations share in part, as from the cache."""
    with running(stories, slots=2, n_ctx=512, kv_tokens=1024) as bench:
        other = bench.submit(bench.request("Tim said", 250, ignore_eos=True))
        bench.heard.until(lambda: bench.heard.calls[other])
        first = of_team(bench.request(STORY, 5))
        bench.answer(first)
        early = copy_of(bench, 1)
        fork = [*first.prompt.tokens[:80], *bench.tokens("A cat came and they played")[1:]]
        for number in range(3):
            bench.answer(of_team(bench.request([*fork, 300 + number], 5, ignore_eos=True)))
        bench.wait(other)
        bench.answer(bench.request("The dog", 400, ignore_eos=True))
        assert bench.engine.counters.ram_bytes > 0
        late = copy_of(bench, 1)
        assert late.conversation.tokens[: len(fork)].tolist() == fork
    for copied in (early, late):
        num_tokens = len(copied.conversation.tokens)
        with running(stories, slots=1, n_ctx=512) as bench:
            assert got(bench.engine.slot_contents.restore(0, copied.scope, copied.conversation)) == num_tokens
            again = of_team(bench.request([*copied.conversation.tokens.tolist(), 300], 10))
            text = bench.answer(again)
            assert cached(bench, again.key) == num_tokens
            alone = changed(bench.again(again), cache_prompt=False)
            assert bench.answer(alone) == text


@pytest.mark.parametrize(("tenant", "salt"), [("blue", ""), ("red", "other"), ("", ""), ("red", "")])
def test_nobody_else_finds_anything_in_it(stories: Model, tenant: str, salt: str) -> None:
    with running(stories, slots=2) as bench:
        first = of_team(bench.request(STORY, 5), "red", "mine")
        bench.answer(first)
        assert got(bench.engine.slot_contents.copy(0, tenant, salt)) is None
        assert got(bench.engine.slot_contents.copy(1, tenant, salt)) is None
        assert got(bench.engine.slot_contents.erase(0, tenant, salt)) == 0
        again = bench.again(first)
        bench.answer(again)
        assert cached(bench, again.key) == len(first.prompt.tokens) - 1


@pytest.mark.parametrize("idle", [True, False], ids=["in the cache", "in RAM"])
def test_an_erased_conversation_is_computed_anew(any_model: Model, idle: bool) -> None:
    with running(any_model, slots=1, n_ctx=512, kv_tokens=2048) as bench:
        first = of_team(bench.request(STORY, 20, ignore_eos=True))
        bench.answer(first)
        if not idle:
            bench.answer(bench.request("The dog", 300, ignore_eos=True))
            bench.answer(of_team(bench.request(STORY, 20, ignore_eos=True)))
        assert got(bench.engine.slot_contents.erase(0, "red", "")) == len(first.prompt.tokens) + 19
        assert told(bench) == [(False, 0, 0, "")]
        assert got(bench.engine.slot_contents.copy(0, "red", "")) is None
        again = bench.again(first)
        bench.answer(again)
        assert cached(bench, again.key) == 0
        bench.engine.check_integrity()


def test_erasing_leaves_what_others_share(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        one, two = (of_team(bench.request([*bench.tokens(STORY), number], 5)) for number in (300, 301))
        bench.answer(one)
        bench.answer(two)
        assert got(bench.engine.slot_contents.erase(0, "red", "")) >= len(two.prompt.tokens)
        again = bench.again(one)
        bench.answer(again)
        assert cached(bench, again.key) == len(one.prompt.tokens) - 1


def test_a_shareable_prompt_survives_and_is_found_again(stories: Model) -> None:
    num_public = 100
    with running(stories, slots=1) as bench:
        first = changed(of_team(bench.request(STORY, 5)), num_public=num_public)
        bench.answer(first)
        copied = copy_of(bench)
        got(bench.engine.slot_contents.erase(0, "red", ""))
    with running(stories, slots=1) as bench:
        got(bench.engine.slot_contents.restore(0, copied.scope, copied.conversation))
        mine, other = bench.again(first), of_team(bench.again(bench.again(first)), "blue")
        bench.answer(other)
        bench.answer(mine)
        assert cached(bench, other.key) == num_public
        assert cached(bench, mine.key) == len(first.prompt.tokens) - 1


def test_a_slot_in_which_a_call_runs_is_busy(stories: Model) -> None:
    with running(stories, slots=1, n_ctx=512) as bench:
        done = of_team(bench.request(STORY, 5))
        bench.answer(done)
        copied = copy_of(bench)
        key = bench.submit(of_team(bench.request("The dog", None, ignore_eos=True)))
        bench.heard.until(lambda: bench.heard.calls[key])
        [(busy, num_prompt, _, tenant)] = told(bench)
        at_rest = bench.engine.slot_contents
        asked: tuple[Future[Any], ...] = (
            at_rest.copy(0, "red", ""),
            at_rest.erase(0, "red", ""),
            at_rest.restore(0, copied.scope, copied.conversation),
        )
        codes = []
        for future in asked:
            with pytest.raises(CallFailed) as caught:
                got(future)
            codes.append(caught.value.failure.code)
        bench.engine.cancel(key)
        bench.engine.check_integrity()
    assert (busy, num_prompt, tenant) == (True, len(bench.tokens("The dog")), "red")
    assert codes == [FailureCode.BUSY] * 3


def test_beside_a_running_stream(stories: Model) -> None:
    """A slot at rest is copied, erased and restored while another one speaks, and what that one says stays the same."""
    with running(stories, slots=2, n_ctx=512, kv_tokens=1024) as bench:
        stream = changed(bench.request("Tim said", 450, ignore_eos=True), cache_prompt=False)
        expected = bench.answer(stream)
        key = bench.submit(bench.again(stream))
        bench.heard.until(lambda: bench.heard.calls[key])
        bench.answer(of_team(bench.request(STORY, 5)))
        copied = copy_of(bench, 1)
        assert got(bench.engine.slot_contents.erase(1, "red", "")) == len(copied.conversation.tokens)
        assert got(bench.engine.slot_contents.restore(1, copied.scope, copied.conversation)) > 0
        assert told(bench)[0][0], "the stream still runs"
        bench.wait(key)
        assert bench.heard.text(key) == expected


def test_what_was_not_to_be_kept_is_not_in_the_slot(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        bench.answer(of_team(bench.request(STORY, 5)))
        bench.answer(changed(of_team(bench.request(STORY, 5)), cache_prompt=False))
        assert told(bench) == [(False, 0, 0, "")]
        assert got(bench.engine.slot_contents.copy(0, "red", "")) is None


@pytest.mark.parametrize("name", list(SMALL_MODELS))
def test_what_is_too_large_is_refused_while_it_is_copied(
    small_models: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that can't be cut is not even copied."""
    with Model.load(small_models[name], ONE_THREAD) as model, running(model, slots=1, kv_tokens=512) as bench:
        bench.answer(of_team(bench.request(WORDS[:200], 1)))
        size = sum(len(block.state) for block in copy_of(bench).conversation.blocks)
        assert got(bench.engine.slot_contents.copy(0, "red", "", size)) is not None
        saved_bytes = -1
        while saved_bytes != (saved_bytes := bench.engine.counters.ram_bytes):  # what is idle is saved meanwhile
            time.sleep(0.2)
        states: list[bytes] = []
        save = Memory.save

        def saved(memory: Memory, sequence: int) -> bytes:
            states.append(save(memory, sequence))
            return states[-1]

        monkeypatch.setattr(Memory, "save", saved)
        with pytest.raises(CallFailed) as caught:
            got(bench.engine.slot_contents.copy(0, "red", "", size // 4))
        assert caught.value.failure.code is FailureCode.STORAGE_FULL
        assert sum(map(len, states)) <= size // 2


@pytest.mark.parametrize("slot", [-1, 2])
def test_slots_that_there_are_not(stories: Model, slot: int) -> None:
    with (
        running(stories, slots=2) as bench,
        pytest.raises(CallFailed, match=f"no slot {slot}; this worker's are 0 to 1"),
    ):
        bench.engine.slot_contents.copy(slot, "red", "")


def test_without_memory_nothing_is_restored(stories: Model) -> None:
    with running(stories, slots=1, ram_bytes=0) as bench:
        bench.answer(of_team(bench.request(STORY, 5)))
        copied = copy_of(bench)
        with pytest.raises(CallFailed, match="cache_ram_mib"):
            got(bench.engine.slot_contents.restore(0, copied.scope, copied.conversation))


def test_with_little_memory_the_beginning_is_restored(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        bench.answer(of_team(bench.request(STORY * 3, 5)))
        copied = copy_of(bench)
    size = sum(len(block.state) for block in copied.conversation.blocks)
    with running(stories, slots=1, ram_bytes=size // 2) as bench:
        restored = got(bench.engine.slot_contents.restore(0, copied.scope, copied.conversation))
        assert 0 < restored < len(copied.conversation.tokens)


def test_an_engine_that_has_ended_says_so(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        bench.engine.stop()
        with pytest.raises(CallFailed, match="stopping"):
            got(bench.engine.slot_contents.infos())
