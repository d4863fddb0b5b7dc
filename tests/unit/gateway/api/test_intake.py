"""Bodies that come in: checked while they come, a slice in a turn of the loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import closing

import pytest
from starlette.types import Message, Scope

from gateway.api.intake.body import MIN_ITEMS
from gateway.api.intake.decoding import INLINE_BYTES, INLINE_NUMBERS, INLINE_STRINGS, DecodingThread
from gateway.api.intake.intake import SMALL_BODY_BYTES, Intake
from gateway.api.intake.memory_budget import MemoryBudget
from gateway.call import Principal
from gateway.errors import ContextOverflow, HeldTooMuch, InvalidRequest
from tests.support.large_bodies import LARGE_BODIES, LargeBody

PART_BYTES = 64 << 10
MAX_BODY_BYTES = 8 << 20


class Sender:
    """Sends a body part by part, each when it is asked for."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.num_sent = 0

    @property
    def scope(self) -> Scope:
        return {"type": "http", "headers": [(b"content-length", b"%d" % len(self.body))]}

    async def receive(self) -> Message:
        await asyncio.sleep(0)
        part = self.body[self.num_sent : self.num_sent + PART_BYTES]
        self.num_sent += len(part)
        return {"type": "http.request", "body": part, "more_body": self.num_sent < len(self.body)}


def principal(team: str) -> Principal:
    return Principal(f"key of {team}", team, None, admin=False)


def intake() -> Intake:
    return Intake(MAX_BODY_BYTES, MemoryBudget(1 << 30), DecodingThread(), lambda: 4096)


async def take_in(into: Intake, who: Principal, sender: Sender) -> int:
    """Return how many bytes were decoded."""
    async with into.open_body(who, sender.scope, sender.receive) as body:
        return await body.decode(len)


async def test_too_much_is_refused_while_it_still_comes() -> None:
    sender = Sender(b'{"prompt":[' + b"1," * (3 << 20))
    with pytest.raises(ContextOverflow):
        await take_in(intake(), principal("red"), sender)
    assert sender.num_sent <= 2 * MIN_ITEMS + 2 * PART_BYTES


class Tidied(DecodingThread):
    """Counts how often free memory was to be given back."""

    num_tidied = 0

    def tidy(self) -> None:
        self.num_tidied += 1


@pytest.mark.parametrize(("num_bytes", "num_tidied"), [(INLINE_BYTES, 0), (INLINE_BYTES + 1, 1)])
async def test_what_a_large_message_took_goes_back_to_the_system(num_bytes: int, num_tidied: int) -> None:
    lane = Tidied()
    into = Intake(MAX_BODY_BYTES, MemoryBudget(1 << 30), lane, lambda: 4096)
    into.message(principal("red"), bytes(num_bytes)).close()
    assert lane.num_tidied == num_tidied


@pytest.mark.parametrize(
    ("document", "on_loop"),
    [
        ({"prompt": "word " * 40_000}, True),
        ({"prompt": [12345] * INLINE_NUMBERS}, True),
        ({"prompt": [[12345] * 400] * 100}, False),
        ({"input": ["12345678"] * (INLINE_STRINGS + 1)}, False),
    ],
)
async def test_what_takes_more_than_a_moment_is_decoded_on_a_thread(document: object, on_loop: bool) -> None:
    """By the objects that it holds: a hundred prompts of 400 tokens are no longer than a long text."""
    raw = json.dumps(document, separators=(",", ":")).encode()
    assert len(raw) < INLINE_BYTES

    def read(_: bytes = b"") -> bool:
        return threading.current_thread() is threading.main_thread()

    sender = Sender(raw)
    async with intake().open_body(principal("red"), sender.scope, sender.receive) as body:
        assert await body.decode(read) is on_loop
        assert await body.run_aside(len(raw), read) is on_loop, "what is made of it takes as long"
    with closing(intake().message(principal("red"), raw)) as message:
        assert await message.decode(read) is on_loop
        assert await message.run_aside(len(raw), read) is on_loop


