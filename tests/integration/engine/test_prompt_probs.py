"""The probabilities of a prompt's own tokens: those that the model gives, whatever happens to the call meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.integration.engine.listener import ONE_THREAD, Bench, changed, running
from tests.integration.engine.test_prefix_cache import STORY
from tests.support.lone_context import lone_context
from tests.support.small_models import SMALL_MODELS, WORDS
from workers.engine.request import EngineRequest
from workers.llama.context import PROMPT_LOGITS
from workers.llama.model import Model
from workers.protocol.events import Finished, FinishReason, Logprobs, PromptLogprobs, Started, Text, TokenProbs
from workers.protocol.requests import Sampling


def wishing(bench: Bench, prompt: str | list[int], max_tokens: int = 1, top: int = 3) -> EngineRequest:
    return changed(bench.request(prompt, max_tokens), n_probs=top, cache_prompt=False, prompt_probs=1)


def told(bench: Bench, key: int) -> list[TokenProbs]:
    events = [event for event in bench.heard.calls[key] if isinstance(event, PromptLogprobs)]
    assert all(0 < len(event.tokens) <= PROMPT_LOGITS + 1 for event in events)
    return [one for event in events for one in event.tokens]


def by_hand(model: Model | Path, tokens: Sequence[int]) -> list[float]:
    """What each token but the first has, computed token by token."""
    with lone_context(model, slots=1) as alone:
        found: list[float] = []
        for at, token in enumerate(tokens[:-1]):
            [row] = alone.step((0, token, at))
            logits = row.astype(np.float64)
            found.append(float(logits[tokens[at + 1]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
        return found


@pytest.mark.parametrize("kind", sorted(SMALL_MODELS))
def test_each_token_has_what_it_has_after_those_before_it(small_models: dict[str, Path], kind: str) -> None:
    """Also in a crowd, whose steps hold rows of several."""
    prompt = WORDS[:150]
    expected = by_hand(small_models[kind], prompt)
    with Model.load(small_models[kind], ONE_THREAD) as model, running(model, kv_tokens=1024) as bench:
        wishes = [wishing(bench, prompt), wishing(bench, prompt, top=-1), bench.request(WORDS[100:300], 20)]
        keys = [bench.submit(one) for one in wishes]
        bench.wait(*keys)
        for key, num_top in zip(keys[:2], (3, 0), strict=True):
            tokens = told(bench, key)
            assert [chosen.token for chosen, _ in tokens] == prompt
            assert [chosen.logprob for chosen, _ in tokens[1:]] == pytest.approx(expected, abs=0.05)
            assert [len(top) for _, top in tokens] == [0] + [num_top] * 149
            for _, top in tokens:
                assert [one.logprob for one in top] == sorted((one.logprob for one in top), reverse=True)
        assert not told(bench, keys[2])


def test_they_come_before_the_answer_and_it_is_what_it_is_without(bench: Bench) -> None:
    plain = bench.answer(bench.request(STORY, 20))
    key = bench.submit(wishing(bench, STORY, 20))
    bench.wait(key)
    kinds = list(dict.fromkeys(type(event) for event in bench.heard.calls[key]))
    assert kinds == [Started, PromptLogprobs, Logprobs, Text, Finished]
    assert bench.heard.text(key) == plain
    assert bench.heard.started(key).num_cached_tokens == 0, "what is cached is not computed, and nothing known of it"


@pytest.mark.parametrize("length", [1, 2, PROMPT_LOGITS - 1, PROMPT_LOGITS, PROMPT_LOGITS + 1, 2 * PROMPT_LOGITS])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_of_all_lengths_are_told_whole(stories: Model, length: int, max_tokens: int) -> None:
    prompt = list(range(100, 100 + length))
    with running(stories) as bench:
        key = bench.submit(wishing(bench, prompt, max_tokens))
        bench.wait(key)
        assert [chosen.token for chosen, _ in told(bench, key)] == prompt
        assert bench.heard.finished(key).reason is FinishReason.LENGTH


def test_a_call_that_is_thrown_out_and_comes_back_tells_each_token_once(stories: Model) -> None:
    """Two answers that outgrow the cells: one gives way in the middle of its answer, and its prompt is read again."""
    with running(stories, slots=2, n_ctx=256, kv_tokens=256, ram_bytes=0) as bench:
        prompts = [list(range(100, 140)), list(range(200, 240))]
        wishes = [changed(wishing(bench, prompt, 180), ignore_eos=True) for prompt in prompts]
        keys = [bench.submit(one) for one in wishes]
        bench.wait(*keys)
        assert bench.engine.counters.num_preempted
        for key, prompt in zip(keys, prompts, strict=True):
            assert [chosen.token for chosen, _ in told(bench, key)] == prompt


def test_they_are_the_models_own_whatever_is_sampled_from(bench: Bench) -> None:
    plain = bench.submit(wishing(bench, STORY))
    odd = Sampling(temperature=2.0, top_k=3, seed=1, logit_bias=((5, 10.0),))
    sampled = bench.submit(changed(wishing(bench, STORY), sampling=odd, post_sampling_probs=True))
    bench.wait(plain, sampled)
    probs = [[chosen.logprob for chosen, _ in told(bench, key)] for key in (plain, sampled)]
    assert probs[0] == pytest.approx(probs[1], abs=0.05)
