"""Logits that are not numbers end the call that they belong to, and nothing of them stays.

Attention without flash attention multiplies every cell of the cache by something, zero for those of other sequences:
one cell that is not a number spoils all that are computed while it is there, and it stays there when it is free.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.engine.listener import Bench, running
from tests.integration.engine.test_prefix_cache import cached, held
from tests.support.alone import Alone
from tests.support.lone_context import lone_context
from tests.support.small_models import WORDS, spoil_token, write_small_model
from tests.support.tolerance import measure_tolerance
from workers.engine.step.sequence import NOT_A_NUMBER
from workers.llama.model import Model
from workers.models.spec import LlamaSettings
from workers.protocol.events import CallEvent, Failed

NAN = next(token for token in range(300, 760) if token not in WORDS)
"""The token whose embedding is not a number."""

SHARED = WORDS[:80]
BAD = [*SHARED, NAN, *WORDS[300:310]]
PROMPTS = [[*SHARED, *WORDS[100:107]], WORDS[120:160], WORDS[200:203]]
ANSWER_TOKENS = 40


@pytest.fixture(scope="module", params=["on", "off"])
def spoiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Alone, str]]:
    """A model with such a token, and whether attention is flash attention."""
    llama = LlamaSettings(n_threads=1, flash_attn=request.param)
    path = write_small_model(tmp_path_factory.mktemp("spoiled"), "attention")
    spoil_token(path, NAN)
    tolerance = measure_tolerance(path, tokens=WORDS, llama=llama)
    with Model.load(path, llama) as model, lone_context(model, llama=llama) as lone:
        yield Alone(lone, tolerance), request.param


def submitted(bench: Bench, prompt: list[int], num_tokens: int = ANSWER_TOKENS) -> int:
    return bench.submit(bench.request(prompt, num_tokens, ignore_eos=True))


def failed(bench: Bench, key: int) -> bool:
    """Whether the call came to nothing because of what is tested here."""
    last = bench.heard.calls[key][-1]
    return isinstance(last, Failed) and last.failure is NOT_A_NUMBER


def check_all_is_well(one: Alone, bench: Bench) -> None:
    """Calls from here on say what they should; what they share is what they computed themselves."""
    for prompts in (PROMPTS, [WORDS[230:400]], PROMPTS):
        keys = [submitted(bench, prompt) for prompt in prompts]
        bench.wait(*keys)
        one.differences(prompts, [bench.heard.text(key) for key in keys], ANSWER_TOKENS)
    assert cached(bench, keys[0]) >= len(SHARED)


def test_the_call_fails_and_others_go_on(spoiled: tuple[Alone, str]) -> None:
    one, flash_attn = spoiled
    llama = LlamaSettings(n_threads=1, flash_attn=flash_attn)
    with running(one.lone.model, slots=4, n_ctx=256, kv_tokens=1024, llama=llama) as bench:
        gate = held(bench)
        keys = [submitted(bench, prompt) for prompt in PROMPTS]
        bad = submitted(bench, BAD)
        gate.set()
        bench.wait(*keys, bad)
        assert failed(bench, bad)
        well = [number for number, key in enumerate(keys) if not failed(bench, key)]
        assert flash_attn == "off" or well == [0, 1, 2]
        one.differences([PROMPTS[n] for n in well], [bench.heard.text(keys[n]) for n in well], ANSWER_TOKENS)
        check_all_is_well(one, bench)


def test_nothing_of_it_is_cached(spoiled: tuple[Alone, str]) -> None:
    one, flash_attn = spoiled
    llama = LlamaSettings(n_threads=1, flash_attn=flash_attn)
    with running(one.lone.model, slots=2, n_ctx=256, kv_tokens=512, llama=llama) as bench:
        for _ in range(2):
            bad = submitted(bench, BAD)
            bench.wait(bad)
            assert failed(bench, bad)
            assert bench.heard.started(bad).num_cached_tokens == 0
        check_all_is_well(one, bench)


def test_in_the_middle_of_other_answers(spoiled: tuple[Alone, str]) -> None:
    """It comes while others stream, and its cells are used by those who come next."""
    one, flash_attn = spoiled
    llama = LlamaSettings(n_threads=1, flash_attn=flash_attn)
    with running(one.lone.model, slots=3, n_ctx=256, kv_tokens=512, llama=llama) as bench:
        keys = [submitted(bench, prompt, 120) for prompt in PROMPTS[:2]]
        bench.heard.until(lambda: all(len(bench.heard.calls[key]) > 3 for key in keys))
        bad = submitted(bench, BAD)
        bench.wait(*keys, bad)
        assert failed(bench, bad)
        for key, prompt in zip(keys, PROMPTS, strict=False):
            if not failed(bench, key):
                one.differences([prompt], [bench.heard.text(key)], 120)
            else:
                assert flash_attn == "off"
        check_all_is_well(one, bench)


def test_who_comes_next_waits_until_the_cache_is_clean(spoiled: tuple[Alone, str]) -> None:
    """Where one cell spoils all, those who come while a long prompt is still read on it are not spoiled too."""
    one, flash_attn = spoiled
    llama = LlamaSettings(n_threads=1, flash_attn=flash_attn, n_batch=32, n_ubatch=32)
    late: list[int] = []
    with running(one.lone.model, slots=4, n_ctx=512, kv_tokens=1024, llama=llama) as bench:
        gate = held(bench)
        long = submitted(bench, WORDS[::-1], 1)
        bad = submitted(bench, BAD[-12:])

        def on_step(step: int, events: list[CallEvent]) -> None:
            if not late and any(event.call == bad and isinstance(event, Failed) for event in events):
                late.append(submitted(bench, PROMPTS[1]))

        bench.heard.on_step = on_step
        gate.set()
        bench.wait(long, bad)
        assert failed(bench, long) == (flash_attn == "off")
        bench.heard.until(lambda: late)
        bench.wait(*late)
        one.differences([PROMPTS[1]], [bench.heard.text(late[0])], ANSWER_TOKENS)