async def test_a_body_that_has_come_whole_is_checked_as_well() -> None:
    body = intake().message(principal("red"), LARGE_BODIES[0].of(2 << 20))
    with closing(body), pytest.raises(InvalidRequest):
        await body.decode(len)


async def test_many_bodies_of_one_team_do_not_hold_up_another_team() -> None:
    """Each is as long as a slice takes turns: red's all wait behind each other."""
    into, ended = intake(), list[str]()
    text = b'["' + b"x" * (4 << 20) + b'"]'

    async def send(team: str, body: bytes) -> None:
        await take_in(into, principal(team), Sender(body))
        ended.append(team)

    crowd = [asyncio.create_task(send("red", text)) for _ in range(6)]
    await asyncio.sleep(0.02)
    await send("blue", text[: 1 << 20] + b'"]')
    assert ended == ["blue"]
    await asyncio.gather(*crowd)


@pytest.mark.serial
@pytest.mark.parametrize("large", LARGE_BODIES[1::3], ids=lambda large: large.name)
async def test_the_loop_is_free_between_slices(large: LargeBody) -> None:
    """Four at once, and no turn of the loop takes long (as the processor counts it: others load the machine)."""
    into, body = intake(), large.of(2 << 20)

    async def refused() -> None:
        with pytest.raises(InvalidRequest):
            await take_in(into, principal("red"), Sender(body))

    taking, longest_s = asyncio.gather(*(refused() for _ in range(4))), 0.0
    while not taking.done():
        began = time.process_time()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.process_time() - began)
    await taking
    assert longest_s < 0.02


async def test_long_things_of_a_team_are_loaded_one_after_the_other() -> None:
    """Sixteen reads of a response of 2 MB made a TTFT of 14 ms 78: each byte passes through the loop four times."""
    into = intake()
    body, other = (into.message(principal(team), b"") for team in ("red", "blue"))
    with closing(body), closing(other):
        async with body.load_in_turn(INLINE_BYTES + 1):
            for waits in (other.load_in_turn(INLINE_BYTES + 1), body.load_in_turn(INLINE_BYTES)):
                async with asyncio.timeout(1), waits:
                    pass
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02), body.load_in_turn(INLINE_BYTES + 1):
                    pass
        async with asyncio.timeout(1), body.load_in_turn(INLINE_BYTES + 1):
            pass


async def test_a_short_body_counts_for_what_it_takes() -> None:
    """Five hundred calls of 15 KiB of arrays, counted for four times their bytes, held 140 KB each."""
    sender, into = Sender(b'{"a":[' + b"[]," * 5000 + b"[]]}"), intake()
    async with into.open_body(principal("red"), sender.scope, sender.receive) as body:
        await body.decode(json.loads)
        assert body.num_bytes > 30 * len(sender.body)


async def test_bodies_without_a_prompt_count_as_well() -> None:
    """A key could leave a quarter of a megabyte on each of 4,096 connections, a gigabyte that nothing counted."""
    budget, into = one_budget()
    going_on, refused = asyncio.Event(), 0
    sender = Sender(b" " * SMALL_BODY_BYTES)

    async def never_whole() -> Message:
        if sender.num_sent >= SMALL_BODY_BYTES // 2:
            await going_on.wait()
        sender.num_sent += PART_BYTES
        return {"type": "http.request", "body": b" " * PART_BYTES, "more_body": True}

    reading = [asyncio.create_task(into.small(principal("red"), sender.scope, never_whole, len)) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert SMALL_BODY_BYTES <= budget.num_bytes <= budget.largest
    refused = sum(task.done() and isinstance(task.exception(), HeldTooMuch) for task in reading)
    assert refused >= 4
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert budget.num_bytes == 0


def one_budget() -> tuple[MemoryBudget, Intake]:
    budget = MemoryBudget(4 * SMALL_BODY_BYTES)
    return budget, Intake(MAX_BODY_BYTES, budget, DecodingThread(), lambda: 4096)
