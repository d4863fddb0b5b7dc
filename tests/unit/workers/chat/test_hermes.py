"""The Hermes parser: whatever the cut, the same calls; whatever the text, nothing lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.chat.reading import parser_of, read, tool
from workers.chat.tools import CallPiece, ContentPiece, Parser
from workers.chat.tools.family import Ask
from workers.chat.tools.json_calls import HERMES

Outcome = tuple[str, list[tuple[str, str]]]
"""The answer's text, and each call's name and arguments."""

ASK = Ask(tools=(tool("get_weather"),))


def new_parser() -> Parser:
    return parser_of(HERMES, ASK)


def parse(portions: Iterable[str], *, cut_off: bool = False) -> Outcome:
    outcome = read(new_parser(), portions, cut_off=cut_off)
    return outcome.content, list(outcome.calls)


def tag(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


START = '<tool_call>{"name": "f", "arguments": {"a": '
ONE = '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", [])),
        ("Hello <b>there</b>", ("Hello <b>there</b>", [])),
        (tag(ONE), ("", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        (tag("\n" + ONE + "\n"), ("", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        ("Let me see. " + tag(ONE) + "\n", ("Let me see. ", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        (tag(ONE) + " and then", (" and then", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        (
            tag('{"name": "a", "arguments": {}}') + "\n" + tag('{"name": "b", "arguments": {"x": "}</tool_call>"}}'),
            ("", [("a", "{}"), ("b", '{"x": "}</tool_call>"}')]),
        ),
        (tag('{"arguments": {"x": {"y": 1}}, "name": "late"}'), ("", [("late", '{"x": {"y": 1}}')])),
        (tag('{"name": "now"}'), ("", [("now", "{}")])),
        (tag('{"name": "q\\"u\\u00e4", "arguments": {"s": "a\\\\"}}'), ("", [('q"uä', '{"s": "a\\\\"}')])),
        # Ended within a call: before the arguments it is text, after it a call, which is made whole.
        ('<tool_call>{"name": "get', ('<tool_call>{"name": "get', [])),
        ('<tool_call>{"name": "f", "arguments": {"a": "b', ("", [("f", '{"a": "b"}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": "b\\', ("", [("f", '{"a": "b\\\\"}')])),
        ('<tool_call>{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', ("</tool", [("f", "{}")])),
        # Not calls at all.
        (tag("not json"), (tag("not json"), [])),
        (tag('{"name": 3, "arguments": {}}'), (tag('{"name": 3, "arguments": {}}'), [])),
        (tag('{"name": "f", "arguments": "text"}'), (tag('{"name": "f", "arguments": "text"}'), [])),
        (tag('{"arguments": {}}'), (tag('{"arguments": {}}'), [])),
        (tag('{"name": ""}'), (tag('{"name": ""}'), [])),
        (tag('{"name": "\\ud800"}'), (tag('{"name": "\\ud800"}'), [])),
        ("<tool_call>" + tag(ONE), ("<tool_call>", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        # A call goes wrong after it has begun: what was read stays a call, and is made whole.
        (tag('{"name": "f", "arguments": {"a": '), ("", [("f", '{"a":null}')])),
        (tag('{"name": "f", "arguments": {}, "id": 1}'), ("", [("f", "{}")])),
    ],
)
def test_what_becomes_of_a_text(text: str, expected: Outcome) -> None:
    assert parse([text]) == expected
    assert parse(text) == expected, "one character at a time"


@pytest.mark.parametrize("name_first", [True, False])
@pytest.mark.parametrize(
    ("half", "expected"), [(r"\ud800", r"\ud800"), (r"x\udc00", r"x\udc00"), (r"\ud83d\ude00", "\U0001f600")]
)
def test_half_a_surrogate_pair_stays_an_escape(half: str, expected: str, name_first: bool) -> None:
    members = ['"name": "f"', r'"arguments": "{\"a\": \"' + half + r'\"}"']
    text = tag("{" + ", ".join(members if name_first else members[::-1]) + "}")
    for portions in ([text], text):
        content, calls = parse(portions)
        assert (content, calls) == ("", [("f", '{"a": "' + expected + '"}')])
        calls[0][1].encode()


def test_half_a_surrogate_pair_that_is_cut_off_stays_an_escape() -> None:
    text = r'<tool_call>{"name": "send", "arguments": "{\"a\": \"\ud800'
    for portions in ([text], text):
        assert parse(portions, cut_off=True) == ("", [("send", r'{"a": "\ud800')])


@pytest.mark.parametrize("rest", ['"b', '"b\\', "[1, 2", "tr", "1.", '"b",'])
def test_what_the_token_limit_cuts_off_stays_cut_off(rest: str) -> None:
    for portions in ([START + rest], START + rest):
        content, [(_, arguments)] = parse(portions, cut_off=True)
        assert (content, arguments.replace(" ", "")) == ("", ('{"a":' + rest).replace(" ", ""))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "get_weather", "arguments": ', ("", [("get_weather", "")])),
        ('<tool_call>{"name": "get_weather", "argu', ("", [("get_weather", "")])),
        # A name that came in part is the tool's that alone begins so; else it is told as far as it came.
        ('<tool_call>{"name": "get_wea', ("", [("get_weather", "")])),
        ('<tool_call>{"name": "send', ("", [("send", "")])),
        ('<tool_call>{"name": "send", "argu', ("", [("send", "")])),
        ('<tool_call>{"na', ("", [("get_weather", "")])),
        ("Hm. <tool_call>", ("Hm. ", [("get_weather", "")])),
        ("Hm. <tool_c", ("Hm. ", [("get_weather", "")])),
        ('<tool_call>{"arguments": {"city": "Paris"}, "na', ("", [("get_weather", '{"city": "Paris"}')])),
        (
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Pa',
            ("", [("get_weather", '{"city": "Pa')]),
        ),
        (
            tag(ONE) + '\n<tool_call>{"name": "ge',
            ("", [("get_weather", '{"city": "Paris", "days": [1, 2]}'), ("get_weather", "")]),
        ),
        (tag(ONE) + "\n<tool_call>", ("", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        (tag(ONE)[:-3], ("", [("get_weather", '{"city": "Paris", "days": [1, 2]}')])),
        # It may have become anything.
        ("a < b and <t", ("a < b and <t", [])),
        ('{"name": "get_wea', ('{"name": "get_wea', [])),
        ('{"name": "get_weather", "argu', ("", [("get_weather", "")])),
        (tag("not json") + " and", (tag("not json") + " and", [])),
    ],
)
def test_what_the_token_limit_leaves_of_a_call(text: str, expected: Outcome) -> None:
    for portions in ([text], text):
        assert parse(portions, cut_off=True) == expected


def test_an_answer_that_must_call_has_no_text() -> None:
    ask = Ask(tools=(tool("get_weather"), tool("get_time")), forced=("get_time",))
    for text in ("<", "<tool_call>", '{"na', '{"name": "get_', '<tool_call>{"name": "get_'):
        outcome = read(parser_of(HERMES, ask), [text], cut_off=True)
        assert (outcome.content, outcome.calls) == ("", (("get_time", ""),)), text


def test_arguments_leave_as_they_grow() -> None:
    parser = new_parser()
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    [begun] = parser.feed('ments": {"a": "b')
    assert isinstance(begun, CallPiece)
    assert (begun.number, begun.name, begun.arguments) == (0, "f", '{"a": "b')
    assert parser.feed("c") == [CallPiece(0, "", "", "c")]


def test_text_leaves_at_once_except_what_may_begin_a_tag() -> None:
    parser = new_parser()
    assert parser.feed("a < b")[0] == ("a < b",)
    assert parser.feed(" <tool") == [(" ",)]
    assert parser.feed("box>") == [("<toolbox>",)]


def test_a_name_without_end_is_text_and_held_back_only_so_long() -> None:
    parser = new_parser()
    text = '<tool_call>{"name": "' + "x" * 600
    assert "".join(piece.text for piece in parser.feed(text) if not isinstance(piece, CallPiece)) == text


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "f"',
        ', "arguments": ',
        "{}",
        '{"a": "b"}',
        "}",
        '"',
        "\\",
        "\n",
        *("{", "[", "]", ", ", '"name"', '"arguments"', ":", "text ", "<", tag(ONE)),
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=14).map("".join)


@given(TEXTS, st.data())
def test_the_cut_does_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    portions = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse([text])
    assert parse(portions) == whole
    assert parse(text) == whole


@given(TEXTS)
def test_nothing_is_lost(text: str) -> None:
    content, calls = parse([text])
    if not calls:
        assert content == text
    rest = text
    for arguments in (arguments for _, arguments in calls if arguments != "{}"):
        assert arguments in rest
        rest = rest.replace(arguments, "", 1)
    # What is left of the text is content and the syntax of the calls, in order.
    position = 0
    for character in content:
        position = text.find(character, position) + 1
        assert position, f"{content!r} is not in order in {text!r}"


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=10), JSON_OBJECTS), min_size=1, max_size=4), st.booleans())
def test_every_well_formed_call_is_found(wanted: list[tuple[str, dict[str, object]]], ascii_only: bool) -> None:
    text = "\n".join(
        tag(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)) for name, arguments in wanted
    )
    content, calls = parse(text)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


@pytest.mark.parametrize("begun", ["", START, "<tool_call>", START + '"b"'])
def test_whitespace_without_end_costs_no_more_with_each_token(begun: str) -> None:
    """All of it was looked at with every token: 21 ms each after 4 MiB, on the loop of every other call."""
    parser, said = new_parser(), 0
    parser.feed(begun)
    start = time.thread_time()
    for _ in range(20_000):
        said += sum(len(piece.text) for piece in parser.feed(" " * 128) if isinstance(piece, ContentPiece))
    assert time.thread_time() - start < 2
    assert said == (2_560_000 if not begun else said)


def test_an_answer_that_begins_with_much_whitespace_may_still_call() -> None:
    blank = "\n" * 10_000
    content, calls = parse([*blank, tag(ONE)])
    assert content.strip() == ""
    assert [name for name, _ in calls] == ["get_weather"]
