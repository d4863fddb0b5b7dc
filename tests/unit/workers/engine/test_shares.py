from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.step.shares import (
    LONGEST_SLICE_S,
    RETURN_SHARE,
    SLICE_S,
    SLICE_TOKENS,
    TimeSlice,
    gives_way,
    is_shared,
    last_of,
    next_in,
)


@dataclass(frozen=True)
class Call:
    team: str
    number: int = 0
    weight: float = 1.0
    urgency: int = 0
    num_predicted: int = 0
    waits_since: float = 0.0

    @property
    def order(self) -> tuple[float, float, int]:
        return (-self.urgency, float("inf"), self.number)


def calls(teams: str) -> list[Call]:
    return [Call(team, number) for number, team in enumerate(teams)]


def always(call: Call) -> bool:
    return True


def given_by(teams: str, newcomer: Call) -> str:
    found = gives_way(calls(teams), newcomer, always)
    return found.team if found is not None else ""


def test_a_team_gets_its_share_and_no_more() -> None:
    assert given_by("aaaa", Call("b")) == "a"
    assert given_by("aaab", Call("b")) == "a"
    assert given_by("aabb", Call("b")) == ""
    assert given_by("abc", Call("d")) != "", "whoever has nothing gets a slice"
    assert given_by("aabc", Call("b")) == ""
    assert given_by("bbbb", Call("b")) == ""


def test_the_longest_answer_of_the_team_that_has_most_gives_way() -> None:
    running = [Call("a", 0, num_predicted=9), Call("b", 1, num_predicted=99), Call("a", 2, num_predicted=10)]
    assert gives_way(running, Call("c"), always) == running[2]
    assert gives_way(running, Call("c"), lambda call: call.number != 2) == running[0]
    assert gives_way(running, Call("c"), lambda call: False) is None


def test_weights_make_shares() -> None:
    heavy = [Call("a", number, weight=3.0) for number in range(3)]
    assert gives_way([*heavy, Call("b", 3)], Call("b", 4), always) is None
    assert gives_way([*heavy, Call("a", 3, weight=3.0)], Call("b", 4), always) is not None


def test_more_than_a_slice_is_taken_from_calls_no_more_urgent_only() -> None:
    urgent = [Call("a", number, urgency=1) for number in range(3)]
    assert gives_way(urgent, Call("b", 4), always) is not None
    assert gives_way([*urgent, Call("b", 3)], Call("b", 4), always) is None
    assert gives_way([*urgent, Call("b", 3)], Call("b", 4, urgency=1), always) is not None


def test_one_team_is_let_in_in_order() -> None:
    waiting = [Call("a", 2, urgency=0), Call("a", 1), Call("a", 3, urgency=5)]
    assert not is_shared([Call("a", 0)], waiting)
    assert next_in(waiting, [Call("a", 0)]) == waiting[2]


def test_a_team_without_a_slot_is_let_in_first() -> None:
    waiting = [Call("a", 1, urgency=8), Call("b", 2, waits_since=5.0), Call("c", 3, waits_since=4.0)]
    assert next_in(waiting, [Call("a", 0)]) == waiting[2]
    assert next_in(waiting, [Call("a", 0), Call("c", 9)]) == waiting[1]
    assert next_in(waiting, [Call("a", 0), Call("b", 8), Call("c", 9)]) == waiting[0]


def test_cells_are_given_up_by_the_team_that_has_most() -> None:
    assert last_of(calls("aaab")) == calls("aaab")[2]
    assert last_of(calls("bbb")).number == 2


def test_a_slice_is_so_many_tokens_or_so_long() -> None:
    slice_ = TimeSlice()
    slice_.enter(10.0, 5)
    assert not slice_.is_over(9.9 + LONGEST_SLICE_S, 5, keeps_prompt=False), (
        "what it has read of its prompt would be lost"
    )
    assert slice_.is_over(10.0 + LONGEST_SLICE_S, 5, keeps_prompt=False, part=0.1), "others wait for it no longer"
    assert slice_.is_over(10.0 + SLICE_S, 5, keeps_prompt=True)
    slice_.num_cut = 3
    assert not slice_.is_over(10.0 + 4 * SLICE_S, 5, keeps_prompt=True)
    assert not slice_.is_over(10.0 + 4 * LONGEST_SLICE_S, 5, keeps_prompt=False)
    slice_.resume(10.5, again=False)
    assert not slice_.is_over(10.6, 5 + SLICE_TOKENS - 1, keeps_prompt=True)
    assert slice_.is_over(10.6, 5 + SLICE_TOKENS, keeps_prompt=True)
    assert slice_.is_over(10.5 + SLICE_S, 6, keeps_prompt=True)
    assert slice_.is_over(10.6, 5 + SLICE_TOKENS // 4, keeps_prompt=True, part=0.25)


def test_a_slice_is_worth_coming_back() -> None:
    slice_ = TimeSlice()
    slice_.enter(0.0, 5)
    slice_.resume(0.4, again=True)
    assert not slice_.is_over(0.4 + 0.4 / RETURN_SHARE - 0.1, 1000, keeps_prompt=True)
    assert slice_.is_over(0.4 + 0.4 / RETURN_SHARE, 1000, keeps_prompt=True)
    slice_.enter(0.0, 5)
    slice_.resume(60.0, again=True)
    assert slice_.is_over(60.0 + LONGEST_SLICE_S, 6, keeps_prompt=True)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.integers(1, 6))
def test_every_call_gets_its_turn(teams: list[str], slots: int) -> None:
    """Answers without end: after a few exchanges each team has had a slot."""
    waiting = [Call(team, number) for number, team in enumerate(teams)]
    running: list[Call] = []
    served: set[str] = set()
    for now in range(1, 4 * len(teams)):
        if not waiting:
            break
        one = next_in(waiting, running)
        if len(running) >= slots:
            leaving = gives_way(running, one, always)
            if leaving is None:
                break
            running.remove(leaving)
            waiting.append(Call(leaving.team, leaving.number, waits_since=float(now)))
        waiting.remove(one)
        running.append(one)
        served.add(one.team)
    assert served == set(teams)
