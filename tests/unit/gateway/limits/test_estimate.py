"""Estimates of what a request takes."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from gateway.limits.estimate import estimate, estimate_pooled, num_bytes
from gateway.routing.pool import Pool, PoolUpdater
from gateway.routing.worker_state import Typical
from tests.support.pool import heartbeat
from workers.protocol.heartbeat import Load
from workers.protocol.pooled import PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Message, ToolCall


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


MIXED: tuple[int | str, ...] = (*([1] * 998), "é")
"""About a body's 8 MiB as two thousand of them."""
CALL = ToolCall("id", "name", "é")
HEAVY = {
    "prompts of many pieces": lambda: estimate([GenerateRequest(prompt=MIXED) for _ in range(2048)], pool(), None),
    "inputs of many pieces": lambda: estimate_pooled(PoolRequest(inputs=(MIXED,) * 2048), pool()),
    "inputs of many messages": lambda: estimate_pooled(
        PoolRequest(inputs=(PoolPrompt(text="", messages=(Message("user", "é"),) * 60_000),) * 4), pool()
    ),
    "messages of many tool calls": lambda: estimate(
        (GenerateRequest(messages=(Message("assistant", tool_calls=(CALL,) * 128),) * 1000),), pool(), None
    ),
}


@pytest.mark.serial
@pytest.mark.parametrize("what", HEAVY)
def test_no_body_keeps_the_event_loop(what: str) -> None:
    """Some took 0.1 to 0.3 s, within which no stream went on."""
    took_s = 9.0
    for _ in range(3):
        began = time.perf_counter()
        assert HEAVY[what]().prompt_tokens > 0
        took_s = min(took_s, time.perf_counter() - began)
    print(f"\n{what}: {1000 * took_s:.1f} ms")
    assert took_s < 0.02


def test_what_is_measured_by_samples_counts_about_as_much_as_it_is() -> None:
    text = "a" * 100_000 + "漢" * 200_000 + "\ud800é" * 50_000
    assert num_bytes(text) == pytest.approx(len(text.encode("utf-8", "replace")), rel=0.05)
    pieces: list[int | str] = ["x" * 400, *([1] * 9)]
    found = estimate((GenerateRequest(prompt=500 * pieces),), pool(), None).prompt_tokens
    assert found == pytest.approx(500 * (100 + 9), rel=0.05), "texts among many tokens counted as one each"
    inputs = tuple(("x" * 40, [1, 2])[number % 2] for number in range(2048))
    assert estimate_pooled(PoolRequest(inputs=inputs), pool()).tokens == pytest.approx(1024 * 12, rel=0.05)
    tools = (Message("assistant", tool_calls=(ToolCall("id", "x" * 10, "y" * 70),) * 100),)
    assert estimate((GenerateRequest(messages=tools),), pool(), None).prompt_tokens == 2000 + 4


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
