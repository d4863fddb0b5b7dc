"""The engine on every kind of memory: shared, taken up, moved and brought back, and never a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.engine.listener import ONE_THREAD, running
from tests.integration.engine.test_prefix_cache import cached, held
from tests.support.alone import Alone
from tests.support.lone_context import lone_context
from tests.support.small_models import SMALL_MODELS, WORDS
from tests.support.tolerance import measure_tolerance
from workers.llama.model import Model


@pytest.fixture(scope="module", params=list(SMALL_MODELS))
def small(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[Alone]:
    path = small_models[request.param]
    tolerance = measure_tolerance(path, tokens=WORDS, llama=ONE_THREAD)
    with Model.load(path, ONE_THREAD) as model, lone_context(model, llama=ONE_THREAD) as lone:
        yield Alone(lone, tolerance)


SHARED = WORDS[:100]
OWN = [WORDS[100 + 7 * number : 107 + 7 * number] for number in range(8)]


def test_callers_at_once_share_a_prompt(small: Alone) -> None:
    with running(small.lone.model, slots=4, n_ctx=256, kv_tokens=1024) as bench:
        prompts = [[*SHARED, *own] for own in OWN[:4]]
        gate = held(bench)
        keys = [bench.submit(bench.request(prompt, 8, ignore_eos=True)) for prompt in prompts]
        gate.set()
        bench.wait(*keys)
        small.differences(prompts, [bench.heard.text(key) for key in keys], 8)
        assert [cached(bench, key) for key in keys[1:]] == [100] * 3
        assert sum(bench.heard.finished(key).timings.prompt_n for key in keys) <= 100 + 4 * 7


def test_a_third_caller_later_finds_what_two_had_in_common(small: Alone) -> None:
    with running(small.lone.model, slots=1, n_ctx=256, kv_tokens=512) as bench:
        prompts = [[*SHARED, *own] for own in OWN[:3]]
        calls = [bench.request(prompt, 8, ignore_eos=True) for prompt in prompts]
        small.differences(prompts, [bench.answer(call) for call in calls], 8)
        assert cached(bench, calls[2].key) == 100


def test_the_next_turn_goes_on_where_the_prompt_ended(small: Alone) -> None:
    with running(small.lone.model, slots=2, n_ctx=256, kv_tokens=512) as bench:
        prompt = [*SHARED, *OWN[0]]
        longer = [*prompt, *OWN[1], *OWN[2]]
        bench.answer(bench.request(prompt, 1))
        call = bench.request(longer, 8, ignore_eos=True)
        small.differences([longer], [bench.answer(call)], 8)
        assert cached(bench, call.key) == len(prompt)


def test_conversations_go_to_ram_and_come_back(small: Alone) -> None:
    with running(small.lone.model, slots=2, n_ctx=256, kv_tokens=512) as bench:
        prompts = [[WORDS[number], *WORDS[2 * number : 2 * number + 120]] for number in range(8)]
        longer = [[*prompt, *OWN[0]] for prompt in prompts]
        for prompt in prompts:
            bench.answer(bench.request(prompt, 1))
        calls = [bench.request(prompt, 8, ignore_eos=True) for prompt in longer]
        small.differences(longer, [bench.answer(call) for call in calls], 8)
        assert [cached(bench, call.key) for call in calls] == [len(prompt) for prompt in prompts]
        assert bench.engine.counters.num_restored > 0


def test_when_cells_run_out_one_waits_and_loses_nothing(small: Alone) -> None:
    with running(small.lone.model, slots=4, n_ctx=200, kv_tokens=256) as bench:
        prompts = [[WORDS[number], *WORDS[3 * number : 3 * number + 30]] for number in range(4)]
        gate = held(bench)
        keys = [bench.submit(bench.request(prompt, 100, ignore_eos=True)) for prompt in prompts]
        gate.set()
        bench.wait(*keys)
        small.differences(prompts, [bench.heard.text(key) for key in keys], 100)
        assert [bench.heard.finished(key).usage.completion_tokens for key in keys] == [100] * 4
