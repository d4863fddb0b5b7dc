"""What calls are told beside their text, where they ask; and what else ends an answer."""

from __future__ import annotations

import time

import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Progress,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
)
from workers.protocol.requests import Notice, Sampling

LONG = "There was a big tree and a little girl named Lily. " * 6


def told(bench: Bench, key: int, kind: type[CallEvent]) -> list[CallEvent]:
    return [event for event in bench.heard.calls[key] if isinstance(event, kind)]


def test_a_call_that_asks_for_nothing_is_told_nothing(bench: Bench) -> None:
    key = bench.submit(bench.request(LONG, 10))
    bench.wait(key)
    assert {type(event).__name__ for event in bench.heard.calls[key]} == {"Started", "Text", "Finished"}


def test_a_prompt_alone_is_computed_and_found_by_the_next(bench: Bench) -> None:
    whole = bench.answer(bench.request(LONG + "She", 20))
    with running(bench.model) as other:
        warm = other.submit(other.request(LONG, 0))
        other.wait(warm)
        finished = other.heard.finished(warm)
        num_prompt = len(other.tokens(LONG))
        assert other.heard.text(warm) == ""
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.LENGTH, 0)
        assert (finished.timings.prompt_n, finished.timings.predicted_n, finished.truncated) == (num_prompt, 0, False)
        assert finished.timings.prompt_ms > 0
        key = other.submit(other.request(LONG + "She", 20))
        other.wait(key)
        assert other.heard.started(key).num_cached_tokens >= num_prompt - 2, "the last may be spelt otherwise"
        assert other.heard.text(key) == whole


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=1, seed=3)])
def test_tokens_come_before_the_text_that_they_make(bench: Bench, sampling: Sampling) -> None:
    plain = bench.answer(bench.request("Once upon a time", 50, sampling=sampling, stop=("nowhere",)))
    asked = changed(
        bench.request("Once upon a time", 50, sampling=sampling, stop=("nowhere",)), tell=("tokens",), n_probs=2
    )
    key = bench.submit(asked)
    bench.wait(key)
    assert bench.heard.text(key) == plain
    pending = b""
    for event in bench.heard.calls[key]:
        if isinstance(event, Tokens):
            pending += b"".join(bench.model.vocab.piece(token) for token in event.tokens)
        elif isinstance(event, Text):
            text = event.text.encode()
            assert pending.startswith(text)
            pending = pending[len(text) :]
    assert pending == b""
    tokens = [token for event in told(bench, key, Tokens) if isinstance(event, Tokens) for token in event.tokens]
    chosen = [event.chosen.token for event in told(bench, key, Logprobs) if isinstance(event, Logprobs)]
    assert tokens == chosen
    assert len(tokens) == bench.heard.finished(key).usage.completion_tokens == 50


