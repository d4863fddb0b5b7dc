"""Salted caches as an attacker sees them: a guess at another team's prompt tells nothing, not even by the clock."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.integration.engine.listener import Bench, changed, running
from workers.engine.request import EngineRequest
from workers.llama.model import Model
from workers.protocol.events import Started, Text

NUM_SAMPLES = 250
"""Of each kind. The AUC of two equal kinds then has a standard deviation of 0.026: 0.4 to 0.6 is four of them."""

NUM_TOKENS = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """What a caller can observe of one call."""

    ttft_s: float
    num_computed: int
    cached_tokens: int
    told_at_start: int


def observe(bench: Bench, request: EngineRequest) -> Seen:
    first = 0.0

    def watch(step: int, events: Sequence[object]) -> None:
        nonlocal first
        if not first and any(isinstance(event, Text) and event.call == request.key for event in events):
            first = time.perf_counter()

    bench.heard.on_step = watch
    began = time.perf_counter()
    bench.submit(request)
    bench.wait(request.key)
    bench.heard.on_step = None
    finished, started = bench.heard.finished(request.key), bench.heard.calls[request.key][0]
    assert isinstance(started, Started)
    return Seen(first - began, finished.timings.prompt_n, finished.usage.cached_tokens, started.num_cached_tokens)


def auc(ones: Sequence[float], others: Sequence[float]) -> float:
    """Probability that one of `ones` is above one of `others`; 0.5: they can't be told apart."""
    wins = sum((one > other) + (one == other) / 2 for one in ones for other in others)
    return wins / (len(ones) * len(others))


def test_a_guess_at_another_teams_prompt_looks_like_a_fresh_prompt(stories: Model) -> None:
    chance = random.Random(5)

    def fresh() -> list[int]:
        return [1, *(chance.randrange(260, 500) for _ in range(NUM_TOKENS - 1))]

    secret = fresh()
    with running(stories, slots=2, n_ctx=256, kv_tokens=1024) as bench:
        bench.answer(changed(bench.request(secret, 2, ignore_eos=True), tenant="victim"))
        guesses: list[Seen] = []
        strangers: list[Seen] = []
        repeats: list[Seen] = []
        for number in range(NUM_SAMPLES):
            # Another salt each time: the attacker's own first guess must not be what the second one finds.
            tries = [
                (secret, "attacker", f"guess {number}", guesses),
                (fresh(), "attacker", f"other {number}", strangers),
                (secret, "victim", "", repeats),
            ]
            chance.shuffle(tries)
            for prompt, tenant, salt, seen in tries:
                call = bench.request(prompt, 2, ignore_eos=True)
                seen.append(observe(bench, changed(call, tenant=tenant, cache_salt=salt)))
    counts = {(one.num_computed, one.cached_tokens, one.told_at_start) for one in (*guesses, *strangers)}
    assert counts == {(NUM_TOKENS, 0, 0)}
    assert {one.num_computed for one in repeats} == {1}
    times = [[one.ttft_s for one in seen] for seen in (guesses, strangers, repeats)]
    assert 0.4 < auc(times[0], times[1]) < 0.6
    assert auc(times[1], times[2]) > 0.9, "the clock does tell a cached prompt: else this test would see nothing"
