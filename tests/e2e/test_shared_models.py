"""Models that somebody else trained, through the whole path: another vocabulary, no chat template."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.caller import calling
from tests.support.stack import SHARED_MODELS, Stack

pytestmark = pytest.mark.skipif(not SHARED_MODELS.exists(), reason="../shared/models is not here")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.worker(SHARED_MODELS / "stories260K.gguf", "stories", slots=4, ctx=512)
        running.worker(SHARED_MODELS / "stories260K-q8_0.gguf", "stories-q8", slots=4, ctx=512)
        running.gateway()
        yield running


@pytest.mark.parametrize("model", ["stories", "stories-q8"])
async def test_a_story_streams(stack: Stack, model: str) -> None:
    async with calling(stack.gateways[0].url, stack.key, model) as caller:
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
        assert set(names) == {"stories", "stories-q8"}
        assert names["stories"]["meta"]["n_vocab"] == 512
        async with caller.stream("Once upon a time", max_tokens=2) as stream:
            await stream.finish()
        assert stream.headers["x-paddock-worker"] == "worker-0"


async def test_prompt_longer_than_the_context_says_both_counts(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, "stories") as caller:
        status, body = await caller.whole("story " * 900)
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert "512" in body["error"]["message"]
