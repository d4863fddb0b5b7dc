"""What slow drawing may take of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.step.sampling import (
    FIRST_TOKENS,
    MAX_DEBT_S,
    MAX_DRAW_S,
    PASSED_S,
    PASSED_TOKENS,
    SHARE_S,
    SamplingCost,
    within_share,
)


@dataclass
class Call:
    name: str
    took_s: float = 0.0
    token_at: float = 0.0
    started_at: float = 0.0
    decoding: bool = True
    num_predicted: int = 1
    num_prompt_left: int = 0
    cost: SamplingCost = field(default_factory=SamplingCost)

    def __post_init__(self) -> None:
        for _ in range(50):
            self.cost.note(self.took_s)


def names(calls: list[Call]) -> list[str]:
    return [call.name for call in calls]


def test_quick_calls_and_prompts_take_part_in_every_step() -> None:
    calls = [Call(f"quick {n}", 0.001) for n in range(100)]
    prompt = Call("prompt", 0.09, decoding=False, num_prompt_left=FIRST_TOKENS + 1)
    slow = [Call(f"slow {n}", 0.02, token_at=n) for n in range(2)]
    assert names(within_share([*calls, prompt, *slow], now=2.0))[:101] == [*names(calls), "prompt"]


def test_slow_calls_miss_a_step_that_can_bring_a_first_token() -> None:
    prompt, quick = Call("prompt", decoding=False, num_predicted=0, num_prompt_left=9), Call("quick", token_at=1.0)
    slow = [Call(f"slow {n}", 0.02, token_at=1.0 + n / 100) for n in range(2)]
    calls = [prompt, quick, *slow]
    assert names(within_share(calls, now=1.02)) == ["prompt", "quick"]
    assert names(within_share(calls, now=1.001 + PASSED_S)) == ["prompt", "quick", "slow 0"]
    assert names(within_share(calls, now=1.1 + PASSED_S)) == ["prompt", "quick", "slow 0"]
    prompt.num_prompt_left = PASSED_TOKENS + 1  # it takes several steps anyhow
    assert names(within_share(calls, now=1.02)) == ["prompt", "quick", "slow 0"]
    prompt.num_prompt_left, prompt.num_predicted = 9, 5  # what it reads it had read before
    assert names(within_share(calls, now=1.02)) == ["prompt", "quick", "slow 0"]


def test_slow_calls_take_turns_where_their_share_is_not_enough() -> None:
    calls = [Call(f"slow {n}", 0.02) for n in range(5)]
    turns: dict[str, int] = {call.name: 0 for call in calls}
    for step in range(50):
        chosen = within_share(calls, now=0.0)
        assert sum(call.cost.mean_s for call in chosen) <= SHARE_S
        for call in chosen:
            call.token_at = step + 1.0
            turns[call.name] += 1
    assert set(turns.values()) == {10}


def test_first_tokens_take_their_turns_among_those_of_slow_calls() -> None:
    """What their samplers are expected to take counts, as none of theirs was timed yet."""
    calls = [Call(f"slow {n}", 0.01, token_at=1.0 + n) for n in range(2)]
    first = {"decoding": False, "num_predicted": 0, "num_prompt_left": 9}
    calls += [Call(f"first {n}", 0.007, started_at=1.5 + n, **first) for n in range(4)]  # type: ignore[arg-type]
    assert names(within_share(calls, now=9.0)) == ["slow 0", "first 0"]
    assert names(within_share(calls[1:], now=9.0)) == ["slow 1", "first 0"]
    assert names(within_share(calls[2:], now=2.5)) == ["first 0", "first 1"], "nor do they stand aside for each other"


def test_one_that_takes_more_than_the_share_goes_on_alone_and_so_do_those_beside_it() -> None:
    calls = [Call("heavy", 0.09), Call("slow", 0.02, token_at=1.0), Call("quick", 0.0)]
    assert names(within_share(calls, now=0.0)) == ["heavy", "quick"]
    calls[0].token_at = 2.0
    assert names(within_share(calls, now=0.0)) == ["slow", "quick"]


def test_slow_calls_that_fit_a_step_all_take_part() -> None:
    calls = [Call(f"slow {n}", SHARE_S / 4, token_at=n) for n in range(4)]
    assert within_share(calls, now=0.0) == calls


def test_a_call_ends_when_its_tokens_take_too_long_again_and_again() -> None:
    cost = SamplingCost()
    cost.note(MAX_DEBT_S * 0.9)  # the machine was busy with something else
    for _ in range(100):
        cost.note(MAX_DRAW_S * 0.9)
    assert cost.failure() is None
    while (failure := cost.failure()) is None:
        cost.note(MAX_DRAW_S * 1.5)
        assert cost.debt_s < 2 * MAX_DEBT_S
    assert "takes 1" in failure.message
    assert "may take 100 beside other calls" in failure.message
