from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2 import Template

from tests.integration.engine.listener import ONE_THREAD, Bench, Heard, running
from workers.engine.engine import Engine, EngineRequest
from workers.engine.request import IntegrityError
from workers.llama.context import Context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallEvent, CallFailed, Failed, FailureCode, FinishReason, Text

PROMPTS = [
    "Once upon a time",
    "Lily had a red ball and",
    "The dog",
    "One day, a boy named Tim went to the park. He saw",
    "Mom said",
    "There was a big tree. " * 6,
    "It was",
    "A cat and a bird were friends. The cat liked to",
]


def refused(bench: Bench, prompt: str | list[int] = "Once") -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        bench.submit(bench.request(prompt))
    return caught.value


@pytest.mark.parametrize("n_ubatch", [32, 512])
def test_many_at_once_say_what_each_says_alone(any_model: Model, n_ubatch: int) -> None:
    """More calls than slots; with n_ubatch 32 the long prompts go in chunks beside running streams."""
    llama = LlamaSettings(n_threads=1, n_ubatch=n_ubatch)
    with running(any_model, slots=4, n_ctx=256, kv_tokens=1024, llama=llama) as bench:
        alone = [bench.answer(bench.request(prompt, 30)) for prompt in PROMPTS]
        together = [bench.submit(bench.request(prompt, 30)) for prompt in PROMPTS]
        bench.wait(*together)
        assert [bench.heard.text(key) for key in together] == alone
        assert len(set(alone)) > 5
        assert max(len(bench.tokens(prompt)) for prompt in PROMPTS) > 32
        assert {bench.heard.started(key).slot for key in together} == {0, 1, 2, 3}


def test_usage_and_timings_are_exact(bench: Bench) -> None:
    key = bench.submit(bench.request("Once upon a time", 40))
    bench.wait(key)
    started, finished = bench.heard.started(key), bench.heard.finished(key)
    num_prompt = len(bench.tokens("Once upon a time"))
    assert (started.num_prompt_tokens, started.num_cached_tokens) == (num_prompt, 0)
    assert finished.reason is FinishReason.LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (num_prompt, 40)
    assert (finished.timings.prompt_n, finished.timings.predicted_n, finished.timings.cache_n) == (num_prompt, 40, 0)
    assert finished.timings.prompt_ms > 0
    assert finished.timings.predicted_ms > 0
    told = [event.num_tokens for event in bench.heard.calls[key] if isinstance(event, Text)]
    assert sum(told) == 40


def test_without_a_limit_the_context_is_the_limit(stories: Model) -> None:
    with running(stories, n_ctx=64) as bench:
        key = bench.submit(bench.request("Once upon a time", None, ignore_eos=True))
        bench.wait(key)
        usage = bench.heard.finished(key).usage
        assert usage.prompt_tokens + usage.completion_tokens == 64
        assert bench.heard.finished(key).reason is FinishReason.LENGTH


