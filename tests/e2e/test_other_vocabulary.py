"""A model with another vocabulary and without a chat template, through the whole path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.caller import calling
from tests.support.small_models import write_stories_model
from tests.support.stack import Stack

ALIASES = ["stories", "tales"]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        write_stories_model(running.folder / "stories.gguf")
        for alias in ALIASES:
            running.worker(running.folder / "stories.gguf", alias, slots=4, ctx=512)
        running.gateway()
        yield running


async def test_a_story_streams(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, "stories") as caller:
        async with caller.stream("Once upon a time", max_tokens=60, cache_prompt=False) as stream:
            await stream.finish()
        assert stream.done
        assert stream.error is None
        assert len(stream.text.split()) > 10
        status, whole = await caller.whole("Once upon a time", max_tokens=60, cache_prompt=False)
    assert status == 200
    assert whole["choices"][0]["message"]["content"] == stream.text


async def test_each_alias_goes_to_its_own_pool(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, "stories") as caller:
        async with caller.session.get(f"{caller.url}/v1/models") as response:
            listed = await response.json()
        names = {model["id"]: model for model in listed["data"]}
        assert set(names) == set(ALIASES)
        assert names["stories"]["meta"]["n_vocab"] == 532
        async with caller.stream("Once upon a time", max_tokens=2) as stream:
            await stream.finish()
        assert stream.headers["x-paddock-worker"] == "worker-0"


async def test_prompt_longer_than_the_context_says_both_counts(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, "stories") as caller:
        status, body = await caller.whole("story " * 900)
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert "512" in body["error"]["message"]
