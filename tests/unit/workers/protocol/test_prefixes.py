from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.support.tools import json_of, tool_of
from workers.protocol.prefixes import (
    BLOCK_BYTES,
    MAX_HEADS,
    MEDIUM_BYTES,
    Prefix,
    chain_of,
    media_ends,
    prefix_after,
    prefix_of,
)
from workers.protocol.requests import AdapterUse, GenerateRequest, Infill, Medium, Message, Thinking, ToolCall

ADAPTERS = {"pirate": "ab" * 32}
dice = random.Random(1)


def text(length: int) -> str:
    return "".join(dice.choices("abc äß€ 🦄\n", k=length))


def message() -> Message:
    role = dice.choice(("user", "assistant", "system", "tool"))
    calls = tuple(ToolCall(text(4), "f", json.dumps({"a": text(9)})) for _ in range(dice.randrange(2)))
    length = dice.choice((0, 10, 100, 1000, 5000))
    return Message(role, text(length), tool_calls=calls if role == "assistant" else ())  # type: ignore[arg-type]


def conversation(most: int = 12) -> GenerateRequest:
    tools = (tool_of("f", text(50), {"type": "object", "properties": {}}),) if dice.random() < 0.3 else ()
    return GenerateRequest(messages=tuple(message() for _ in range(dice.randint(1, most))), tools=tools)


def of(request: GenerateRequest, team: str = "t") -> Prefix:
    return prefix_of(request, team, ADAPTERS)


def is_beginning(one: Prefix, of_other: Prefix) -> bool:
    number = len(one.digests)
    return (one.digests, one.ends) == (of_other.digests[:number], of_other.ends[:number])


def test_a_conversation_that_goes_on_keeps_all_heads() -> None:
    for _ in range(200):
        request = conversation()
        longer = replace(request, messages=(*request.messages, *(message() for _ in range(dice.randint(1, 4)))))
        assert is_beginning(of(request), of(longer))
        assert of(request).num_bytes < of(longer).num_bytes


def test_heads_ascend_and_are_bounded_and_far_from_each_other() -> None:
    for request in (conversation(60), GenerateRequest(prompt=text(700_000)), GenerateRequest(prompt="")):
        prefix = of(request)
        assert list(prefix.ends) == sorted(set(prefix.ends))
        assert len(prefix.digests) == len(prefix.ends) <= MAX_HEADS
        assert len(set(prefix.digests)) == len(prefix.digests)
        assert prefix.ends[-1:] <= (prefix.num_bytes,)
    few = of(GenerateRequest(prompt="a" * 65_536))
    assert few.ends == tuple(range(BLOCK_BYTES, 65_537, BLOCK_BYTES))


def test_a_prompt_of_text_keeps_the_heads_of_its_blocks() -> None:
    prompt = text(10_000)
    whole = of(GenerateRequest(prompt=prompt))
    blocks = [end for end in whole.ends if not end % BLOCK_BYTES]
    longer = of(GenerateRequest(prompt=prompt + text(5000)))
    assert whole.digests[: len(blocks)] == longer.digests[: len(blocks)]


def test_two_conversations_have_heads_in_common_up_to_where_they_part() -> None:
    for _ in range(100):
        request = conversation()
        place = dice.randrange(len(request.messages))
        changed = replace(request.messages[place], content=(request.messages[place].content or "") + "changed")
        other = replace(request, messages=(*request.messages[:place], changed, *request.messages[place + 1 :]))
        before = of(replace(request, messages=request.messages[:place])) if place else Prefix((), (), 0)
        common = [a for a, b in zip(of(request).digests, of(other).digests, strict=False) if a == b]
        assert common[: len(before.digests)] == list(before.digests)
        until = of(replace(request, messages=request.messages[: place + 1])).num_bytes
        assert all(end <= until for end in of(request).ends[: len(common)])


CHANGES: dict[str, Callable[[GenerateRequest], Prefix]] = {
    "the team": lambda request: of(request, "u"),
    "the salt": lambda request: of(replace(request, cache_salt="mine")),
    "an adapter": lambda request: of(replace(request, adapters=(AdapterUse("pirate"),))),
    "its scale": lambda request: of(replace(request, adapters=(AdapterUse("pirate", 0.5),))),
    "its contents": lambda request: prefix_of(
        replace(request, adapters=(AdapterUse("pirate"),)), "t", {"pirate": "cd" * 32}
    ),
    "a tool": lambda request: of(replace(request, tools=(tool_of("g"),))),
    "how much it thinks": lambda request: of(replace(request, thinking=Thinking(effort="high"))),
    "a value of the template": lambda request: of(replace(request, template_values=json_of({"date": "today"}))),
}


def test_what_decides_whose_cache_it_is_changes_every_head() -> None:
    request = GenerateRequest(messages=(Message("user", text(3000)), Message("assistant", text(3000))))
    seen = set(of(request).digests)
    for name, change in CHANGES.items():
        digests = set(change(request).digests)
        assert len(digests) == len(of(request).digests), name
        assert not digests & seen, name
        seen |= digests


