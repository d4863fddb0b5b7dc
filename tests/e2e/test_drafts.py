"""Drafts through the front door: what callers ask for and are told, and what metrics count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.deep_copies import write_deep_copy
from tests.support.quantised import Q8_0, write_quantised
from tests.support.scrape import Scrape
from tests.support.stack import DEMO_MODEL, Stack

MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]
MAX_TRIES = 200


@pytest.fixture(scope="module")
def drafting() -> Iterator[Stack]:
    with Stack() as stack:
        stack.worker(DEMO_MODEL, DEMO_ALIAS, slots=2, speculation="{}")
        stack.gateway()
        yield stack


@pytest.fixture
def client(drafting: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{drafting.gateways[0].url}/v1", api_key=drafting.key, max_retries=0) as opened:
        yield opened


def told(client: openai.OpenAI, **extra: Any) -> tuple[str, dict[str, Any]]:
    """Return an answer's text and timings."""
    answer = client.chat.completions.create(
        model=DEMO_ALIAS, messages=MESSAGES, temperature=0, max_tokens=200, extra_body=extra
    )
    timings: dict[str, Any] = (answer.model_extra or {})["timings"]
    return answer.choices[0].message.content or "", timings


def test_an_answer_that_is_given_often_is_drafted(drafting: Stack, client: openai.OpenAI) -> None:
    """Steps of this model are so short that drafts pay only at times: so many answers are asked for."""
    text, timings = told(client, speculation=False)
    assert "draft_n" not in timings
    for _ in range(MAX_TRIES):
        again, timings = told(client)
        if timings.get("draft_n_accepted"):
            break
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    assert again[:20] == text[:20]
    page = httpx2.get(f"{drafting.workers[0].url}/metrics").text
    counted = Scrape(page)
    accepted = counted.sum("vllm:spec_decode_num_accepted_tokens_total")
    assert accepted >= timings["draft_n_accepted"]
    assert accepted == counted.sum("paddock_draft_tokens_total", outcome="accepted")


def test_a_prediction_is_taken_and_changes_nothing(client: openai.OpenAI) -> None:
    text, _ = told(client, speculation=False)
    answer = client.chat.completions.create(
        model=DEMO_ALIAS,
        messages=MESSAGES,
        temperature=0,
        max_tokens=200,
        prediction={"type": "content", "content": text},
    )
    assert (answer.choices[0].message.content or "")[:20] == text[:20]
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.rejected_prediction_tokens is not None
    assert 0 <= details.accepted_prediction_tokens <= answer.usage.completion_tokens


def test_a_draft_model_makes_a_larger_one_quicker(drafting: Stack, tmp_path: Path, client: openai.OpenAI) -> None:
    """By what steps are measured to cost: the larger one says the same as the demo model, in 15 times the time."""
    deep = write_deep_copy(DEMO_MODEL, tmp_path / "deep.gguf", 70)
    small = write_quantised(DEMO_MODEL, tmp_path / "small.gguf", Q8_0)
    speculation = json.dumps({"ngram": False, "draft": {"path": str(small)}})
    worker = drafting.worker(deep, "deep", slots=2, speculation=speculation)
    draft_n = 0
    for _ in range(MAX_TRIES // 20):
        answer = client.chat.completions.create(model="deep", messages=MESSAGES, temperature=0, max_tokens=120)
        timings = (answer.model_extra or {})["timings"]
        draft_n = timings.get("draft_n_accepted", 0)
        if draft_n > 20:
            break
    assert draft_n > 20
    counted = Scrape(httpx2.get(f"{worker.url}/metrics").text)
    assert counted.sum("paddock_draft_tokens_total", source="model", outcome="accepted") >= draft_n
    worker.stop()
