"""Turns that teams take one after the other."""

from __future__ import annotations

import asyncio

import pytest

from gateway.dispatch.team_turns import TeamTurns, Turn


async def test_teams_come_round() -> None:
    turns, order = TeamTurns(), list[str]()

    async def go(team: str) -> None:
        await turns.take(team)
        order.append(team)
        await asyncio.sleep(0)
        turns.give_back(team)

    await asyncio.gather(*(go(team) for team in ["red", "red", "red", "blue", "green", "blue"]))
    assert order == ["red", "red", "blue", "green", "red", "blue"]


async def test_no_team_has_every_turn() -> None:
    turns = TeamTurns(at_once=2)
    await turns.take("red")
    second = asyncio.create_task(turns.take("red"))
    await asyncio.sleep(0)
    assert not second.done()
    async with asyncio.timeout(1.0):
        await turns.take("blue")
        turns.give_back("red")
        await second


async def test_one_that_leaves_keeps_nobody_out() -> None:
    turns = TeamTurns()
    await turns.take("red")
    waiting = [asyncio.create_task(turns.take(team)) for team in ("red", "blue", "green")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    turns.give_back("red")
    waiting[1].cancel()  # in the moment in which its turn comes
    async with asyncio.timeout(1.0):
        await waiting[2]
        turns.give_back("green")
        await turns.take("red")
    for gone in waiting[:2]:
        with pytest.raises(asyncio.CancelledError):
            await gone


async def entered(turns: TeamTurns, team: str, order: list[str], name: str) -> Turn:
    turn = await turns.enter(team)
    order.append(name)
    return turn


async def test_a_team_is_let_in_in_order_and_others_do_not_wait_for_it() -> None:
    turns, order = TeamTurns.of_each(2), list[str]()
    red = [asyncio.create_task(entered(turns, "red", order, f"red{number}")) for number in range(5)]
    blue = asyncio.create_task(entered(turns, "blue", order, "blue"))
    await asyncio.sleep(0)
    assert order == ["red0", "red1", "blue"]
    for number in range(3):
        (await red[number]).leave()
        await asyncio.sleep(0)
    assert order == ["red0", "red1", "blue", "red2", "red3", "red4"]
    (await blue).leave()


async def test_leaving_twice_lets_one_in() -> None:
    turns, order = TeamTurns.of_each(1), list[str]()
    first = await turns.enter("red")
    rest = [asyncio.create_task(entered(turns, "red", order, name)) for name in "ab"]
    await asyncio.sleep(0)
    first.leave()
    first.leave()
    await asyncio.sleep(0)
    assert order == ["a"]
    (await rest[0]).leave()
    (await rest[1]).leave()


async def test_whoever_gives_up_keeps_no_place() -> None:
    """Before its turn, and in the moment in which it has come."""
    turns, order = TeamTurns.of_each(1), list[str]()
    first = await turns.enter("red")
    gone, going, last = (asyncio.create_task(entered(turns, "red", order, name)) for name in "abc")
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    first.leave()
    going.cancel()
    (await last).leave()
    assert order == ["c"]
    assert (await turns.enter("red")) is not None
