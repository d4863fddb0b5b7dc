"""Prefixes that are shared, moved to RAM and brought back: how much is computed, and that the answer stays the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

import psutil
import pytest

from tests.integration.engine import listener
from tests.integration.engine.listener import UNDRAFTED, Bench, changed
from workers.engine.cache import prefix_cache
from workers.engine.cache.prompt import BLOCK_TOKENS
from workers.engine.pace import MovePace
from workers.engine.request import EngineRequest
from workers.engine.step.sequence import Sequence as Call
from workers.llama.context import Batch, Context
from workers.llama.memory import Memory
from workers.llama.model import Model
from workers.models.spec import MAX_SLOTS
from workers.protocol.requests import Sampling

running = partial(listener.running, speculation=UNDRAFTED)

STORY = "Once upon a time there was a little girl named Lily. She had a red ball and a big dog. " * 4
ENDS = ["She went to the park", "The dog ran", "Tim said", "One day it rained", "A cat came", "They played", "He", "It"]


def held(bench: Bench) -> threading.Event:
    """Keeps the engine's thread busy until the event is set, so that what is submitted meanwhile arrives at once."""
    gate = threading.Event()
    busy = threading.Event()

    def wait(step: int, events: object) -> None:
        busy.set()
        gate.wait(20)

    bench.heard.on_step = wait
    bench.submit(bench.request("Zzz", 1))
    busy.wait(20)
    bench.heard.on_step = None
    return gate


def cached(bench: Bench, key: int) -> int:
    return bench.heard.finished(key).usage.cached_tokens


def test_callers_with_one_system_prompt_compute_it_once(any_model: Model) -> None:
    with running(any_model, slots=8, n_ctx=512, kv_tokens=2048) as bench:
        alone = [bench.answer(changed(bench.request(STORY + end, 20), cache_prompt=False)) for end in ENDS]
        num_shared = len(bench.tokens(STORY))
        gate = held(bench)
        keys = [bench.submit(bench.request(STORY + end, 20)) for end in ENDS]
        gate.set()
        bench.wait(*keys)
        assert [bench.heard.text(key) for key in keys] == alone
        assert [cached(bench, key) >= num_shared - 2 for key in keys] == [False] + [True] * 7
        computed = sum(bench.heard.finished(key).timings.prompt_n for key in keys)
        own = sum(len(bench.tokens(STORY + end)) - num_shared for end in ENDS)
        assert computed <= num_shared + own + 2 * 8
        assert [bench.heard.started(key).num_cached_tokens for key in keys] == [cached(bench, key) for key in keys]


def test_shared_cells_are_stored_once(stories: Model) -> None:
    """Eight conversations of 300 tokens in 700 cells: they fit only because they share."""
    with running(stories, slots=8, n_ctx=512, kv_tokens=768) as bench:
        prompt = bench.tokens(STORY)[:300]
        gate = held(bench)
        most = [0]
        keys = [bench.submit(bench.request([*prompt, 300 + number], 30, ignore_eos=True)) for number in range(8)]
        bench.heard.on_step = lambda step, events: most.append(bench.engine.load().slots_busy)
        gate.set()
        bench.wait(*keys)
        assert max(most) == 8
        assert bench.engine.counters.num_preempted == 0


def test_the_same_prompt_many_times_is_computed_once(stories: Model) -> None:
    """As `n` > 1 asks for it."""
    with running(stories, slots=4, n_ctx=512, kv_tokens=2048) as bench:
        gate = held(bench)
        keys = [bench.submit(bench.request(STORY, 20)) for _ in range(4)]
        gate.set()
        bench.wait(*keys)
        num_prompt = len(bench.tokens(STORY))
        computed = [bench.heard.finished(key).timings.prompt_n for key in keys]
        assert computed[0] >= num_prompt - 1
        assert computed[1:] == [1, 1, 1]
        assert len({bench.heard.text(key) for key in keys}) == 1


def test_the_next_turn_takes_the_whole_last_one(any_model: Model) -> None:
    with running(any_model) as bench:
        first = bench.request(STORY, 20, ignore_eos=True)
        answer = bench.answer(first)
        prompt = [*first.prompt.tokens, *bench.tokens(answer)[1:], *bench.tokens(" What then?")[1:]]
        fresh = bench.answer(changed(bench.request(prompt, 20), cache_prompt=False))
        again = bench.request(prompt, 20)
        assert bench.answer(again) == fresh
        assert cached(bench, again.key) >= len(first.prompt.tokens)


