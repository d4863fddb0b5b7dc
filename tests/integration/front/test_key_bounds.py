"""What a key's calls may ask for: urgency, the length of an answer, and its time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.front.conftest import BOUND_KEY, NARROW_KEY
from tests.support.caller import calling
from tests.support.stack import Process, Stack

PRIORITY = "x-paddock-priority"


@pytest.mark.parametrize("how", [{}, {"n": 2}], ids=["one answer", "two answers"])
async def test_a_key_gets_no_more_urgent_than_it_may(stack: Stack, gateway: Process, how: dict[str, Any]) -> None:
    told: dict[str, list[str | None]] = {}
    for key in (NARROW_KEY, BOUND_KEY, stack.key):
        async with calling(gateway.url, key, "quick") as caller:
            for priority in (-100, -2, 0, 5):
                async with caller.stream(priority=priority, max_tokens=2, **how) as stream:
                    await stream.finish()
                assert stream.error is None
                told.setdefault(key, []).append(stream.headers.get(PRIORITY))
    assert told == {
        NARROW_KEY: ["0", "0", None, None],
        BOUND_KEY: ["-2", None, None, None],
        stack.key: [None, None, None, None],
    }, "an admin's key may name any"


async def test_an_answer_is_no_longer_than_its_key_allows(gateway: Process) -> None:
    async with calling(gateway.url, BOUND_KEY, "dropping") as caller:
        wishes: tuple[dict[str, Any], ...] = ({}, {"max_tokens": 5000}, {"max_tokens": 5})
        for asked in wishes:
            status, body = await caller.whole(**asked)
            assert status == 200, body
            assert body["usage"]["completion_tokens"] == min(60, asked.get("max_tokens", 60))
            assert body["choices"][0]["finish_reason"] == "length"


async def test_an_answer_has_a_time_of_its_own(gateway: Process) -> None:
    """60 tokens of 20 ms take twice what the key allows."""
    async with calling(gateway.url, BOUND_KEY, "slow") as caller, caller.stream() as stream:
        await stream.finish()
    assert stream.error is not None
    assert stream.error["code"] == "request_timeout"
    assert "0.6 s for one answer" in stream.error["message"]
    assert stream.text
