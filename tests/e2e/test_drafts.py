"""Drafts through the front door: what callers ask for and are told, and what metrics count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.conftest import DEMO_ALIAS
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