def test_nothing_of_another_salt_is_used(any_model: Model) -> None:
    with running(any_model) as bench:
        one = changed(bench.request(STORY, 10), cache_salt="red")
        bench.answer(one)
        other = changed(bench.again(one), cache_salt="blue")
        bench.answer(other)
        same = changed(bench.again(one))
        bench.answer(same)
        num_prompt = len(one.prompt.tokens)
        assert [cached(bench, call.key) for call in (one, other, same)] == [0, 0, num_prompt - 1]


def test_calls_of_other_salts_do_not_wait_for_each_other(stories: Model) -> None:
    with running(stories, slots=4, n_ctx=512, kv_tokens=2048) as bench:
        gate = held(bench)
        keys = [bench.submit(changed(bench.request(STORY, 10), cache_salt=str(number))) for number in range(4)]
        gate.set()
        bench.wait(*keys)
        assert [cached(bench, key) for key in keys] == [0, 0, 0, 0]


def test_a_shareable_prompt_is_everyones_and_what_follows_is_not(stories: Model) -> None:
    with running(stories) as bench:
        num_public = len(bench.tokens(STORY))
        prompt = [*bench.tokens(STORY), *bench.tokens("My secret is")[1:]]
        calls = [
            changed(bench.request(prompt, 5), cache_salt=salt, num_public=num_public)
            for salt in ("red", "blue", "blue")
        ]
        for call in calls:
            bench.answer(call)
        assert [cached(bench, call.key) for call in calls] == [0, num_public, len(prompt) - 1]
        private = changed(bench.request(prompt, 5), cache_salt="green")
        bench.answer(private)
        assert cached(bench, private.key) == 0, "a caller whose prompt is not marked takes no part in it"


def test_who_asks_for_no_cache_neither_takes_nor_leaves(stories: Model) -> None:
    with running(stories) as bench:
        first = changed(bench.request(STORY, 5), cache_prompt=False)
        bench.answer(first)
        second = bench.request(STORY, 5)
        bench.answer(second)
        third = changed(bench.again(second), cache_prompt=False)
        bench.answer(third)
        assert [cached(bench, call.key) for call in (first, second, third)] == [0, 0, 0]


@pytest.mark.parametrize("ram_bytes", [0, 64 << 20], ids=["no RAM", "RAM"])
def test_idle_prefixes_leave_the_cache_for_others(any_model: Model, ram_bytes: int) -> None:
    """Twelve conversations through cells for two: with RAM their next turns find all, without it nothing is wrong."""
    with running(any_model, slots=2, n_ctx=256, kv_tokens=512, ram_bytes=ram_bytes) as bench:
        prompts = [[*bench.tokens(ENDS[number % 8]), *bench.tokens(STORY)[1 + number : 181]] for number in range(12)]
        alone = [bench.answer(changed(bench.request(prompt, 10), cache_prompt=False)) for prompt in prompts]
        first = [bench.request(prompt, 10) for prompt in prompts]
        assert [bench.answer(call) for call in first] == alone
        second = [bench.request(prompt, 10) for prompt in prompts]
        assert [bench.answer(call) for call in second] == alone
        found = sum(cached(bench, call.key) for call in second)
        total = sum(len(prompt) - 1 for prompt in prompts)
        if ram_bytes:
            assert found == total
            assert bench.engine.counters.num_restored > 0
        else:
            assert found < total / 2
            assert bench.engine.counters.num_restored == 0


def test_old_prefixes_leave_ram_when_it_is_full(stories: Model) -> None:
    with running(stories, slots=2, n_ctx=256, kv_tokens=512, ram_bytes=200 << 10) as bench:
        calls = [
            bench.request([*bench.tokens(ENDS[number % 8]), *bench.tokens(STORY)[1 + number : 200]], 5)
            for number in range(12)
        ]
        for call in calls:
            bench.answer(call)
        assert 0 < bench.engine.counters.ram_bytes <= 200 << 10
        last, first = bench.again(calls[-1]), bench.again(calls[0])
        bench.answer(last)
        bench.answer(first)
        assert cached(bench, last.key) == len(last.prompt.tokens) - 1
        assert cached(bench, first.key) < len(first.prompt.tokens) - 1


def test_the_beginning_of_what_was_in_use_stays_in_ram(demo: Model) -> None:
    """A conversation goes on, and its end needs room in RAM: it is not taken from its own beginning."""
    with running(demo, slots=2, n_ctx=512, kv_tokens=512, ram_bytes=1400 << 10) as bench:
        story = (bench.tokens(STORY) * 8)[:500]
        prompt, other = story[:130], [*bench.tokens(ENDS[1]), *story[:125]]
        for tokens in (prompt, other):
            enough = bench.engine.counters.ram_bytes + (400 << 10)
            bench.answer(bench.request(tokens, 2, ignore_eos=True))
            while bench.engine.counters.ram_bytes < enough:
                time.sleep(0.01)
        bench.answer(bench.request(prompt, 150, ignore_eos=True))
        bench.answer(changed(bench.request(story, 2, ignore_eos=True), cache_prompt=False))
        calls = [bench.request(tokens, 2, ignore_eos=True) for tokens in (prompt, other)]
        for call in calls:
            bench.answer(call)
        assert cached(bench, calls[0].key) == len(prompt) - 1
        assert cached(bench, calls[1].key) < len(other) - 1


