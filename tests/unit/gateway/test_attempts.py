"""What becomes of a call before it is placed."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any, cast

from gateway.attempts import INLINE_HELD_BYTES, Attempts
from gateway.relay.payload import INLINE_CHARS
from gateway.routing.ask import ask_of
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from tests.support.pool import call
from workers.protocol.requests import GenerateRequest


@dataclass
class Fleet:
    """One without workers, which notes who looks at it."""

    workers: dict[str, Any] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    looked_from: list[int] = field(default_factory=list)

    @property
    def snapshot(self) -> Fleet:
        self.looked_from.append(threading.get_ident())
        return self


def attempts(fleet: Fleet) -> Attempts:
    nobody = cast(Any, None)
    return Attempts(fleet, nobody, nobody, Metrics(), lambda call, request: request, 0.1, queue_s=1.0, start_s=1.0)


async def test_the_heads_of_a_long_prompt_are_hashed_on_a_thread() -> None:
    """A prompt of 8 MiB kept the event loop, and every stream with it, for 10 to 26 ms."""
    for number, is_aside in ((INLINE_CHARS, False), (INLINE_CHARS + 1, True)):
        fleet, request = Fleet(), GenerateRequest(prompt="x" * number)
        tries = await attempts(fleet).begin(call(), Trail("id", "POST", "/"), request)
        assert (fleet.looked_from[0] != threading.get_ident()) == is_aside
        assert tries.ask == ask_of(request, call().principal.team, {})


async def test_the_heads_of_many_messages_or_large_tools_are_hashed_on_a_thread() -> None:
    """Ten thousand short messages kept the event loop for 60 ms, a schema of 8 MiB for 27 ms."""
    for held_bytes, is_aside in ((INLINE_HELD_BYTES, False), (INLINE_HELD_BYTES + 1, True)):
        fleet, request = Fleet(), GenerateRequest(prompt="x")
        trail = Trail("id", "POST", "/", held_bytes=held_bytes)
        await attempts(fleet).begin(call(), trail, request)
        assert (fleet.looked_from[0] != threading.get_ident()) == is_aside


async def test_one_that_leaves_while_its_prompt_is_hashed_holds_nobody_up() -> None:
    fleet, request = Fleet(), GenerateRequest(prompt="x" * (4 * INLINE_CHARS))
    made = attempts(fleet)
    beginning = [asyncio.create_task(made.begin(call(), Trail("id", "POST", "/"), request)) for _ in range(4)]
    beginning[1].cancel()
    done = await asyncio.gather(*beginning, return_exceptions=True)
    assert [isinstance(one, BaseException) for one in done] == [False, True, False, False]
