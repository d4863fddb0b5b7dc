"""Every family: recorded answers, every cut of them, and what holds for any text at all."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.chat.reading import Outcome, cuts, family, parser_of, read, read_every_way, tool
from workers.chat.answers import FAMILIES
from workers.chat.tools import CallPiece
from workers.chat.tools.family import Ask, Family
from workers.chat.tools.reader import MIN_MARK_CHARS, Reader
from workers.protocol.requests import Tool

RECORDED = Path(__file__).parent / "recorded"
NAMES = sorted(one.name for one in FAMILIES)
TOOLS = (
    tool("get_weather", city="string", days="integer"),
    Tool("get_time"),
    tool("run", code="string"),
    tool("note", text="string", tags="array", urgent="boolean", meta="object"),
)


@dataclass(frozen=True)
class Case:
    family: str
    text: str
    ask: Ask
    template: str
    content: str
    reasoning: str
    calls: list[Any]

    def read(self, text: str | None = None) -> Outcome:
        return read_every_way(family(self.family, self.template), self.ask, self.text if text is None else text)


def cases() -> list[Any]:
    found = []
    for path in sorted(RECORDED.glob("*.yaml")):
        for number, one in enumerate(yaml.safe_load(path.read_text(encoding="utf-8"))):
            tools = TOOLS if one.get("tools", True) else ()
            ask = Ask(tools, split=one.get("split", True), opened=one.get("opened", False))
            case = Case(
                *(path.stem, one["text"], ask, one.get("template", "")),
                *(one.get("content", ""), one.get("reasoning", ""), one.get("calls", [])),
            )
            found.append(pytest.param(case, id=f"{path.stem}-{number}"))
    return found


def test_every_family_has_recorded_answers() -> None:
    assert {path.stem for path in RECORDED.glob("*.yaml")} == set(NAMES)


@pytest.mark.parametrize("case", cases())
def test_a_recorded_answer_is_read_the_same_however_it_comes(case: Case) -> None:
    outcome = case.read()
    assert (outcome.content, outcome.reasoning) == (case.content, case.reasoning)
    assert [[name, json.loads(arguments)] for name, arguments in outcome.calls] == case.calls


@pytest.mark.parametrize("case", cases())
def test_an_answer_may_end_anywhere(case: Case) -> None:
    """Whatever the model ends within, arguments are JSON; what the token limit cuts off is a beginning of them."""
    for end in range(0, len(case.text), 3):
        one = family(case.family, case.template)
        outcome = read(parser_of(one, case.ask), [case.text[:end]])
        for _, arguments in outcome.calls:
            assert isinstance(json.loads(arguments), dict)
        cut_off = read(parser_of(one, case.ask), [case.text[:end]], cut_off=True)
        names = [name for name, _ in cut_off.calls]
        assert names[: len(outcome.calls)] == [name for name, _ in outcome.calls]
        assert len(names) <= len(outcome.calls) + 1, "where the model would have ended, a head is text"
        assert outcome.reasoning.startswith(cut_off.reasoning)
        assert outcome.content.startswith(cut_off.content)


WITH_CALLS = [case for case in cases() if case.values[0].calls and case.values[0].family != "gigachat-3.0"]
"""The family that is left out has a mark that begins as a word does, which stays text until the mark is whole."""


@pytest.mark.parametrize("case", WITH_CALLS)
def test_a_call_that_the_token_limit_cuts_is_no_text(case: Case) -> None:
    """Wherever that is: what there is of it comes as a call, and its marks and names nowhere else."""
    forced = () if case.content else tuple(name for name, _ in case.calls)
    ask = Ask(case.ask.tools, case.ask.split, case.ask.opened, forced=forced)
    known = {tool.name for tool in ask.tools}
    told = case.read()
    for end in range(len(case.text) + 1):
        outcome = read(parser_of(family(case.family, case.template), ask), [case.text[:end]], cut_off=True)
        surely = outcome.content if forced else outcome.content[:-MIN_MARK_CHARS]
        assert told.content.startswith(surely), case.text[:end]
        for (name, _), (whole, _) in zip(outcome.calls, told.calls, strict=False):
            assert whole.startswith(name) or name in known, case.text[:end]


@pytest.mark.parametrize("case", cases())
def test_one_call_is_enough_where_no_more_are_wanted(case: Case) -> None:
    for portions in cuts(case.text):
        one = family(case.family, case.template)
        parser = parser_of(one, Ask(case.ask.tools, case.ask.split, case.ask.opened, one_call=True))
        outcome = read(parser, portions)
        assert [[name, json.loads(arguments)] for name, arguments in outcome.calls] == case.calls[:1]
        assert parser.is_over is bool(case.calls)


@pytest.mark.parametrize("case", cases())
def test_arguments_leave_as_they_grow(case: Case) -> None:
    """No later than a name's or a mark's length after they came: long texts are never held back."""
    in_a_string = '"arguments": "' in case.text
    if not case.calls or in_a_string:
        return
    long = "x" * 3000
    text = case.text.replace("Paris", long, 1)
    if text == case.text:
        return
    parser = parser_of(family(case.family, case.template), case.ask)
    cut = text.index(long) + 2000
    pieces = parser.feed(text[:cut])
    told = "".join(piece.arguments for piece in pieces if isinstance(piece, CallPiece)) + "".join(
        piece.text for piece in pieces if not isinstance(piece, CallPiece)
    )
    assert told.count("x") > 1900


MARKS = sorted(
    {mark for one in FAMILIES for mark in (*one.written, *one.syntax.triggers)}
    | {"<think>", "</think>", "<function=", "</function>", "<parameter=", "</parameter>", "functions.get_time:0"}
    | {"get_time", "get_weather", "all\n", ">>>", '{"name": "get_time", "arguments": ', "{}", '{"city": "x"}', "}", "]"}
    | {
        '"',
        "'",
        "\\",
        "\n",
        " ",
        "{",
        "[",
        "(",
        ")",
        "city=",
        ",",
        ":",
        "=",
        "<",
        "<|",
        "```",
        "```json",
        "to=functions.",
    }
    | {"Action:", "functools", "```tool_code", ">", 'name="', '">', "call:", "function", '<|"|>', "True", "1.", "\\u12"}
)
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=16).map("".join)
SPACE = set(" \t\r\n")
"""Around thoughts, and before marks without a meaning, it is syntax."""


def is_in_order(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


def silent_of(one: Family) -> tuple[str, ...]:
    parser = parser_of(one, Ask(TOOLS))
    return parser.silent if isinstance(parser, Reader) else ()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(text=TEXTS, seed=st.integers(0, 99), split=st.booleans(), opened=st.booleans(), tools=st.booleans())
def test_any_text_is_read_without_loss(name: str, text: str, seed: int, split: bool, opened: bool, tools: bool) -> None:
    """No parser raises, no cut matters, arguments are JSON objects; text and thoughts come in the order in which they
    were written, and of an answer without calls nothing is missing but marks and the whitespace around thoughts."""
    one = family(name, "</think>" if seed % 2 else "")
    ask = Ask(TOOLS if tools else (), split=split, opened=opened and one.thought is not None)
    if one.parser(ask) is None:
        return
    outcomes = {read(parser_of(one, ask), portions) for portions in (*cuts(text, seed), [text])}
    assert len(outcomes) == 1, outcomes
    outcome = outcomes.pop()
    for _, arguments in outcome.calls:
        assert isinstance(json.loads(arguments), dict)
    assert is_in_order(outcome.content, text)
    assert is_in_order(outcome.reasoning, text)
    if not outcome.calls and not one.always:
        for mark in (*silent_of(one), *((one.thought.open, one.thought.close) if one.thought and split else ())):
            text = text.replace(mark, "")
        lost = Counter(text) - Counter(outcome.content + outcome.reasoning)
        assert set(lost) <= (SPACE if silent_of(one) or (one.thought and split) else set()), lost


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(text=st.text(alphabet=st.characters(exclude_characters="<[{`>Af \n\t\r"), min_size=1, max_size=30))
def test_text_without_marks_is_what_it_is(name: str, text: str) -> None:
    parser = parser_of(family(name), Ask(TOOLS))
    assert read(parser, text) == Outcome(text)


def test_every_family_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "tool-calls.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9.-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == NAMES
