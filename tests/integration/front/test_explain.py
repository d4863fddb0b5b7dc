"""What admins are told of how calls are placed."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import Process

SECRET = "the quick brown fox jumps over a very secret dog"


async def explained(caller: Caller, body: dict[str, Any] | None = None, query: str = "") -> dict[str, Any]:
    method = "GET" if body is None else "POST"
    async with caller.session.request(method, f"{caller.url}/admin/explain{query}", json=body) as response:
        assert response.status == 200, await response.text()
        told: dict[str, Any] = await response.json()
        return told


async def test_a_model_at_rest(caller: Caller) -> None:
    told = await explained(caller, query="?model=quick")
    for _ in range(100):
        if not told["workers"][0]["leases"] and not told["workers"][0]["wait_ms"] and not told["circuits"]:
            break
        await asyncio.sleep(0.05)  # calls of the tests before it are just ending
        told = await explained(caller, query="?model=quick")
    assert (told["model"], told["alias"], told["fallbacks"]) == ("quick", "quick", [])
    (worker,) = told["workers"]
    assert worker["worker"] == "quick-a"
    assert worker["wait_ms"] == 0
    assert (worker["leases"], worker["leased_kv_tokens"]) == (0, 0)
    assert told["line"]["waiting"] == 0
    assert told["line"]["head"] == []
    assert told["circuits"] == []


async def test_a_prompt_that_is_never_sent_nor_shown(caller: Caller) -> None:
    body = caller.body(SECRET * 40, max_tokens=7)
    before = await explained(caller, body)
    assert before["prompt"]["bytes"] > len(SECRET) * 40
    assert before["prompt"]["heads"] >= 2
    assert before["workers"][0]["prefill_ms"] > 0
    assert "secret" not in str(before)
    again = await explained(caller, body)
    assert again["workers"][0]["cached_tokens"] == before["workers"][0]["cached_tokens"], "asking caches nothing"


async def test_who_waits(caller: Caller) -> None:
    caller.model = "slow"
    async with caller.stream() as one, caller.stream() as two:
        await one.until_text()
        await two.until_text()
        waiting = asyncio.create_task(caller.whole(priority=-3, max_tokens=1))
        await asyncio.sleep(0.3)
        told = await explained(caller, query="?model=slow")
        waiting.cancel()
    line = told["line"]
    assert (line["waiting"], line["by_priority"], line["by_team"]) == (1, {"-3": 1}, {"default": 1})
    (ticket,) = line["head"]
    assert (ticket["position"], ticket["team"], ticket["priority"]) == (1, "default", -3)
    assert 0 < ticket["waited_s"] < 5
    assert ticket["bids"].keys() == {"slow-a"}
    assert told["workers"][0]["leases"] == 2
    await asyncio.gather(waiting, return_exceptions=True)


async def test_it_is_for_admins(gateway: Process) -> None:
    async with (
        calling(gateway.url, NARROW_KEY, "quick") as caller,
        caller.session.get(f"{caller.url}/admin/explain?model=quick") as response,
    ):
        assert response.status == 403
        assert "admin's API key" in (await response.json())["error"]["message"]