def test_times_so_far_come_before_each_text(bench: Bench) -> None:
    key = bench.submit(changed(bench.request("Once upon a time", 30), tell=("timings",)))
    bench.wait(key)
    events = bench.heard.calls[key][1:-1]
    assert [type(event) for event in events] == [TimingsSoFar, Text] * (len(events) // 2)
    timings = [event.timings for event in events if isinstance(event, TimingsSoFar)]
    texts = [event for event in events if isinstance(event, Text)]
    counts = [sum(text.num_tokens for text in texts[: n + 1]) for n in range(len(texts))]
    assert [one.predicted_n for one in timings] == counts
    spent = [one.predicted_ms for one in timings]
    assert spent[0] == 0
    assert spent == sorted(spent)
    last = bench.heard.finished(key).timings
    assert {(one.cache_n, one.prompt_n) for one in timings} == {(last.cache_n, last.prompt_n)}
    assert {one.prompt_ms for one in timings[1:]} == {last.prompt_ms}
    assert spent[-1] <= last.predicted_ms


def test_progress_comes_at_the_start_and_after_each_chunk(stories: Model) -> None:
    llama = LlamaSettings(n_threads=1, n_batch=32, n_ubatch=32)
    with running(stories, slots=2, llama=llama) as bench:
        bench.answer(bench.request(LONG[: len(LONG) // 3], 1))
        key = bench.submit(changed(bench.request(LONG, 5), tell=("progress",)))
        bench.wait(key)
        started, *events = bench.heard.calls[key]
        assert isinstance(started, Started)
        assert started.num_cached_tokens > 0
        progress = [event for event in events if isinstance(event, Progress)]
        assert events[: len(progress)] == progress, "all of it before the text"
        assert {(one.total, one.cache) for one in progress} == {(started.num_prompt_tokens, started.num_cached_tokens)}
        processed = [one.processed for one in progress]
        assert (processed[0], processed[-1]) == (started.num_cached_tokens, started.num_prompt_tokens)
        assert len(processed) > 2
        assert processed == sorted(set(processed)), "each chunk once"
        assert progress[0].time_ms == 0
        assert [one.time_ms for one in progress] == sorted(one.time_ms for one in progress)


def test_a_prompt_that_is_computed_again_is_not_told_of(stories: Model) -> None:
    """Two answers that outgrow the cells: one is thrown out in the middle of its answer and comes back."""
    with running(stories, slots=2, n_ctx=256, kv_tokens=256) as bench:
        tell: tuple[Notice, ...] = ("progress",)
        keys = [
            bench.submit(changed(bench.request(prompt, 180, ignore_eos=True), tell=tell))
            for prompt in ("The dog", "Tim said")
        ]
        bench.wait(*keys)
        assert bench.engine.counters.num_preempted
        ends = [event for key in keys for event in bench.heard.calls[key] if isinstance(event, Finished)]
        assert sum(end.num_preempted for end in ends) == bench.engine.counters.num_preempted
        for key in keys:
            events = bench.heard.calls[key]
            first_text = next(n for n, event in enumerate(events) if isinstance(event, Text))
            assert not any(isinstance(event, Progress) for event in events[first_text:])


def test_time_is_up_at_the_end_of_a_line(bench: Bench) -> None:
    """Steps are held up, so that any line takes longer than its bound."""
    request = bench.request("Once upon a time", 150)
    whole = bench.answer(request)
    assert whole.count("\n") > 1
    in_time = bench.submit(changed(bench.again(request), max_predict_ms=60_000))
    bench.wait(in_time)
    assert bench.heard.text(in_time) == whole
    bench.heard.on_step = lambda step, events: time.sleep(0.002)
    key = bench.submit(changed(bench.again(request), max_predict_ms=1))
    bench.wait(key)
    text, finished = bench.heard.text(key), bench.heard.finished(key)
    assert text == whole[: whole.index("\n") + 1]
    assert finished.reason is FinishReason.LENGTH
    assert not finished.truncated
    assert finished.timings.predicted_ms > 1


def test_what_was_held_back_leaves_when_time_is_up(bench: Bench) -> None:
    """The line end may be the beginning of the stop string until the next token shows that it is none, and then that
    token's own end may be."""
    request = bench.request("Once upon a time", 150)
    whole = bench.answer(request)
    end = whole.index("\n") + 1
    bench.heard.on_step = lambda step, events: time.sleep(0.002)
    stop = whole[end : end + 2] + "never"
    key = bench.submit(changed(bench.again(request), max_predict_ms=1, stop=("\nnever", stop)))
    bench.wait(key)
    text = bench.heard.text(key)
    assert text == whole[: len(text)]
    assert len(text) > end
    assert bench.heard.finished(key).reason is FinishReason.LENGTH
    counted = sum(event.num_tokens for event in bench.heard.calls[key] if isinstance(event, Text))
    assert counted == bench.heard.finished(key).usage.completion_tokens


def test_only_an_answer_that_outgrew_its_context_is_truncated(stories: Model) -> None:
    with running(stories, slots=2, n_ctx=64, kv_tokens=256, llama=ONE_THREAD) as bench:
        request = bench.request("Once upon a time", None, ignore_eos=True)
        room = 64 - len(request.prompt)
        full = bench.submit(request)
        limited = bench.submit(changed(bench.again(request), max_tokens=room - 1))
        shifted = bench.submit(changed(bench.again(request), max_tokens=100, context_shift=True))
        fitting = bench.submit(changed(bench.again(request), max_tokens=20, context_shift=True))
        bench.wait(full, limited, shifted, fitting)
        assert [bench.heard.finished(key).truncated for key in (full, limited, shifted, fitting)] == [
            True,
            False,
            True,
            False,
        ]
        assert bench.heard.finished(shifted).usage.completion_tokens == 100


def test_a_slot_is_the_one_that_was_asked_for_if_it_is_free(stories: Model) -> None:
    with running(stories, slots=4) as bench:
        long = bench.request("Once upon a time", None, ignore_eos=True)
        first = bench.submit(changed(long, slot=2))
        bench.heard.until(lambda: bench.heard.text(first))
        again = bench.submit(changed(bench.again(long), max_tokens=5, slot=2))
        unknown = bench.submit(changed(bench.again(long), max_tokens=5, slot=99))
        bench.wait(again, unknown)
        assert bench.heard.started(first).slot == 2
        assert bench.heard.started(again).slot != 2, "it runs at once, in another one"
        bench.engine.cancel(first)
        bench.wait(bench.submit(bench.request("The", 1)))
        for slot in (2, 3, 0):
            key = bench.submit(changed(bench.again(long), max_tokens=1, slot=slot))
            bench.wait(key)
            assert bench.heard.started(key).slot == slot
