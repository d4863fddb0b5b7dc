from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.adapters.turns import FEWEST_STEPS, MOST_STEPS, TEAM_WAIT_S, WAIT_S, AdapterTurns, chosen


def ours(sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Groups of one team."""
    return {group: {"": size} for group, size in sizes.items()}


def steps(
    turns: AdapterTurns[str], sizes: dict[str, int], count: int, *, step_s: float = 0.01, switch_s: float = 0.0
) -> str:
    """The groups of the next `count` steps, with a clock of its own."""
    taken = ""
    now = 0.0
    for _ in range(count):
        before = turns._current
        group = turns.choose(ours(sizes), now)
        switched = group != before
        seconds = step_s + switch_s * switched
        turns.note_step(seconds, switched=switched)
        now += seconds
        taken += group
    return taken


def test_a_group_alone_keeps_its_turn() -> None:
    assert steps(AdapterTurns(), {"a": 3}, 50) == "a" * 50


def test_equal_groups_take_equal_turns() -> None:
    taken = steps(AdapterTurns(), {"a": 4, "b": 4}, 40)
    assert taken == ("a" * FEWEST_STEPS + "b" * FEWEST_STEPS) * 10


def test_asking_again_changes_nothing() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    sizes = {"a": 1, "b": 1}
    for _ in range(20):
        asked = [turns.choose(ours(sizes), 0.0) for _ in range(3)]
        assert len(set(asked)) == 1
        turns.note_step(0.01, switched=False)


def test_a_dear_switch_makes_turns_longer() -> None:
    """A demo model's step and switch: the switch takes a tenth of the time instead of a half or more."""
    turns: AdapterTurns[str] = AdapterTurns()
    taken = steps(turns, {"a": 4, "b": 4}, 200, step_s=0.0008, switch_s=0.001)
    assert abs(turns.switch_s - 0.001) < 1e-6
    assert abs(turns.step_s - 0.0008) < 1e-6
    assert turns.length("a", ours({"a": 4, "b": 4})) == 13
    assert taken[-26:].count("ab") + taken[-26:].count("ba") <= 2


def test_a_cheap_switch_leaves_them_short() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    steps(turns, {"a": 1, "b": 1}, 40, step_s=0.13, switch_s=0.005)
    assert turns.length("a", ours({"a": 1, "b": 1})) == FEWEST_STEPS


def test_a_loner_does_not_halve_the_pace_of_the_many() -> None:
    taken = steps(AdapterTurns(), {"many": 15, "one": 1}, 360, step_s=0.001)
    share = taken.count("many") / (taken.count("many") + taken.count("one"))
    assert share > 0.85
    assert taken.count("one") >= 360 // (MOST_STEPS + FEWEST_STEPS) // 2


def test_slow_steps_end_a_turn_early() -> None:
    """A prompt of a second per step: turns of one step, so that the others wait for no more than one each."""
    turns: AdapterTurns[str] = AdapterTurns()
    assert steps(turns, {"a": 9, "b": 1}, 6, step_s=1.0) == "ababab"


def test_steps_with_prompts_do_not_count_as_the_price_of_a_switch() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    turns.choose(ours({"a": 1}), 0.0)
    turns.note_step(2.0, switched=True, comparable=False)
    turns.note_step(0.01, switched=False)
    assert turns.switch_s == 0.0
    assert turns.step_s == 0.01


def test_a_newcomer_gets_the_next_step_of_a_group_that_was_alone_for_long() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    steps(turns, {"a": 8}, 100)
    assert turns.choose(ours({"a": 8, "b": 1}), 1.0) == "b"


def test_a_group_that_ends_gives_its_turn_away() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    assert turns.choose(ours({"a": 1, "b": 1}), 0.0) == "a"
    assert turns.choose(ours({"b": 1}), 0.0) == "b"
    assert turns.choose(ours({"b": 1, "a": 1}), 0.0) == "b", "its turn has just begun"


@given(
    st.lists(
        st.tuples(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 20), min_size=1), st.floats(1e-4, 2.0)),
        min_size=1,
        max_size=200,
    )
)
def test_nobody_waits_longer_than_the_bound(moments: list[tuple[dict[str, int], float]]) -> None:
    """Groups come and go and steps take any time: the bound counts the groups that were there meanwhile."""
    turns: AdapterTurns[str] = AdapterTurns()
    waited: dict[str, int] = {}
    rivals: dict[str, set[str]] = {}
    now = 0.0
    for sizes, seconds in moments:
        before = turns._current
        group = turns.choose(ours(sizes), now)
        assert group in sizes
        waited = {one: waited.get(one, 0) + 1 for one in sizes if one != group}
        rivals = {one: (rivals.get(one, set()) | set(sizes)) - {one} for one in waited}
        for one, num_steps in waited.items():
            # A rival that leaves and comes back queues up again behind those who wait.
            assert num_steps <= MOST_STEPS * (len(rivals[one]) + 1), (one, num_steps)
        turns.note_step(seconds, switched=group != before)
        now += seconds


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 20), min_size=2), st.floats(1e-4, 0.05))
def test_nobody_waits_much_longer_than_the_bound_in_time(sizes: dict[str, int], step_s: float) -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    served = dict.fromkeys(sizes, 0.0)
    now = 0.0
    for _ in range(300):
        group = turns.choose(ours(sizes), now)
        served[group] = now
        turns.note_step(step_s, switched=False)
        now += step_s
        longest = max(now - at for at in served.values())
        assert longest <= WAIT_S + (len(sizes) + 1) * step_s


