from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.support.tools import tool_of
from workers.chat.tools import CallPiece, ContentPiece, ReasoningPiece
from workers.engine.cache.report import Found
from workers.protocol.events import Usage
from workers.protocol.prefixes import chain_of, prefix_of
from workers.protocol.requests import GenerateRequest, Message, ToolCall
from workers.service.registration.prefix_adverts import CallAdverts, PrefixAdverts

BYTES_PER_TOKEN = 4


class Lookups:
    """What an engine would have found."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.forgotten: set[int] = set()

    def take(self) -> list[Found]:
        found, self.found = self.found, []
        return found

    def forget(self, keys: Iterable[int]) -> None:
        self.forgotten.update(keys)


class Bench:
    def __init__(self, max_heads: int = 1000) -> None:
        self.lookups = Lookups()
        self.book = PrefixAdverts(self.lookups, max_heads)
        self.seen: dict[int, int] = {}
        """Told so far, as a gateway would put it together."""

    def call(self, key: int, request: GenerateRequest, team: str = "t") -> CallAdverts:
        num_tokens = prefix_of(request, team, {}).num_bytes // BYTES_PER_TOKEN
        heads = CallAdverts(self.book, key, request, chain_of(request, team, {}), num_tokens)
        heads.started()
        return heads

    def finish(self, heads: CallAdverts, num_prompt: int, num_answer: int) -> None:
        heads.finished(Usage(num_prompt, num_answer, 0))

    def take(self) -> None:
        added, dropped = self.book.take()
        assert not set(dropped) - set(self.seen)
        self.seen.update(added)
        for head in dropped:
            del self.seen[head]
        assert self.seen == self.book.published
        self.book.check_integrity()

    def known(self, request: GenerateRequest, team: str = "t") -> int:
        self.take()
        digests = prefix_of(request, team, {}).digests
        return next((self.seen[head] for head in reversed(digests) if head in self.seen), 0)


def about(tokens: int) -> object:
    """Roles and separators are bytes, too."""
    return pytest.approx(tokens, rel=0.03)


def text(number: int, length: int) -> str:
    return "".join(random.Random(number).choices("abcdefgh ij\n", k=length))


def chat(*contents: str, **more: object) -> GenerateRequest:
    roles = ("user", "assistant")
    return GenerateRequest(
        messages=tuple(Message(roles[n % 2], content) for n, content in enumerate(contents)),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def test_a_prompt_counts_from_its_beginning_on_and_its_answer_from_its_end() -> None:
    bench = Bench()
    first = chat(text(1, 5000))
    heads = bench.call(1, first)
    assert bench.known(first) == about(1250)
    heads.add(ContentPiece(text(2, 300)))
    bench.finish(heads, 1250, 90)
    assert bench.known(chat(text(1, 5000), text(2, 300), "And then?")) == about(1340)
    # What it has in common with another ends at a block's end.
    assert bench.known(chat(text(1, 2500) + text(3, 2500))) == about(512)


def test_turns_before_fix_the_places_of_heads() -> None:
    """The first turn's tokens are shorter than the second's: what is known of it is kept, and not reckoned anew."""
    bench = Bench()
    first = chat(text(1, 4000))
    heads = CallAdverts(bench.book, 1, first, chain_of(first, "t", {}), 2000)
    heads.started()
    heads.add(ContentPiece(text(2, 400)))
    bench.finish(heads, 2000, 200)
    second = chat(text(1, 4000), text(2, 400), text(3, 4000))
    CallAdverts(bench.book, 2, second, chain_of(second, "t", {}), 2700).started()
    assert bench.known(chat(text(1, 4000), text(2, 400), text(9, 500))) == about(2200)
    assert bench.known(second) == about(2700)


def test_what_the_engine_has_lost_is_dropped() -> None:
    bench = Bench()
    request = chat(text(1, 8000))
    heads = bench.call(1, request)
    bench.finish(heads, 2000, 0)
    bench.take()
    bench.lookups.found = [Found(1, 1000)]
    assert bench.known(request) == about(1000)
    assert max(bench.seen.values()) == about(1000)
    bench.lookups.found = [Found(1, 0)]
    assert bench.known(request) == 0
    assert not bench.seen
    bench.call(2, request)
    assert bench.known(request) == about(2000)


def test_memory_that_can_be_taken_up_only_at_some_places_tells_only_those() -> None:
    bench = Bench()
    request = chat(text(1, 8000), text(2, 400), text(3, 4000))
    heads = bench.call(1, request)
    bench.finish(heads, 3100, 0)
    bench.lookups.found = [Found(1, 3100, (2100, 3100))]
    assert bench.known(request) == about(3100)
    assert bench.known(chat(text(1, 8000), text(2, 400), "else")) == about(2100)
    assert bench.known(chat(text(1, 8000))) == 0


def test_what_a_younger_conversation_shares_stays_when_the_older_one_is_gone() -> None:
    bench = Bench()
    system = text(1, 4000)
    old, young = chat(system, "Yes.", text(2, 4000)), chat(system, "Yes.", text(3, 4000))
    bench.finish(bench.call(1, old), 2000, 0)
    bench.finish(bench.call(2, young), 2000, 0)
    bench.lookups.found = [Found(1, 1000)]
    assert bench.known(old) == about(1000)
    assert bench.known(young) == about(2000)
    bench.lookups.found = [Found(1, 0)]
    assert bench.known(young) == about(2000)


def test_a_conversation_that_nobody_asks_for_any_more_is_not_looked_up_any_more() -> None:
    bench = Bench()
    bench.finish(bench.call(1, chat(text(1, 2000))), 500, 0)
    bench.finish(bench.call(2, chat(text(1, 2000), "Yes.", text(2, 2000))), 1000, 0)
    bench.take()
    bench.finish(bench.call(3, chat(text(1, 2000), "Yes.", text(2, 2000), "No.", "Why?")), 1002, 0)
    assert bench.lookups.forgotten >= {2}
    bench.lookups.found = [Found(99, 500)]
    bench.take()
    assert 99 in bench.lookups.forgotten


def test_those_used_longest_ago_make_room_the_deepest_first() -> None:
    bench = Bench(max_heads=20)
    first = chat(text(1, 10_000))
    bench.call(1, first)
    assert bench.known(first) == about(2500)
    bench.call(2, chat(text(2, 15_000)))
    assert bench.known(chat(text(2, 15_000))) == about(3750)
    assert 0 < bench.known(first) < 2500
    bench.call(3, chat(text(3, 30_000)))
    bench.take()
    assert len(bench.seen) == 20
    assert bench.known(first) == 0


def test_thoughts_are_not_part_of_what_the_next_turn_finds() -> None:
    bench = Bench()
    heads = bench.call(1, chat(text(1, 1000)))
    heads.add(ReasoningPiece("Hm. " * 500))
    heads.add(ContentPiece(text(2, 400)))
    bench.finish(heads, 250, 700)
    assert bench.known(chat(text(1, 1000), text(2, 400), "More!")) == about(250)


def test_tool_calls_come_back_as_the_worker_told_them() -> None:
    bench = Bench()
    tools = (tool_of("look", "Look it up " * 20, {"type": "object"}),)
    request = chat(text(1, 1000), tools=tools)
    heads = bench.call(1, request)
    heads.add(ContentPiece(text(2, 200)))
    for piece in (
        CallPiece(0, "id", "look", '{"at": '),
        CallPiece(0, "", "", '"gate"}'),
        CallPiece(1, "2", "look", ""),
    ):
        heads.add(piece)
    before = bench.known(request)
    bench.finish(heads, before, 100)
    from_gateway = heads_request(request, text(2, 200))
    assert bench.known(from_gateway) == before + 100


def heads_request(request: GenerateRequest, answer: str) -> GenerateRequest:
    """The next turn, from a client that keeps what it got."""
    calls = (ToolCall("x", "look", '{"at":"gate"}'), ToolCall("y", "look", "{}"))
    messages = (*request.messages, Message("assistant", f"\n{answer} ", tool_calls=calls), Message("tool", "grass"))
    return GenerateRequest(messages=messages, tools=request.tools)


def test_a_prompt_of_text_goes_on_with_its_answer() -> None:
    bench = Bench()
    request = GenerateRequest(prompt=text(1, 5000))
    heads = bench.call(1, request)
    heads.add(ContentPiece(text(2, 2000)))
    heads.add(ContentPiece(text(3, 2000)))
    bench.finish(heads, 1250, 1000)
    longer = GenerateRequest(prompt=text(1, 5000) + text(2, 2000) + text(3, 2000) + text(4, 100))
    assert bench.known(longer) == pytest.approx(2250, rel=0.12)
    assert bench.known(request) == pytest.approx(1250, rel=0.01)


def test_a_book_under_random_calls_never_contradicts_itself() -> None:
    dice = random.Random(7)
    bench = Bench(max_heads=60)
    for key in range(1, 400):
        contents = [text(dice.randrange(4), 1500), *(text(dice.randrange(3), 300) for _ in range(dice.randrange(8)))]
        heads = bench.call(key, chat(*contents), dice.choice("ab"))
        if dice.random() < 0.7:
            heads.add(ContentPiece(text(dice.randrange(3), 300)))
            bench.finish(heads, 100, 50)
        bench.book.check_integrity()
        for _ in range(dice.randrange(3)):
            stops = tuple(sorted(dice.sample(range(1, 500), 3))) if dice.random() < 0.3 else None
            bench.lookups.found.append(Found(dice.randrange(max(1, key - 20), key + 1), dice.randrange(600), stops))
        bench.take()
