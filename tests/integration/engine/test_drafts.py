"""Drafts: tokens that a step computes beside the newest one, and keeps as far as they are drawn; ends by the caller.

Nothing in the engine makes drafts yet. The test makes them of the answer that it knows, wrong ones among them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.engine.listener import GREEDY, ONE_THREAD, Bench, changed, running
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Plan
from workers.llama.model import Model
from workers.protocol.events import FinishReason, Tokens
from workers.protocol.requests import Sampling

PROMPTS = ["Once upon a time", "Lily had a red ball and", "The dog"]
WARM = Sampling(temperature=0.8, seed=7)


def answers(bench: Bench, sampling: Sampling) -> list[list[int]]:
    """Return the tokens of each prompt's answer, all computed together."""
    requests = [bench.request(prompt, 40, sampling=sampling, ignore_eos=True) for prompt in PROMPTS]
    keys = [bench.submit(changed(request, tell=("tokens",), cache_prompt=False)) for request in requests]
    bench.wait(*keys)
    assert [bench.heard.finished(key).usage.completion_tokens for key in keys] == [40] * len(keys)
    return [[event.tokens[0] for event in bench.heard.calls[key] if isinstance(event, Tokens)] for key in keys]


def draft(bench: Bench, known: dict[tuple[int, ...], list[int]], num_tokens: int) -> None:
    """Have each answer drafted from what is known of it; every third draft goes wrong."""
    scheduler = bench.engine._stepper._scheduler
    plan = scheduler.plan

    def drafted(chosen: Callable[[list[Sequence]], list[Sequence]]) -> Plan[Sequence]:
        for one in scheduler.running:
            at = one.num_predicted
            tokens = known[tuple(one.prompt.tokens)][at : at + num_tokens]
            wrong = [tokens[0], 5, *tokens[2:]] if at % 3 == 0 and tokens else tokens
            one.draft = tuple(wrong) if one.decoding else ()
        return plan(chosen)

    scheduler.plan = drafted  # type: ignore[method-assign]


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_drafted_answer_is_the_one_without_a_draft(
    demo: Model, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.step.scheduler.CALM_STEPS", 0)
    with running(demo) as bench:
        plain = answers(bench, sampling)
        num_plain = bench.engine.counters.num_decodes
        draft(bench, {tuple(bench.tokens(text)): tokens for text, tokens in zip(PROMPTS, plain, strict=True)}, 4)
        assert answers(bench, sampling) == plain
        num_drafted = bench.engine.counters.num_decodes - num_plain
        assert num_drafted < num_plain * 2 / 3


def test_an_answer_ends_after_the_tokens_that_were_wanted(demo: Model) -> None:
    with running(demo) as bench:
        request = changed(bench.request(PROMPTS[0], None, ignore_eos=True), tell=("tokens",))
        key = bench.submit(request)
        bench.heard.until(lambda: len(bench.heard.text(key)) > 60)
        bench.engine.end(key, 5)
        bench.engine.end(key + 100, 5)
        bench.wait(key)
        finished = bench.heard.finished(key)
        assert (finished.reason, finished.usage.completion_tokens) == (FinishReason.STOP, 5)
        assert finished.timings.predicted_n == 5
        bench.engine.check_integrity()
        assert bench.engine._stepper.num_cells_idle == len(request.prompt) + 5, "the cells of the others are free"


def test_an_answer_ends_where_the_memory_cannot_be_truncated(small_models: dict[str, Path]) -> None:
    with Model.load(small_models["recurrent"], ONE_THREAD) as model, running(model) as bench:
        key = bench.submit(changed(bench.request([5, 6, 7], None, ignore_eos=True), tell=("tokens",)))
        bench.heard.until(lambda: len(bench.heard.calls[key]) > 20)
        bench.engine.end(key, 5)
        bench.wait(key)
        assert bench.heard.finished(key).usage.completion_tokens == 5