# Several teams.

Callers = dict[str, dict[str, int]]
DEMO, HALF_B_CPU, LARGE_GPU = (0.00025, 0.00005, 0.0009), (0.023, 0.004, 0.0043), (0.012, 0.0002, 0.003)
"""Seconds: of a step, of each of its rows, of a switch."""


def run(callers: Callers, costs: tuple[float, float, float], seconds: float = 20.0) -> dict[str, list[float]]:
    """Group -> when its steps ended."""
    turns: AdapterTurns[str] = AdapterTurns()
    base_s, row_s, switch_s = costs
    ended: dict[str, list[float]] = {group: [] for group in callers}
    now, before = 0.0, ""
    while now < seconds:
        group = turns.choose(callers, now)
        step_s = base_s + row_s * sum(callers[group].values()) + switch_s * (group != before)
        turns.note_step(step_s, switched=group != before)
        now, before = now + step_s, group
        ended[group].append(now)
    return ended


def longest_gap(ended: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(ended))


@pytest.mark.parametrize("costs", [DEMO, HALF_B_CPU, LARGE_GPU])
@pytest.mark.parametrize("num_scales", [15, 31])
def test_a_team_bears_the_cost_of_its_groups(costs: tuple[float, float, float], num_scales: int) -> None:
    """Each scale of an adapter is a group; the stream of another team had one step in 17 (0.5 s between its tokens)."""
    scales = {f"scale {number}": {"evil": 1} for number in range(num_scales)}
    ended = run({"plain": {"good": 1}, **scales}, costs)
    assert longest_gap(ended["plain"]) < costs[0] + 0.1
    assert len(ended["plain"]) >= 0.45 * sum(len(one) for one in ended.values())
    served = [len(ended[scale]) for scale in scales]
    assert max(served) - min(served) <= MOST_STEPS, "the team's own groups take turns"


@pytest.mark.parametrize("costs", [DEMO, HALF_B_CPU, LARGE_GPU])
def test_a_large_group_of_another_team_gives_the_turn_back_soon(costs: tuple[float, float, float]) -> None:
    ended = run({"plain": {"good": 1}, "pirate": {"evil": 15}}, costs)
    step_s = costs[0] + 15 * costs[1]
    assert longest_gap(ended["plain"]) < max(TEAM_WAIT_S, step_s) + costs[0] + costs[1] + 2 * costs[2] + 1e-6


def test_groups_that_end_after_one_step_do_not_keep_the_turn_with_their_team() -> None:
    turns: AdapterTurns[str] = AdapterTurns()
    taken = ""
    for number in range(40):
        group = turns.choose({f"scale {number}": {"evil": 1}, f"scale {number + 1}": {"evil": 1}, "": {"good": 1}}, 0.0)
        turns.note_step(0.01, switched=True)
        taken += "g" if not group else "e"
    assert "eee" not in taken
    assert taken.count("g") >= 18


def test_teams_of_one_group_have_its_turn_together() -> None:
    """Fifteen teams without adapters are one group to a sixteenth with one: it waits for a turn, not for fifteen."""
    ended = run({"plain": {f"team {number}": 1 for number in range(15)}, "pirate": {"last": 1}}, DEMO)
    assert longest_gap(ended["pirate"]) < TEAM_WAIT_S + 0.005
    assert longest_gap(ended["plain"]) < 0.02


def test_a_team_that_is_in_the_group_of_another_keeps_its_own_turns() -> None:
    ended = run({"plain": {"a": 1, "b": 1}, "x": {"b": 1}, "y": {"c": 1}}, DEMO)
    counts = {group: len(one) for group, one in ended.items()}
    assert min(counts.values()) > 0.19 * sum(counts.values()), counts


@given(
    st.lists(
        st.tuples(
            st.dictionaries(
                st.sampled_from("abcde"),
                st.dictionaries(st.sampled_from("TUV"), st.integers(1, 20), min_size=1),
                min_size=1,
            ),
            st.floats(1e-4, 0.2),
        ),
        min_size=1,
        max_size=200,
    )
)
def test_a_team_waits_for_a_turn_of_each_other_team(moments: list[tuple[Callers, float]]) -> None:
    """However groups come and go, a team that stays waits for two turns of each of the two others at most."""
    turns: AdapterTurns[str] = AdapterTurns()
    waited: dict[str, int] = {}
    now = 0.0
    for callers, seconds in moments:
        here = {team for teams in callers.values() for team in teams}
        group = turns.choose(callers, now)
        assert group in callers
        waited = {team: waited.get(team, 0) + 1 for team in here if team not in callers[group]}
        assert all(num_steps <= 4 * MOST_STEPS for num_steps in waited.values()), waited
        turns.note_step(seconds, switched=True)
        now += seconds


@dataclass
class Keyed:
    key: bytes


@dataclass
class Caller:
    adapter_set: Keyed
    team: str = ""


def test_those_of_the_turn_are_chosen_in_their_order() -> None:
    turns: AdapterTurns[bytes] = AdapterTurns()
    none, pirate = Keyed(b""), Keyed(b"pirate")
    ready = [Caller(none), Caller(pirate), Caller(none), Caller(pirate)]
    assert chosen(turns, ready, 0.0) == [ready[0], ready[2]]
    for _ in range(FEWEST_STEPS):
        turns.note_step(0.01, switched=False)
    assert chosen(turns, ready, 0.02) == [ready[1], ready[3]]
    assert chosen(turns, [], 0.02) == []
    assert chosen(turns, ready[1:2], 0.02) == ready[1:2]
