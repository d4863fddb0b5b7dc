"""Which of several models takes a conversation."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from gateway.catalog.conversations import conversation_of, rank_targets
from workers.models.catalog import Target
from workers.protocol.requests import GenerateRequest, Infill, InfillFile, Message

NINE_TO_ONE = (Target(model="big", weight=9), Target(model="next", weight=1))
SYSTEM = Message("system", "You are the help desk of Example Ltd. " * 100)


def firsts(targets: tuple[Target, ...], number: int = 20_000) -> Counter[str]:
    return Counter(rank_targets(targets, f"conversation {i}")[0] for i in range(number))


@pytest.mark.parametrize(
    "weights",
    [{"a": 9.0, "b": 1.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 99.0, "b": 1.0}, {"a": 0.2, "b": 0.3, "c": 0.5}],
)
def test_models_get_their_share(weights: dict[str, float]) -> None:
    found = firsts(tuple(Target(model=name, weight=weight) for name, weight in weights.items()))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        deviation = (share * (1 - share) / 20_000) ** 0.5
        assert found[name] / 20_000 == pytest.approx(share, abs=4 * deviation)


def test_without_weight_there_is_no_share_and_no_place_in_the_order() -> None:
    targets = (Target(model="big"), Target(model="off", weight=0))
    assert firsts(targets, 100) == {"big": 100}
    assert rank_targets(targets, "any") == rank_targets(targets, "") == ("big",)


def test_nobodys_conversation_goes_to_the_heaviest() -> None:
    assert rank_targets(NINE_TO_ONE[::-1], "") == ("big", "next")
    assert rank_targets((Target(model="b"), Target(model="a")), "") == ("b", "a")


def test_a_changed_weight_moves_only_whom_it_must() -> None:
    before, after = NINE_TO_ONE, (Target(model="big", weight=9), Target(model="next", weight=2))
    moved = Counter(
        (was, now)
        for i in range(5000)
        if (was := rank_targets(before, str(i))[0]) != (now := rank_targets(after, str(i))[0])
    )
    assert set(moved) == {("big", "next")}
    assert moved.total() / 5000 == pytest.approx(2 / 11 - 1 / 10, abs=0.02)


def test_a_model_that_goes_leaves_the_others_conversations_where_they_are() -> None:
    three = tuple(Target(model=name) for name in "abc")
    for i in range(200):
        order = rank_targets(three, str(i))
        assert rank_targets([target for target in three if target.model != order[0]], str(i)) == order[1:]


def chat(*messages: Message, **more: object) -> GenerateRequest:
    return GenerateRequest(messages=messages, **more)  # type: ignore[arg-type]  # fields of the request by their names


def test_turns_of_one_conversation_are_one() -> None:
    first = chat(SYSTEM, Message("user", "How are you?"))
    later = chat(
        *(SYSTEM, Message("user", "How are you?"), Message("assistant", "Fine."), Message("user", "Why?")), max_tokens=7
    )
    assert conversation_of(first, "red", "") == conversation_of(later, "red", "")


def test_one_system_prompt_is_not_one_conversation() -> None:
    spoken = {conversation_of(chat(SYSTEM, Message("user", f"Question {i}")), "red", "") for i in range(100)}
    assert len(spoken) == 100
    assert Counter(rank_targets(NINE_TO_ONE, conversation)[0] for conversation in spoken)["next"] in range(2, 25)


def test_teams_and_sessions_are_kept_apart() -> None:
    asked = chat(Message("user", "Hi"))
    other = chat(Message("user", "Something else"))
    assert conversation_of(asked, "red", "") != conversation_of(asked, "blue", "")
    assert conversation_of(asked, "red", "s1") == conversation_of(other, "red", "s1")
    assert conversation_of(asked, "red", "s1") != conversation_of(asked, "red", "s2")
    assert conversation_of(asked, "red", "s1") != conversation_of(asked, "blue", "s1")


def test_prompts_are_known_by_their_whole_and_code_by_its_place() -> None:
    assert conversation_of(GenerateRequest(prompt="Say a"), "t", "") != conversation_of(
        GenerateRequest(prompt="Say b"), "t", ""
    )
    assert conversation_of(GenerateRequest(prompt=(1, "a", 2)), "t", "") != conversation_of(
        GenerateRequest(prompt=(1, "a", 3)), "t", ""
    )
    head = "import os\n" * 200
    typed = [
        GenerateRequest(infill=Infill(prefix=head + "x" * n, suffix="y" * n, files=(InfillFile("a.py", "z" * n),)))
        for n in (1, 5)
    ]
    elsewhere = GenerateRequest(infill=Infill(prefix="def f", suffix=""))
    assert conversation_of(typed[0], "t", "") == conversation_of(typed[1], "t", "")
    assert conversation_of(typed[0], "t", "") != conversation_of(elsewhere, "t", "")


@pytest.mark.serial
@pytest.mark.parametrize(
    "asked",
    [
        GenerateRequest(prompt=(12345,) * 1_000_000),
        GenerateRequest(prompt=("word",) * 200_000),
        GenerateRequest(prompt="word " * (8 << 18)),
        GenerateRequest(messages=(Message("system", "word " * 200),) * 8_000),
    ],
    ids=["tokens", "texts", "text", "messages"],
)
def test_a_long_opening_is_known_by_its_ends(asked: GenerateRequest) -> None:
    """A million tokens held the event loop for 0.4 s, 8 MiB of text for 10 to 20 ms."""
    took_s = []
    for _ in range(5):
        began = time.thread_time()
        conversation_of(asked, "red", "")
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.01


def test_long_prompts_that_begin_or_end_otherwise_are_others() -> None:
    tokens, text = (1,) * 100_000, "word " * 100_000
    prompts = (tokens, (2, *tokens[1:]), (*tokens[1:], 2), tokens[1:], text, f"x{text[1:]}", f"{text[1:]}x", text[1:])
    assert len({conversation_of(GenerateRequest(prompt=prompt), "t", "") for prompt in prompts}) == len(prompts)
