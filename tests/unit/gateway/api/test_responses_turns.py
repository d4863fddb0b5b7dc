"""Which turns of a conversation are dropped where it is too long."""

from __future__ import annotations

import random

import pytest

from gateway.api.responses.create import MAX_RENDERS, turns_of, turns_to_drop, without
from workers.protocol.requests import GenerateRequest, Medium, Message, ToolCall


def test_results_stay_with_their_calls_and_rules_stay() -> None:
    rules, late = Message(role="system", content="rules"), Message(role="developer", content="more")
    hello = Message(role="assistant", content="hello")
    ask = Message(role="user", content="a")
    call = Message(role="assistant", tool_calls=(ToolCall("c", "f", "{}"),))
    result = Message(role="tool", content="1", tool_call_id="c")
    last = Message(role="user", content="b")
    request = GenerateRequest(messages=(rules, hello, ask, call, late, result, last))
    turns = turns_of(request.messages)
    assert turns == [(hello,), (ask, call, result), (last,)]
    assert without(request, turns, 0) == request
    assert without(request, turns, 1).messages == (rules, ask, call, late, result, last)
    assert without(request, turns, 2).messages == (rules, late, last)


def test_pictures_go_with_their_turns() -> None:
    first, second, third = (Medium("picture", bytes([number])) for number in range(3))
    rules = Message(role="system", content="rules")
    ask = Message(role="user", content="a", media=(0, 1))
    result = Message(role="tool", content="", tool_call_id="c", media=(0,))
    last = Message(role="user", content="b")
    request = GenerateRequest(messages=(rules, ask, last, result), media=(first, second, third))
    shorter = without(request, turns_of(request.messages), 1)
    assert (shorter.messages, shorter.media) == ((rules, last, result), (third,))
    assert without(request, turns_of(request.messages), 0) == request


class Counter:
    """Tokens of turns, and how often they were counted."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.calls = 0

    async def __call__(self, number: int) -> int:
        self.calls += 1
        return sum(self.tokens[number:]) + 7

    def needed(self, room: int) -> int:
        fits = [number for number in range(len(self.tokens)) if sum(self.tokens[number:]) + 7 <= room]
        return min(fits, default=max(0, len(self.tokens) - 1))


@pytest.mark.parametrize("seed", range(8))
async def test_few_renders_find_what_fits(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(20, 4000) for _ in range(3000)]
    tokens = [round(size / chance.uniform(2.5, 5.0)) + 4 for size in sizes]
    count, room = Counter(tokens), sum(tokens) // chance.randint(2, 50)
    dropped = await turns_to_drop(sizes, room, count)
    assert count.calls <= MAX_RENDERS, "a search by halves takes thirteen"
    assert sum(tokens[dropped:]) + 7 <= room
    assert dropped - count.needed(room) <= 30, "a hundredth of the conversation at most is dropped in vain"


async def test_all_lengths_of_short_conversations() -> None:
    for length in range(1, 12):
        tokens = [10] * length
        for room in range(5, 150, 10):
            count = Counter(tokens)
            assert await turns_to_drop([40] * length, room, count) == count.needed(room)
            assert count.calls <= MAX_RENDERS


async def test_bytes_that_mislead_drop_more_than_had_to_be() -> None:
    """One turn has nearly all tokens in few bytes."""
    tokens = [1] * 2000 + [100_000] + [1] * 2000
    count = Counter(tokens)
    dropped = await turns_to_drop([100] * len(tokens), 4000, count)
    assert count.calls <= MAX_RENDERS
    assert 2001 <= dropped <= 4000