def test_an_idle_prefix_goes_to_ram_early_and_comes_back(stories: Model) -> None:
    """Long before its cells are needed: every step of the others scans it."""
    with running(stories, slots=2, n_ctx=512, kv_tokens=4096) as bench:
        call = bench.request(STORY, 5)
        text = bench.answer(call)
        bench.answer(bench.request("The dog", 200, ignore_eos=True))
        assert bench.engine.counters.ram_bytes > 0
        again = bench.again(call)
        assert bench.answer(again) == text
        assert cached(bench, again.key) == len(call.prompt.tokens) - 1
        assert bench.engine.counters.num_restored >= len(call.prompt.tokens) - 2


def test_who_comes_while_a_long_prefix_comes_back_does_not_wait_for_all_of_it(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody decodes: one step brought back everything, up to all of RAM, and the newcomer met the next one."""
    monkeypatch.setattr("workers.engine.step.scheduler.MOVE_S", 0.0)  # a slow machine, on any
    monkeypatch.setattr(MovePace, "restore_pays", True)
    with running(demo, slots=2, n_ctx=512, kv_tokens=512) as bench:
        long = changed(bench.request([300 + number for number in range(440)], 4), tenant="red")
        text = bench.answer(long)
        bench.answer(changed(bench.request([7] * 440, 4), cache_prompt=False))
        again, short = bench.again(long), changed(bench.request("The dog", 1), tenant="blue")
        seen: list[str] = []
        store = bench.engine._stepper._cache
        restore = store.restore

        def restoring(call: Call) -> None:
            if not seen:
                bench.submit(short)
            seen.append("restored")
            restore(call)

        monkeypatch.setattr(store, "restore", restoring)
        bench.heard.on_step = lambda _, events: seen.extend("told" for one in events if one.call == short.key)
        bench.submit(again)
        bench.wait(again.key, short.key)
        assert bench.heard.text(again.key) == text
        assert seen.count("restored") >= 440 // BLOCK_TOKENS
        assert "restored" in seen[seen.index("told") :], seen


def test_when_cells_run_out_one_waits_and_loses_nothing(any_model: Model) -> None:
    """Answers longer than their engine can know: all four enter, not all can go on at once."""
    with running(any_model, slots=4, n_ctx=256, kv_tokens=512) as bench:
        prompts = [[*bench.tokens(end), *bench.tokens(STORY)[1:40]] for end in ENDS[:4]]
        alone = [bench.answer(bench.request(prompt, 200, ignore_eos=True)) for prompt in prompts]
    with running(any_model, slots=4, n_ctx=256, kv_tokens=512) as bench:
        gate = held(bench)
        keys = [bench.submit(bench.request(prompt, 200, ignore_eos=True)) for prompt in prompts]
        gate.set()
        bench.wait(*keys)
        assert bench.engine.counters.num_preempted > 0
        assert [bench.heard.text(key) for key in keys] == alone
        usages = [bench.heard.finished(key).usage for key in keys]
        assert [usage.completion_tokens for usage in usages] == [200] * 4
        ends = [next(n for n, events in bench.heard.steps if bench.heard.finished(key) in events) for key in keys]
        assert ends[0] == min(ends), "the first in order is never thrown out"


def test_the_lowest_priority_is_thrown_out_and_the_highest_goes_first(stories: Model) -> None:
    with running(stories, slots=2, n_ctx=256, kv_tokens=256) as bench:
        gate = held(bench)
        low = bench.submit(changed(bench.request("The dog", 150, ignore_eos=True), priority=-1))
        high = bench.submit(changed(bench.request("Tim said", 150, ignore_eos=True), priority=1))
        middle = bench.submit(bench.request("A cat", 20, ignore_eos=True))
        gate.set()
        bench.wait(low, high, middle)
        ends = {
            key: next(n for n, events in bench.heard.steps if bench.heard.finished(key) in events)
            for key in (low, high, middle)
        }
        assert ends[high] < ends[low]
        assert ends[middle] < ends[low]


def behind_others(bench: Bench, long: EngineRequest) -> int:
    """Answer a call that begins above others, which soon leave; return its key."""
    prompts = [[*bench.tokens(ENDS[number]), *bench.tokens(STORY)[1 + number : 110]] * 4 for number in range(3)]
    gate = held(bench)
    short = [bench.submit(bench.request(prompt[:400], 2)) for prompt in prompts]
    key = bench.submit(bench.again(long))
    gate.set()
    bench.wait(key, *short)
    return key


def test_running_calls_move_down_when_others_leave(any_model: Model) -> None:
    """Attention scans up to the highest cell: a call that began above idle prefixes does not stay there."""
    with running(any_model, slots=4, n_ctx=512, kv_tokens=2048) as bench:
        long = bench.request("The dog", 300, ignore_eos=True)
        alone = bench.answer(changed(long, cache_prompt=False))
        assert bench.engine.counters.num_packed == 0
        key = behind_others(bench, long)
        assert bench.engine.counters.num_packed > 0
        assert bench.heard.text(key) == alone


def test_what_moves_down_at_once_is_bounded_in_bytes(stories: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a large model is 128 KiB: a thousand of them in one step hold up every stream."""
    parts: list[int] = []
    relocate = Memory.relocate

    def counted(memory: Memory, holders: Sequence[int], scratch: int, start: int, end: int) -> int:
        parts.append(end - start)
        return relocate(memory, holders, scratch, start, end)

    monkeypatch.setattr(Memory, "relocate", counted)
    monkeypatch.setattr(prefix_cache, "PACK_BYTES", 1)
    with running(stories, slots=4, n_ctx=512, kv_tokens=2048) as bench:
        long = bench.request(bench.tokens(STORY)[:200], 250, ignore_eos=True)
        alone = bench.answer(changed(long, cache_prompt=False))
        key = behind_others(bench, long)
        assert bench.heard.text(key) == alone
    assert len(parts) > 1
    assert max(parts) <= BLOCK_TOKENS


def test_an_engine_at_rest_sleeps_although_ram_is_smaller_than_what_is_idle(stories: Model) -> None:
    with running(stories, slots=4, n_ctx=512, kv_tokens=2048, ram_bytes=64 << 10) as bench:
        for number in range(2):
            tokens = bench.tokens(STORY)[:300]
            bench.answer(bench.request([tokens[0], 300 + number, *tokens[1:]], 5, ignore_eos=True))
        time.sleep(0.3)
        [thread] = [one for one in psutil.Process().threads() if one.id == engine_thread_id()]
        time.sleep(0.5)
        [later] = [one for one in psutil.Process().threads() if one.id == thread.id]
        assert later.user_time + later.system_time - thread.user_time - thread.system_time < 0.1


def engine_thread_id() -> int:
    return next(one.native_id for one in threading.enumerate() if one.name == "engine" and one.native_id is not None)


def test_as_many_slots_as_can_be(stories: Model) -> None:
    with running(stories, slots=MAX_SLOTS, n_ctx=64, kv_tokens=16384) as bench:
        keys = [bench.submit(bench.request([1, 260 + number % 200], 8, ignore_eos=True)) for number in range(MAX_SLOTS)]
        bench.wait(*keys)
        assert bench.engine.crashed is None


def test_a_call_given_up_while_its_sampler_is_made_leaves_nothing(demo: Model) -> None:
    """Making a DRY sampler takes a while, and the engine's lock is free meanwhile."""
    dry = Sampling(dry_multiplier=1.0, dry_sequence_breakers=tuple("abcdefghij"))
    with running(demo) as bench:
        request = bench.request("What is 2 + 3?", 20, sampling=dry)
        maker = threading.Thread(target=bench.submit, args=(request,))
        maker.start()
        while maker.is_alive():
            bench.engine.cancel(request.key)
        maker.join()
        bench.engine.check_integrity()
        bench.answer(bench.request("What is 2 + 4?", 3))
        load = bench.engine.load()
        assert (load.waiting, load.slots_busy) == (0, 0)


def test_a_short_turn_after_many_tokens_is_computed_in_a_whole_tile(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    decode = Context.decode

    def noted(context: Context, batch: Batch) -> None:
        rows.append(batch.num_tokens)
        decode(context, batch)

    monkeypatch.setattr(Context, "decode", noted)
    texts: list[str] = []
    for is_padded in (True, False):
        if not is_padded:
            monkeypatch.setattr("workers.engine.step.stepper.tile_padding", lambda parts: 0)
        with running(demo, n_ctx=1024) as bench:
            past = bench.tokens("The little dog and the red ball went to the park. " * 80)[:900]
            bench.answer(bench.request(past, 1))
            rows.clear()
            turn = bench.request([*past, *past[100:142]], 20, ignore_eos=True)
            texts.append(bench.answer(turn))
            assert bench.heard.started(turn.key).num_cached_tokens == 900
            assert rows[0] == (64 if is_padded else 42)
    assert texts[0] == texts[1]
