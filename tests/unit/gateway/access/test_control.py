"""A crowd of one team begins a few requests in each turn of the event loop."""

from __future__ import annotations

import asyncio

from gateway.access.control import TeamStarts


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
