"""The same seed, model and settings, and nobody else: the same answer as llama-server's.

What llama-server said is in golden/llama_server.json; `tests.support.llama_server_golden` makes that file. Other
processors round otherwise, and then llama-server itself says other things than the file: there these tests are skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.api.parameters.sampling import SamplingBody, read_sampling
from tests.integration.engine import listener
from tests.integration.engine.listener import UNDRAFTED, Bench, changed
from tests.support.llama_server_golden import CASES, N_CTX, same_answers
from tests.support.lone_context import lone_context
from workers.llama.model import Model
from workers.protocol.events import Logprobs, TokenLogprob

running = partial(listener.running, speculation=UNDRAFTED)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "llama_server.json").read_text())
ASIDE = ("n_probs", "post_sampling_probs", "ignore_eos")
TOLERANCE = 1e-4
ROUNDING = 1e-5
"""Two processors whose kernels differ are 5e-5 apart and more; the file's numbers have six digits."""


def drift(model: Model) -> float:
    """How far this machine's probabilities are from the file's, by the model's logits alone."""
    case = next(case for case in GOLDEN["cases"] if case["name"] == "n_probs")
    prompt: list[int] = GOLDEN["prompts"][case["prompt"]]
    furthest = 0.0
    with lone_context(model, slots=1, kv_tokens=N_CTX) as alone:
        logits = alone.feed(0, prompt)
        for position, (token, _, top) in enumerate(case["probs"], len(prompt)):
            shares = np.exp(logits.astype(np.float64) - logits.max())
            shares /= shares.sum()
            furthest = max(furthest, *(abs(float(shares[other]) - math.exp(logprob)) for other, logprob in top))
            [logits] = alone.step((0, token, position))
    return furthest


@pytest.fixture(scope="module")
def bench(demo: Model) -> Iterator[Bench]:
    if drift(demo) > ROUNDING:
        pytest.skip("this processor rounds otherwise than the one that the golden file was made on; make it anew")
    with running(demo, slots=1, n_ctx=N_CTX, kv_tokens=N_CTX) as one:
        yield one


def test_every_setting_makes_a_difference() -> None:
    assert [case["name"] for case in GOLDEN["cases"]] == list(CASES), "the file is out of date"
    assert same_answers(GOLDEN["cases"]) == []


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_the_same_answer(bench: Bench, case: dict[str, Any]) -> None:
    settings = case["settings"]
    sampling = read_sampling(SamplingBody(**{name: settings[name] for name in settings.keys() - set(ASIDE)}))
    plain = bench.request(GOLDEN["prompts"][case["prompt"]], GOLDEN["n_predict"], sampling=sampling)
    # A cached beginning would be another batch layout, and the golden file was made without one as well.
    request = changed(plain, cache_prompt=False, **{name: settings[name] for name in ASIDE if name in settings})
    assert bench.answer(request) == case["text"]
    told = [event for event in bench.heard.calls[request.key] if isinstance(event, Logprobs)]
    assert len(told) == len(case.get("probs", ()))
    for event, (token, probability, top) in zip(told, case.get("probs", ()), strict=True):
        check(event.chosen, token, probability, request.asked.post_sampling_probs)
        assert [one.token for one in event.top] == [one for one, _ in top]
        for one, (other, its) in zip(event.top, top, strict=True):
            check(one, other, its, request.asked.post_sampling_probs)


def check(told: TokenLogprob, token: int, value: float, is_probability: bool) -> None:
    assert told.token == token
    mine, theirs = (told.logprob, value) if is_probability else (math.exp(told.logprob), math.exp(value))
    assert mine == pytest.approx(theirs, abs=TOLERANCE)
