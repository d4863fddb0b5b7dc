"""What the engine's benchmark makes of what it sees: rates, gaps, prompts, verdicts."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, ArgumentTypeError
from itertools import pairwise

import pytest

from benchmarks import engine
from benchmarks.engine.calls import Answer, Samples, Unmeasured, decode_rate, total_s, ttft_p50_s
from benchmarks.engine.long_prompt import DEFAULTS, Figures, against_best, judge
from benchmarks.engine.prompts import LEAST_TOKEN, MOST_TOKEN, Conversation, tokens


def answer(sent: float, *arrivals: float, counts: tuple[int, ...] = ()) -> Answer:
    one = Answer(sent=sent, ended=arrivals[-1] if arrivals else sent)
    for at, count in zip(arrivals, counts or (1,) * len(arrivals), strict=True):
        one.note(at, count)
    return one


def figures(gap_s: float, ttft_s: float) -> Figures:
    return Figures(Samples([gap_s]), Samples([ttft_s]))


def test_the_rate_of_one_answer_leaves_its_prompt_out() -> None:
    assert decode_rate([answer(0, 5, 6, 7, 8)]) == pytest.approx(1.0)


def test_the_rate_counts_only_while_all_decode() -> None:
    early = answer(0, *range(1, 11))
    late = answer(0, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10)
    alone = answer(0, *(6 + 0.1 * step for step in range(60)))
    assert decode_rate([early, late]) == pytest.approx(1.0 + 2.0)
    assert decode_rate([early, late, alone]) == pytest.approx(1.0 + 2.0 + 10.0)


def test_the_rate_does_not_depend_on_who_comes_first_in_a_step() -> None:
    steps = range(20)
    before = [answer(0, *(step + 0.01 * place for step in steps)) for place in range(4)]
    after = [answer(0, *(step - 0.01 * place for step in steps)) for place in range(4)]
    assert decode_rate(before) == pytest.approx(4.0)
    assert decode_rate(after) == pytest.approx(4.0)


def test_pieces_of_several_tokens_count_as_such() -> None:
    assert decode_rate([answer(0, 1, 2, 4, counts=(1, 1, 4))]) == pytest.approx(5 / 3)


def test_answers_that_do_not_overlap_have_no_rate() -> None:
    with pytest.raises(Unmeasured, match="overlap"):
        decode_rate([answer(0, 1, 2, 3), answer(0, 3.5, 4, 5)])


def test_an_answer_without_a_token_is_no_figure() -> None:
    with pytest.raises(Unmeasured):
        ttft_p50_s([answer(0, 1), answer(0)])
    with pytest.raises(Unmeasured):
        decode_rate([answer(0)])


def test_gaps_are_those_that_touch_the_time_asked_for() -> None:
    one = answer(0, 1, 2, 6, 7, 9)
    assert one.gaps_s(3, 5) == [4]
    assert one.gaps_s(1.5, 6.5) == [1, 4, 1]
    assert one.gaps_s(20, 30) == []


def test_totals_run_from_the_first_call_to_the_last_end() -> None:
    assert total_s([answer(3, 4, 5), answer(1, 2, 3), answer(2, 3, 9)]) == 8


async def test_waiting_for_pieces_ends_when_they_are_there() -> None:
    one = answer(0, 1)
    waiting = asyncio.create_task(one.said(3))
    await asyncio.sleep(0)
    one.note(2, 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    one.note(3, 1)
    await waiting


def test_samples_show_their_spread() -> None:
    samples = Samples([1.0])
    assert samples.text(1) == "1.0"
    samples.add(3.0)
    samples.add(2.0)
    assert samples.median == 2.0
    assert samples.text(1) == "2.0 (1.0-3.0)"
    assert samples.text(0, 1000) == "2,000 (1,000-3,000)"


def test_a_label_always_draws_the_same_tokens() -> None:
    assert tokens("a", 50) == tokens("a", 50)
    assert tokens("a", 50)[:20] == tokens("a", 20)
    assert tokens("a", 50)[0] != tokens("b", 50)[0]
    assert all(LEAST_TOKEN <= token < MOST_TOKEN for token in tokens("c", 1000))


def test_a_conversation_grows_at_its_end_only() -> None:
    conversation = Conversation("x", first=30, reply=4, question=6)
    turns = [conversation.prompt(turn) for turn in range(4)]
    assert [len(prompt) for prompt in turns] == [30, 40, 50, 60]
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
    assert Conversation("y", 30, 4, 6).prompt(0)[0] != turns[0][0]


def test_the_best_setting_is_the_shortest_gap_among_those_that_wait_no_longer() -> None:
    sides = {
        DEFAULTS: figures(6.0, 10.0),
        "Paddock": figures(1.0, 12.0),
        "llama-server -b 64 -ub 64": figures(0.5, 20.0),
        "llama-server -b 256 -ub 256": figures(2.0, 12.0),
    }
    row = against_best("case", sides)
    assert "-b 256" in row.figure
    assert row.ratio == "0.50 x"
    assert row.reached
    sides["llama-server -b 256 -ub 256"] = figures(0.9, 12.5)
    assert not against_best("case", sides).reached
    sides["llama-server -b 256 -ub 256"] = figures(0.9, 12.7)
    assert against_best("case", sides).reached
    assert "waits longer" in against_best("case", {"Paddock": figures(1, 5), DEFAULTS: figures(6, 10)}).figure


def test_the_verdict_on_a_long_prompt_holds_gap_and_wait_against_their_bars() -> None:
    def verdicts(gap_s: float, ttft_s: float) -> list[bool]:
        rows = judge("case", {DEFAULTS: figures(5.0, 10.0), "Paddock": figures(gap_s, ttft_s)})
        return [row.reached for row in rows[:3]]

    assert verdicts(1.0, 15.0) == [True, True, True]
    assert verdicts(1.1, 15.0) == [False, True, True]
    assert verdicts(1.0, 15.1) == [True, False, True]
    assert verdicts(5.2, 10.0) == [False, True, True]
    assert verdicts(5.3, 10.0) == [False, True, False]


def test_parts_are_chosen_by_name() -> None:
    parser = ArgumentParser()
    engine.add_arguments(parser)
    wish = engine.wish(parser.parse_args(["--only", "decode,burst", "--quick", "--rounds", "5"]))
    assert wish.parts == ("decode", "burst")
    assert wish.quick
    assert wish.rounds == 5
    assert engine.wish(parser.parse_args([])).parts == tuple(engine.PARTS)
    with pytest.raises(ArgumentTypeError, match="sharing"):
        engine.parts("decode,sharing")
