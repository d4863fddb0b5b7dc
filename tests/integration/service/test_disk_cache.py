"""What a worker process leaves on disk when it drains, and what the next one makes of it."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.integration.service.conftest import RedisServer
from tests.integration.service.test_slots import DEMO, STORY, Client, worker
from tests.support.small_models import write_small_model
from workers.commands import cache
from workers.engine.cache.prompt import BLOCK_TOKENS

BEGUN = STORY.strip()
NEXT = BEGUN + " And then?"


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
async def test_a_conversation_goes_on_in_the_next_worker(
    redis_server: RedisServer,
    folder: Path,
    tmp_path: Path,
    session: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    model = write_small_model(tmp_path, kind) if kind != "attention" else DEMO
    flags = ("--cache-dir", str(tmp_path / "cache"))
    with worker(redis_server, folder, f"{kind}-first", *flags, model=model, drained=True) as found:
        client = Client(session, found)
        await client.say(BEGUN, max_tokens=1)
        await client.say(BEGUN, "blue", max_tokens=1)
        [num_prompt] = {info.n_prompt_tokens for info in await client.slots() if info.n_prompt_tokens}
        expected, _ = await client.say(NEXT, "green")
    num_saved = num_prompt if kind == "hybrid" else num_prompt // BLOCK_TOKENS * BLOCK_TOKENS
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(folder / "state"))
    assert cache.main(("erase", "--tenant", "blue", *flags)) == 0
    with worker(redis_server, folder, f"{kind}-next", *flags, model=model) as found:
        client = Client(session, found)
        said = [await client.say(NEXT, tenant) for tenant in ("blue", "grey", "red")]
        assert said == [(expected, 0), (expected, 0), (expected, num_saved)]
