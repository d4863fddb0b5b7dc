"""Whatever a call shares, waits for or is moved by: it says what it would say alone.

Alone means one sequence on a context driven by hand, the prompt in one step, greedy. The engine's greedy text is the
same except from a step on where the best two tokens were closer than the model's measured tolerance.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import SHARED
from tests.integration.engine.conftest import DEMO
from tests.integration.engine.listener import Bench, running
from tests.support.alone import Alone
from tests.support.lone_context import lone_context
from tests.support.small_models import SMALL_MODELS, WORDS
from tests.support.tolerance import measure_tolerance
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

ANSWER_TOKENS = 24
SYSTEM = WORDS[:70]
PROMPTS = [
    [*SYSTEM, *WORDS[100:110]],
    [*SYSTEM, *WORDS[110:140]],
    WORDS[200:203],
    [*SYSTEM, *WORDS[140:141]],
    WORDS[180:380],
    [*SYSTEM, *WORDS[110:125], *WORDS[150:160]],
    SYSTEM,
    WORDS[300:340],
]


def settings(flash_attn: str) -> LlamaSettings:
    """Chunks are small, so that prompts are read in several steps beside running streams."""
    return LlamaSettings(n_threads=1, n_batch=512, n_ubatch=32, flash_attn=flash_attn)


def whole(flash_attn: str) -> LlamaSettings:
    return LlamaSettings(n_threads=1, flash_attn=flash_attn)


@pytest.fixture(
    scope="module",
    params=[*((name, "on") for name in SMALL_MODELS), ("attention", "off"), ("window", "off"), ("hybrid", "off")],
    ids="-".join,
)
def alone(request: pytest.FixtureRequest, small_models: dict[str, Path]) -> Iterator[tuple[Alone, str]]:
    name, flash_attn = request.param
    path = small_models[name]
    tolerance = measure_tolerance(path, tokens=WORDS, llama=whole(flash_attn))
    with Model.load(path, whole(flash_attn)) as model, lone_context(model, llama=whole(flash_attn)) as lone:
        yield Alone(lone, tolerance), flash_attn


def ask_all(bench: Bench, prompts: Sequence[Sequence[int]]) -> list[str]:
    keys = [bench.submit(bench.request(list(prompt), ANSWER_TOKENS, ignore_eos=True)) for prompt in prompts]
    bench.wait(*keys)
    return [bench.heard.text(key) for key in keys]


def num_cached(bench: Bench) -> list[int]:
    """Of every call so far, in order of their arrival: prompt tokens that were not computed."""
    return [bench.heard.started(key).num_cached_tokens for key in sorted(bench.heard.calls)]


def test_tolerances_are_small(alone: tuple[Alone, str]) -> None:
    """Otherwise what follows would excuse everything."""
    one, flash_attn = alone
    assert 0 < one.tolerance.gap < (0.05 if flash_attn == "on" else 0.005) * one.tolerance.deviation


def test_many_together_say_what_each_says_alone(alone: tuple[Alone, str]) -> None:
    """Common beginnings, prompts in chunks, calls that wait; then the same once more, from what is cached by now."""
    one, flash_attn = alone
    with running(one.lone.model, slots=4, n_ctx=256, kv_tokens=2048, llama=settings(flash_attn)) as bench:
        first = ask_all(bench, PROMPTS)
        again = ask_all(bench, PROMPTS)
        assert sum(num_cached(bench)) >= 2 * len(SYSTEM), "or nothing is tested here"
    one.differences(PROMPTS, first, ANSWER_TOKENS)
    one.differences(PROMPTS, again, ANSWER_TOKENS)
    assert len(set(first)) == len(PROMPTS)


@pytest.mark.parametrize("seed", [3, 7, 8])
def test_a_crowd_reads_steps_longer_than_a_micro_batch(alone: tuple[Alone, str], seed: int) -> None:
    """Decoding calls and chunks of prompts fill more rows than llama.cpp computes at once.

    All are there before the first step, so that every run takes much the same steps.
    """
    one, flash_attn = alone
    rng = random.Random(seed)
    text = WORDS * 3
    prompts = [text[start : start + rng.randrange(20, 200)] for start in (rng.randrange(600) for _ in range(24))]
    llama = LlamaSettings(n_threads=1, n_batch=512, n_ubatch=24, flash_attn=flash_attn)
    with running(one.lone.model, slots=16, n_ctx=256, kv_tokens=2048, llama=llama) as bench:
        all_there = threading.Lock()
        with all_there:
            bench.engine.post(partial(_pass_through, all_there))
            keys = [bench.submit(bench.request(prompt, ANSWER_TOKENS, ignore_eos=True)) for prompt in prompts]
        bench.wait(*keys)
        texts = [bench.heard.text(key) for key in keys]
    one.differences(prompts, texts, ANSWER_TOKENS)


def _pass_through(lock: threading.Lock) -> None:
    with lock:
        pass


def test_conversations_go_on_as_if_read_anew(alone: tuple[Alone, str]) -> None:
    """Each turn's prompt is the last one, its answer and something new; four take turns on two slots."""
    one, flash_attn = alone
    prompts = [[*SYSTEM, *WORDS[at : at + 10]] for at in (100, 120, 140, 160)]
    with running(one.lone.model, slots=2, n_ctx=256, kv_tokens=256, llama=settings(flash_attn)) as bench:
        for turn in range(3):
            for prompt in prompts:
                one.differences([prompt], ask_all(bench, [prompt]), ANSWER_TOKENS)
                prompt += [*one.speak(prompt, ANSWER_TOKENS).tokens, *WORDS[turn * 7 : turn * 7 + 5]]
        # How much each takes up, from whom or from RAM, is decided by measured costs; damaged states in RAM show here.
        assert max(num_cached(bench)) >= len(SYSTEM)


def test_a_crowded_cache_changes_nothing(alone: tuple[Alone, str]) -> None:
    """Room for one conversation and a little more: whoever must wait, leave or come back says the same."""
    one, flash_attn = alone
    with running(one.lone.model, slots=4, n_ctx=256, kv_tokens=256, llama=settings(flash_attn)) as bench:
        for _ in range(2):
            one.differences(PROMPTS, ask_all(bench, PROMPTS), ANSWER_TOKENS)


@pytest.mark.parametrize(
    "path",
    [SHARED / "models" / "stories260K.gguf", SHARED / "models" / "stories260K-q8_0.gguf", DEMO],
    ids=lambda path: path.stem,
)
def test_models_that_mean_something_say_the_same_too(path: Path) -> None:
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with Model.load(path, whole("auto")) as model, lone_context(model, llama=whole("auto")) as lone:
        begun = (
            "Once upon a time there was a little horse. It lived in a paddock with its friends, the sheep and the hen."
        )
        ends = ["", " One day", " Lily said, ", " The sheep was very sad, because", " It was big.", " They", " But"]
        prompts = [model.tokenize(begun + end, add_special=True, parse_special=False) for end in ends]
        text = model.tokenize((begun + "".join(ends)) * 10, add_special=True, parse_special=False)
        one = Alone(lone, measure_tolerance(model, tokens=text))
        with running(model, slots=4, n_ctx=256, kv_tokens=1024, llama=settings("auto")) as bench:
            for _ in range(2):
                one.differences(prompts, ask_all(bench, prompts), ANSWER_TOKENS)
