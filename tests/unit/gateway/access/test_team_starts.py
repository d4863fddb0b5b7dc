"""A crowd of one team begins a few requests in each turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from gateway.access import team_starts
from gateway.access.team_starts import LONG_TURN_S, TeamStarts


async def begin(starts: TeamStarts, team: str, begun: list[str]) -> None:
    await starts.start(team)
    begun.append(team)


async def test_a_request_does_not_wait_for_a_crowd_of_another_team() -> None:
    starts, begun = TeamStarts(per_turn=4), list[str]()
    crowd = [asyncio.create_task(begin(starts, "red", begun)) for _ in range(100)]
    await asyncio.sleep(0)
    await begin(starts, "blue", begun)
    assert begun.index("blue") <= 8
    await asyncio.gather(*crowd)
    assert begun.count("red") == 100


async def test_each_turn_of_the_loop_has_its_few() -> None:
    starts, begun = TeamStarts(per_turn=4), list[str]()
    crowd = [asyncio.create_task(begin(starts, "red", begun)) for _ in range(20)]
    before, most = 0, 0
    while len(begun) < 20:
        await asyncio.sleep(0)
        before, most = len(begun), max(most, len(begun) - before)
    assert most <= 8, "those that need not wait, and those whose turn it is"
    await asyncio.gather(*crowd)
    await starts.start("red")


async def test_whoever_leaves_takes_nobodys_place() -> None:
    starts, begun = TeamStarts(per_turn=1), list[str]()
    first, gone, last = (asyncio.create_task(begin(starts, name, begun)) for name in ("red", "red", "red"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(asyncio.gather(first, last), 1.0)
    assert begun == ["red", "red"]


async def test_a_crowd_whose_requests_take_long_begins_fewer_and_rests_while_others_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(team_starts, "thread_time", lambda: now)
    starts, begun, turns = TeamStarts(per_turn=4), list[str](), list[int]()

    async def heavy() -> None:
        nonlocal now
        await starts.start("red")
        now += 2 * LONG_TURN_S
        begun.append("red")

    async def turn() -> int:
        before = len(begun)
        await asyncio.sleep(0)
        return len(begun) - before

    crowd = [asyncio.create_task(heavy()) for _ in range(40)]
    turns = [await turn() for _ in range(12)]
    assert max(turns[4:]) == 1, "it learns that they take long"
    await begin(starts, "blue", begun)
    await asyncio.sleep(0)
    assert sum([await turn() for _ in range(20)]) <= 3, "it rests: so many turns of the loop take less than that"
    for _ in range(3):
        await asyncio.wait_for(begin(starts, "blue", begun), 0.005)
    await asyncio.sleep(10 * LONG_TURN_S)
    assert begun.count("red") > 5, "and goes on"
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


async def test_a_team_that_is_alone_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(team_starts, "thread_time", lambda: now)
    starts, begun = TeamStarts(per_turn=4), list[str]()

    async def heavy() -> None:
        nonlocal now
        await starts.start("red")
        now += 2 * LONG_TURN_S
        begun.append("red")

    crowd = [asyncio.create_task(heavy()) for _ in range(40)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(begun) == 40
    await asyncio.gather(*crowd)


@pytest.mark.parametrize(("teams", "rests"), [(("red", "blue"), True), (("red", "blue", "green"), False)])
async def test_only_teams_that_began_half_of_a_long_turn_rest(
    monkeypatch: pytest.MonkeyPatch, teams: tuple[str, ...], rests: bool
) -> None:
    """Many teams that each ask a little make a turn long together: none of them would begin anything in its pause."""
    now = 0.0
    monkeypatch.setattr(team_starts, "thread_time", lambda: now)
    starts, begun = TeamStarts(per_turn=1), list[str]()

    async def heavy(team: str) -> None:
        nonlocal now
        await starts.start(team)
        now += 2 * LONG_TURN_S
        begun.append(team)

    crowd = [asyncio.create_task(heavy(team)) for _ in range(4) for team in teams]
    for _ in range(6):
        await asyncio.sleep(0)
    assert (len(begun) < 2 * len(teams)) == rests
    await asyncio.gather(*crowd)