def test_the_end_token_ends_and_can_be_ignored(demo: Model) -> None:
    assert demo.chat_template is not None
    prompt = Template(demo.chat_template).render(
        messages=[{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True, bos_token=demo.bos_text
    )
    with running(demo) as bench:
        tokens = demo.tokenize(prompt, add_special=False, parse_special=True)
        ended = bench.submit(bench.request(tokens, 200))
        ignored = bench.submit(bench.request(tokens, 200, ignore_eos=True))
        bench.wait(ended, ignored)
        first, second = bench.heard.finished(ended), bench.heard.finished(ignored)
        assert (first.reason, first.stop) == (FinishReason.STOP, None)
        assert first.usage.completion_tokens < 200
        assert (second.reason, second.usage.completion_tokens) == (FinishReason.LENGTH, 200)
        assert bench.heard.text(ignored).startswith(bench.heard.text(ended))


def test_a_stop_string_ends_and_never_leaks(bench: Bench) -> None:
    whole = bench.answer(bench.request("Once upon a time", 60))
    stop = whole[30:37]
    key = bench.submit(bench.request("Once upon a time", 60, stop=("nowhere in it", stop)))
    bench.wait(key)
    assert bench.heard.text(key) == whole[: whole.index(stop)]
    finished = bench.heard.finished(key)
    assert (finished.reason, finished.stop) == (FinishReason.STOP, stop)
    assert finished.usage.completion_tokens < 60


def test_no_tokens_wanted_computes_the_prompt_only(bench: Bench) -> None:
    key = bench.submit(bench.request("Once upon a time", 0))
    bench.wait(key)
    assert bench.heard.text(key) == ""
    assert bench.heard.finished(key).usage.completion_tokens == 0
    assert bench.heard.finished(key).reason is FinishReason.LENGTH


def test_first_come_first_served_and_busy_beyond(bench: Bench) -> None:
    """4 slots and a waiting room of 12."""
    gate = threading.Event()

    def hold(step: int, events: list[CallEvent]) -> None:
        assert gate.wait(30)

    bench.heard.on_step = hold
    requests = [bench.request("Once", 30) for _ in range(16)]
    keys = [bench.submit(request) for request in requests]
    failure = refused(bench).failure
    assert failure.code is FailureCode.BUSY
    assert "4 slots and the waiting room for 12" in failure.message
    bench.heard.until(lambda: bench.heard.steps)
    load = bench.engine.load()
    assert (load.slots, load.slots_busy + load.waiting) == (4, 16)
    gate.set()
    bench.wait(*keys)
    order = [event.call for _, events in bench.heard.steps for event in events if event.__class__.__name__ == "Started"]
    assert order == keys
    load = bench.engine.load()
    assert (load.slots_busy, load.waiting, load.kv_tokens_used) == (0, 0, 0)


def test_nobody_overtakes_a_call_that_waits_for_cells(stories: Model) -> None:
    """3 slots, but cells for two long prompts only; the short call behind them does not overtake the third."""
    with running(stories, slots=3, n_ctx=256, kv_tokens=512) as bench:
        prompts = [[start + 5, *bench.tokens("There was a big tree. " * 30)[:220]] for start in range(3)]
        keys = [bench.submit(bench.request(prompt, 30, ignore_eos=True)) for prompt in prompts]
        keys.append(bench.submit(bench.request("The", 2)))
        bench.wait(*keys)
        starts = [
            next(step for step, events in bench.heard.steps if bench.heard.started(key) in events) for key in keys
        ]
        ends = [next(step for step, events in bench.heard.steps if bench.heard.finished(key) in events) for key in keys]
        assert starts == sorted(starts)
        assert starts[2] > min(ends[:2])


def test_a_cancelled_call_is_gone_within_one_step(bench: Bench) -> None:
    heard = bench.heard
    victim, other = (bench.submit(bench.request("Once upon a time", None, ignore_eos=True)) for _ in range(2))
    heard.until(lambda: len(heard.text(victim)) > 20)
    with heard.changed:
        bench.engine.cancel(victim)
        num_heard = len(heard.calls[victim])
    heard.until(lambda: len(heard.text(other)) > 200)
    assert len(heard.calls[victim]) <= num_heard + 1
    assert not heard.has_ended(victim)
    assert bench.engine.load().slots_busy == 1
    bench.engine.check_integrity()
    bench.engine.cancel(other)
    bench.engine.cancel(12345)
    bench.engine.check_integrity()
    assert bench.engine.load().slots_busy == 0


def test_a_call_cancelled_during_its_last_step_emits_nothing_more(bench: Bench) -> None:
    """The cancel comes on the engine thread itself, between two steps, so there is no race in this test."""
    key = 1
    bench.heard.on_step = lambda step, events: bench.engine.cancel(key) if step == 3 else None
    assert bench.submit(bench.request("Once upon a time", 4)) == key
    later = bench.submit(bench.request("Once", 10))
    bench.wait(later)
    assert not bench.heard.has_ended(key)
    assert bench.heard.steps[3][1][0].call == later


def test_a_waiting_call_can_be_cancelled(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        running_key = bench.submit(bench.request("Once upon a time", 60))
        waiting = bench.submit(bench.request("Once upon a time", 60))
        bench.engine.cancel(waiting)
        bench.wait(running_key)
        bench.engine.check_integrity()
        assert bench.heard.calls[waiting] == []
        assert bench.engine.load().waiting == 0


def test_a_crowd_that_comes_and_goes_loses_nothing(stories: Model) -> None:
    """60 calls from 3 threads on 3 slots and few cells; a third of them is cancelled somewhere on the way."""
    with running(stories, slots=3, n_ctx=128, kv_tokens=256) as bench:
        alone = {prompt: bench.answer(bench.request(prompt, 20)) for prompt in PROMPTS}
        requests = [(prompt, bench.request(prompt, 20)) for prompt in PROMPTS for _ in range(8)][:60]
        chance = random.Random(1)
        chance.shuffle(requests)
        cancelled = {request.key for _, request in chance.sample(requests, 20)}

        def caller(mine: list[EngineRequest]) -> None:
            for request in mine:
                while True:
                    try:
                        bench.submit(request)
                        break
                    except CallFailed as error:
                        if error.failure.code is not FailureCode.BUSY:
                            raise
                        time.sleep(0.001)
                if request.key in cancelled:
                    time.sleep(request.key % 7 / 1000)
                    bench.engine.cancel(request.key)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(caller, [[request for _, request in requests[number::3]] for number in range(3)]))
        kept = [(prompt, request.key) for prompt, request in requests if request.key not in cancelled]
        bench.wait(*(key for _, key in kept))
        bench.engine.check_integrity()
        assert {key: bench.heard.text(key) for _, key in kept} == {key: alone[prompt] for prompt, key in kept}
        assert not all(bench.heard.has_ended(key) for key in cancelled)
        load = bench.engine.load()
        assert (load.slots_busy, load.waiting, load.kv_tokens_used) == (0, 0, 0)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(bench: Bench) -> None:
    failure = refused(bench, [1] * 512).failure
    assert failure.code is FailureCode.CONTEXT_OVERFLOW
    assert "512 tokens" in failure.message
    assert "the context 512, answer included" in failure.message
    assert refused(bench, []).failure.code is FailureCode.INVALID_REQUEST
    key = bench.submit(bench.request([1] * 511))
    bench.wait(key)
    assert bench.heard.finished(key).usage.completion_tokens == 1


def test_draining_refuses_new_calls_and_finishes_the_rest(bench: Bench) -> None:
    key = bench.submit(bench.request("Once upon a time", 40))
    bench.engine.drain()
    assert refused(bench).failure.code is FailureCode.DRAINING
    bench.wait(key)
    assert bench.heard.finished(key).usage.completion_tokens == 40


def test_stopping_ends_what_is_still_in(stories: Model) -> None:
    with running(stories, slots=1) as bench:
        keys = [bench.submit(bench.request("Once upon a time", None, ignore_eos=True)) for _ in range(2)]
        bench.heard.until(lambda: bench.heard.text(keys[0]))
        bench.engine.stop()
        for key in keys:
            last = bench.heard.calls[key][-1]
            assert isinstance(last, Failed)
            assert last.failure.code is FailureCode.DRAINING
        assert refused(bench).failure.code is FailureCode.DRAINING


def test_a_dead_loop_is_visible(stories: Model, caplog: pytest.LogCaptureFixture) -> None:
    """The step fails because the function that takes its events does."""
    crashes: list[BaseException] = []
    heard = Heard()

    def emit(step: int, events: list[CallEvent]) -> None:
        if step == 3:
            raise ZeroDivisionError("the test's own")
        heard.emit(step, events)

    with Context(stories, ONE_THREAD, slots=1, kv_tokens=256) as context:
        engine = Engine(stories, context, slots=1, n_ctx=256, emit=emit, on_crash=crashes.append)
        bench = Bench(stories, engine, heard)
        engine.start()
        key = bench.submit(bench.request("Once upon a time", 100))
        bench.wait(key)
        engine.stop()
        assert isinstance(engine.crashed, ZeroDivisionError)
        assert crashes == [engine.crashed]
        last = heard.calls[key][-1]
        assert isinstance(last, Failed)
        assert last.failure.code is FailureCode.INTERNAL
        assert refused(bench).failure.code is FailureCode.INTERNAL
        assert "the test's own" in caplog.text
        engine.check_integrity()


def test_cells_that_nobody_booked_are_found(stories: Model) -> None:
    with Context(stories, ONE_THREAD, slots=2, kv_tokens=256) as context:
        engine = Engine(stories, context, slots=2, n_ctx=256, emit=Heard().emit)
        engine.check_integrity()
        batch = context.new_batch()
        batch.add_token(1, 0, 1)
        context.decode(batch)
        with pytest.raises(IntegrityError, match="sequence 1: 0 cells by the book, positions 0 to 0"):
            engine.check_integrity()
        engine.stop()


def test_likeliest_tokens_of_all_rows_are_those_of_each_row(stories: Model) -> None:
    with Context(stories, ONE_THREAD, slots=4, kv_tokens=256) as context:
        batch = context.new_batch()
        for position in range(3):  # the second and third find the memory where the first has found it
            batch.clear()
            for sequence in range(4):
                batch.add_token(100 + 7 * sequence + position, position, sequence)
            context.decode(batch)
            each = [context.likeliest(row) for row in range(4)]
            assert context.likeliest_of(4) == each
            assert context.likeliest_of(1) == each[:1]
        assert len(set(each)) > 1


def test_an_engine_larger_than_its_context_is_refused(stories: Model) -> None:
    with Context(stories, ONE_THREAD, slots=2, kv_tokens=256) as context:
        with pytest.raises(ValueError, match="n_ctx 300"):
            Engine(stories, context, slots=2, n_ctx=300, emit=Heard().emit)
        with pytest.raises(ValueError, match="3 slots"):
            Engine(stories, context, slots=3, n_ctx=256, emit=Heard().emit)
