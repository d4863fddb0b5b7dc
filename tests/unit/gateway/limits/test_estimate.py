"""Estimates of what a request takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.limits.estimate import estimate, estimate_pooled, num_bytes
from gateway.routing.pool import Pool, PoolUpdater
from gateway.routing.worker_state import Typical
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Load
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest, Message


def pool(bytes_per_token: float = 4.0, answer_tokens: float = 100.0) -> Pool:
    updater = PoolUpdater()
    load = Load(bytes_per_token=bytes_per_token, answer_tokens=answer_tokens, hold_ms=2000.0)
    updater.join(replace(heartbeat("w"), load=load))
    return updater.pool


def chat(text: str, **fields: object) -> GenerateRequest:
    return replace(GenerateRequest(messages=(Message("user", text),)), **fields)


@pytest.mark.parametrize(("per_token", "tokens"), [(4.0, 104), (2.0, 204)])
def test_prompts_count_by_the_bytes_per_token_of_the_workers(per_token: float, tokens: int) -> None:
    assert estimate((chat("x" * 400),), pool(per_token), None).prompt_tokens == tokens


def test_characters_count_by_their_bytes() -> None:
    assert (num_bytes("abc"), num_bytes("äöü"), num_bytes("漢字"), num_bytes("\ud800")) == (3, 6, 6, 1)


@pytest.mark.parametrize(
    ("named", "most", "tokens"), [(None, None, 100), (None, 30, 30), (500, None, 500), (500, 200, 200), (10, 200, 10)]
)
def test_an_answer_counts_by_what_the_caller_names_else_by_what_is_usual(
    named: int | None, most: int | None, tokens: int
) -> None:
    assert estimate((chat("hi", max_tokens=named),), pool(), most).completion_tokens == tokens


def test_several_answers_to_one_prompt_count_it_once() -> None:
    request = chat("x" * 400, max_tokens=10)
    found = estimate((request, replace(request, seed=2) if hasattr(request, "seed") else request), pool(), None)
    assert (found.prompt_tokens, found.completion_tokens) == (104, 20)
    several = estimate((request, chat("y" * 400, max_tokens=10)), pool(), None)
    assert (several.prompt_tokens, several.completion_tokens, several.tokens) == (208, 20, 228)


def test_a_very_long_conversation_is_measured_by_samples() -> None:
    messages = tuple(Message("user", "x" * 36) for _ in range(50_000))
    found = estimate((GenerateRequest(messages=messages),), pool(), None)
    assert found.prompt_tokens == 50_000 * (9 + 4)


def test_prompts_of_tokens_are_counted() -> None:
    assert estimate((GenerateRequest(prompt=[1] * 70, max_tokens=1),), pool(), None).prompt_tokens == 70
    assert estimate((GenerateRequest(prompt=[1, "x" * 40, 2], max_tokens=1),), pool(), None).prompt_tokens == 12


def test_pooled_work_counts_its_inputs_each_with_the_query() -> None:
    ranked = PoolRequest(kind="rank", inputs=("x" * 40, "y" * 80), query="q" * 20)
    assert estimate_pooled(ranked, pool()).tokens == 10 + 20 + 2 * 5
    assert estimate_pooled(PoolRequest(kind="embed", inputs=([1, 2, 3], "x" * 40)), pool()).tokens == 13


def test_a_model_without_workers_is_estimated_by_usual_figures() -> None:
    usual = Typical()
    found = estimate((chat("x" * 400),), Pool(), None)
    assert found.completion_tokens == round(usual.answer_tokens)