def test_adapters_that_are_off_and_the_order_of_others_change_nothing() -> None:
    request = GenerateRequest(messages=(Message("user", text(3000)),))
    assert of(replace(request, adapters=(AdapterUse("pirate", 0.0),))) == of(request)
    both = (AdapterUse("pirate"), AdapterUse("calm"))
    assert of(replace(request, adapters=both)) == of(replace(request, adapters=both[::-1]))


def test_what_clients_send_back_otherwise_changes_nothing() -> None:
    said = Message("assistant", text(500), tool_calls=(ToolCall("1", "f", '{"a": "ü", "b": [1, 2]}'),))
    request = GenerateRequest(messages=(Message("user", text(300)), said, Message("tool", "12 °C", tool_call_id="1")))
    again = Message(
        "assistant",
        f"\n{said.content} ",
        reasoning="Let me think.",
        tool_calls=(ToolCall("call_7", "f", r'{"b":[1,2], "a":"\u00fc"}'),),
    )
    messages = (request.messages[0], again, Message("tool", "12 °C", tool_call_id="call_7"))
    assert of(replace(request, messages=messages)).digests == of(request).digests


@pytest.mark.parametrize("arguments", ["", "{", "[" * 100_000, '{"a": NaN}', '"\\ud800"'])
def test_arguments_may_be_anything(arguments: str) -> None:
    messages = (Message("assistant", text(300), tool_calls=(ToolCall("1", "f", arguments),)),)
    assert of(GenerateRequest(messages=messages)).digests


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("2.2250738585072011e-308", id="a number that takes ten microseconds to read"),
        pytest.param("[]", id="a list"),
        pytest.param('{"a":1}', id="an object"),
    ],
)
def test_arguments_cost_little_however_they_are_made(value: str) -> None:
    """2,600 such numbers took 28 ms of the event loop, for each answer; reading 60 KB of anything else takes less."""
    arguments = f"[{','.join([value] * (60_000 // (len(value) + 1)))}]"
    plain = ToolCall("a", "add", f'{{"text":"{"x" * 60_000}"}}')
    costs = []
    for call in (plain, ToolCall("a", "add", arguments)):
        request = GenerateRequest(messages=(Message("assistant", None, tool_calls=(call,)),))
        began = time.process_time()
        for _ in range(20):
            prefix_of(request, "team", {})
        costs.append((time.process_time() - began) / 20)
    assert costs[1] < costs[0] + 0.008, costs


def test_the_answer_that_a_worker_adds_is_what_the_next_turn_begins_with() -> None:
    for _ in range(100):
        request, answer = conversation(), text(dice.choice((0, 50, 3000)))
        calls = (ToolCall("", "f", '{"x": 1}'),) if dice.random() < 0.3 else ()
        chain = chain_of(request, "t", ADAPTERS)
        assert chain.ended() == of(request)
        next_turn = replace(request, messages=(*request.messages, Message("assistant", answer, tool_calls=calls)))
        assert prefix_after(chain, request, answer, calls) == of(next_turn)


def test_the_answer_to_a_text_is_more_of_it() -> None:
    request, answer = GenerateRequest(prompt=text(2500)), text(4000)
    longer = GenerateRequest(prompt=f"{request.prompt}{answer}")
    assert prefix_after(chain_of(request, "t", {}), request, answer, ()) == of(longer)
    assert prefix_after(chain_of(longer, "t", {}), longer, "", ()) == of(longer)


def test_a_gap_that_is_filled_stays_what_it_was() -> None:
    request = GenerateRequest(infill=Infill(text(2000), text(2000)))
    assert prefix_after(chain_of(request, "t", {}), request, "filled", ()) == of(request)
    moved = GenerateRequest(infill=Infill(request.infill.prefix + "more", "else"))  # type: ignore[union-attr]
    assert of(moved).digests[0] == of(request).digests[0]


def test_a_medium_is_covered_by_heads_behind_its_name() -> None:
    """Two requests with other pictures share the heads before the picture's end, and none after it."""
    text = "x" * 3000
    one, other = (Medium("picture", b"", sha256=bytes([number]) * 32) for number in (1, 2))
    asked = [
        GenerateRequest(messages=(Message("user", text), Message("user", text, media=(1500,))), media=(medium,))
        for medium in (one, other)
    ]
    [end], [same] = map(media_ends, asked)
    first, second = (prefix_of(request, "team", {}) for request in asked)
    assert end == same
    assert all((a == b) == (at < end) for a, b, at in zip(first.digests, second.digests, first.ends, strict=True))
    assert first.ends[0] < end < first.ends[-1]
    assert media_ends(GenerateRequest(prompt="abc", prompt_media=(1, 2), media=(one, other)))[1] > MEDIUM_BYTES
