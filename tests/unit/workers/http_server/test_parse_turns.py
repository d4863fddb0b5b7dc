"""Received bytes are parsed for a millisecond per turn of the loop, over all connections, callers in rotation."""

from __future__ import annotations

import asyncio

import pytest

from workers.http_server.pacer import PARSE_S, ParseTurns


class Flooded:
    """A connection that always has another piece to parse."""

    def __init__(self, turns: ParseTurns, name: str, parsed: list[str], took_s: float, pieces: int = 1000) -> None:
        self._turns, self._name, self._parsed, self._took_s, self._left = turns, name, parsed, took_s, pieces

    def parse_on(self) -> None:
        self._parsed.append(self._name)
        self._turns.spent(self._took_s)
        self._left -= 1
        if self._left:
            self._turns.wait(self, self._name)


async def test_a_piece_is_parsed_at_once_while_there_is_time() -> None:
    turns = ParseTurns()
    for _ in range(3):
        assert turns.may_parse()
        turns.spent(PARSE_S / 4)
    turns.spent(PARSE_S / 4)
    assert not turns.may_parse()
    await asyncio.sleep(0)
    assert turns.may_parse()


async def test_all_connections_together_have_the_time_of_a_turn_and_rest() -> None:
    turns, parsed = ParseTurns(), list[str]()
    for _ in range(200):
        turns.wait(Flooded(turns, "flood", parsed, PARSE_S / 4), "flood")
    most = before = 0
    for _ in range(100):
        await asyncio.sleep(0)
        most, before = max(most, len(parsed) - before), len(parsed)
    assert 0 < most <= 4
    assert len(parsed) <= 8, "it rests: a hundred turns of the loop take less"


async def test_callers_take_turns_and_few_pieces_are_not_behind_many() -> None:
    turns, parsed = ParseTurns(), list[str]()
    for _ in range(200):
        turns.wait(Flooded(turns, "flood", parsed, PARSE_S / 10), "flood")
    turns.wait(Flooded(turns, "honest", parsed, PARSE_S / 10, pieces=3), "honest")
    async with asyncio.timeout(5):
        while parsed.count("honest") < 3:  # noqa: ASYNC110 - each is a turn of the loop
            await asyncio.sleep(0)
    assert len(parsed) <= 10


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_leaves_is_not_parsed(leaves: bool) -> None:
    turns, parsed = ParseTurns(), list[str]()
    one = Flooded(turns, "one", parsed, 0.0, pieces=1)
    turns.wait(one, "one")
    turns.wait(one, "another")
    assert turns.waits(one)
    if leaves:
        turns.leave(one)
        turns.leave(one)
    await asyncio.sleep(0)
    assert parsed == ([] if leaves else ["one"])
    assert not turns.waits(one)
    assert turns.may_parse()


async def test_one_that_fails_keeps_nobody_from_parsing() -> None:
    class Failing:
        def parse_on(self) -> None:
            raise RuntimeError("this one")

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    turns, parsed = ParseTurns(), list[str]()
    turns.wait(Failing(), "bad")
    turns.wait(Flooded(turns, "one", parsed, 0.0, pieces=1), "one")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (len(told), parsed) == (1, ["one"])
