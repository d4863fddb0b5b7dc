"""Calls that no supervisor can have served, refused by a real gateway beside a real supervisor."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.caller import calling
from tests.support.stack import DEMO_MODEL, Stack

AT_ONCE_S = 0.1
"""Within it a call is refused that no supervisor need hear of."""
KNOWN_S = 60.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A machine on which one model is kept, so that there is no place for the other."""
    with Stack() as running:
        entry = {"path": str(DEMO_MODEL), "slots": 1, "ctx": 64, "llama": {"n_threads": 1}}
        kept = {"name": "kept", "residency": {"min": 1}, **entry}
        other = {"name": "other", "residency": {}, **entry}
        catalog = running.folder / "catalog.json"
        catalog.write_text(json.dumps({"models": [kept, other], "models_max": 1}))
        command = [sys.executable, "-m", "gateway.cli", "supervisor"]
        running.spawn("supervisor", command, {"PADDOCK_CATALOG": str(catalog)}, "supervisor")
        running.gateway(catalog=catalog, start_timeout_s=60)
        yield running


@pytest.mark.serial
async def test_a_call_for_which_there_is_no_room_is_refused_before_its_supervisor_hears_of_it(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, "other") as caller:
        told, reason = "what is loaded stays (`min`, `pinned` or a group), and leaves no room for other", ""
        async with asyncio.timeout(KNOWN_S):
            while reason != told:  # although nobody has called it
                async with caller.session.get(f"{caller.url}/v1/models/other") as response:
                    reason = (await response.json())["status"].get("reason", "")
                await asyncio.sleep(0.05)
        took_s: list[float] = []
        for _ in range(8):
            began = time.monotonic()
            status, body = await caller.whole(max_tokens=1)
            took_s.append(time.monotonic() - began)
            assert (status, body["error"]["code"]) == (503, "model_not_loaded")
            assert told in body["error"]["message"]
        assert max(took_s) < AT_ONCE_S, took_s
