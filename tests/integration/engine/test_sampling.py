from __future__ import annotations

import pytest

from tests.integration.engine.listener import Bench
from workers.protocol.requests import Sampling

PROMPT = "Once upon a time"


def say(bench: Bench, sampling: Sampling, max_tokens: int = 30) -> str:
    return bench.answer(bench.request(PROMPT, max_tokens, sampling=sampling))


def test_a_seed_makes_an_answer_repeatable(bench: Bench) -> None:
    assert say(bench, Sampling(seed=7)) == say(bench, Sampling(seed=7))
    assert len({say(bench, Sampling(seed=seed, temperature=1.5)) for seed in range(6)}) > 3


def test_the_highest_seed_is_a_seed_like_others(bench: Bench) -> None:
    """llama.cpp would draw one at random for it."""
    most = Sampling(seed=0xFFFFFFFF, temperature=1.5)
    assert say(bench, most) == say(bench, most)


def test_without_a_seed_answers_differ(bench: Bench) -> None:
    assert len({say(bench, Sampling(temperature=1.5)) for _ in range(6)}) > 3


def test_left_out_fields_are_llama_servers_defaults(bench: Bench) -> None:
    spelled = Sampling(seed=3, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0, repeat_last_n=64)
    assert say(bench, Sampling(seed=3)) == say(bench, spelled)


@pytest.mark.parametrize(
    "narrow",
    [
        pytest.param(Sampling(temperature=2.0, top_k=1), id="top_k 1"),
        pytest.param(Sampling(temperature=2.0, top_p=0.0), id="top_p 0"),
        pytest.param(Sampling(temperature=2.0, min_p=1.0), id="min_p 1"),
    ],
)
def test_each_filter_alone_can_leave_only_the_likeliest_token(bench: Bench, narrow: Sampling) -> None:
    assert say(bench, narrow) == say(bench, Sampling(temperature=0))


def test_wide_open_sampling_wanders(bench: Bench) -> None:
    wide = Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    assert say(bench, wide) != say(bench, Sampling(temperature=0))


@pytest.mark.parametrize(
    "penalty", [Sampling(repeat_penalty=10.0), Sampling(presence_penalty=100.0), Sampling(frequency_penalty=100.0)]
)
def test_penalties_keep_tokens_from_coming_back(bench: Bench, penalty: Sampling) -> None:
    prompt = bench.tokens(PROMPT)
    strong = Sampling(
        temperature=0,
        repeat_last_n=-1,
        repeat_penalty=penalty.repeat_penalty,
        presence_penalty=penalty.presence_penalty,
        frequency_penalty=penalty.frequency_penalty,
    )
    text = say(bench, strong, 25)
    assert text != say(bench, Sampling(temperature=0), 25)
    tokens = bench.model.tokenize(text, add_special=False, parse_special=False)
    if penalty.presence_penalty or penalty.frequency_penalty:
        assert not set(tokens[1:]) & set(prompt), "the prompt's tokens are penalised as well"


def test_penalties_look_no_further_back_than_asked(bench: Bench) -> None:
    off = Sampling(temperature=0, presence_penalty=100.0, repeat_last_n=0)
    assert say(bench, off) == say(bench, Sampling(temperature=0))
