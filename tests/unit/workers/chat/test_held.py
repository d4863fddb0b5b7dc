"""How much of an answer a parser holds back, where all of it may yet mean something."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.tools import tool_of
from tests.unit.workers.chat.reading import family, parser_of, tool
from workers.chat.tools import CallPiece, ContentPiece, Parser, Piece
from workers.chat.tools.family import Ask
from workers.chat.tools.scanner import MAX_HELD_CHARS
from workers.chat.tools.typed_text import MAX_SCHEMA_CHARS, QUICK_CHARS

TOKEN = "-" * 112
NUM_TOKENS = (2 << 20) // len(TOKEN)
ASK = Ask(tools=(tool("f", listed="array", maybe={"type": ["string", "null"]}, any={}),))
CALL = '{"name": "f", "arguments": {"a": 1}'
BARE = ("hermes", "json", "llama3", "gemma", "lfm2", "pythonic", "deepseek")
MARKED = {
    "hermes": "<tool_call>",
    "granite": "<|tool_call|>",
    "functools": "functools[",
    "nemotron": "<TOOLCALL>[",
    "command-r7b": "<|START_ACTION|>[",
    "command-r": "Action:\n```json\n[",
    "gigachat": "<|function_call|>",
    "mistral": "[TOOL_CALLS]",
    "mistral-list": "[TOOL_CALLS][",
    "qwen3-coder": "<tool_call>",
    "seed-oss": "<seed:tool_call>",
    "minimax-m2": "<minimax:tool_call>",
    "glm": "<tool_call>",
}
HEADS = (
    *((name, '{"type": "') for name in BARE),
    *((name, '[{"arguments": "') for name in BARE),
    *((name, mark + '{"what": "') for name, mark in MARKED.items()),
    ("hermes", '{"name": "f", "arguments": "'),
    ("hermes", '{"arguments": {"a": "'),
    ("hermes", '{"type": ["a", {"b": "'),
)
VALUES = {
    "qwen3-coder": ("<tool_call>\n<function=f>\n<parameter={}>\n", "\n</parameter>\n</function>\n</tool_call>"),
    "seed-oss": ("<seed:tool_call><function=f><parameter={}>", "</parameter></function></seed:tool_call>"),
    "minimax-m2": (
        '<minimax:tool_call><invoke name="f"><parameter name="{}">',
        "</parameter></invoke></minimax:tool_call>",
    ),
    "glm": ("<tool_call>f\n<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
}


class Said:
    """What a parser has said so far, and how much it had held back at most."""

    def __init__(self, name: str) -> None:
        self.parser: Parser = parser_of(family(name), ASK)
        self.longest = 0
        """Of the pieces."""
        self.most_held = 0
        self._num_fed = self._num_said = 0
        self._parts: list[str] = []
        self.arguments: list[str] = []

    def feed(self, *portions: str) -> None:
        for portion in portions:
            self._num_fed += len(portion)
            self._take(self.parser.feed(portion))
            self.most_held = max(self.most_held, self._num_fed - self._num_said)

    def finish(self) -> tuple[str, str]:
        """-> the text, the arguments of all calls."""
        self._take(self.parser.finish())
        return "".join(self._parts), "".join(self.arguments)

    def _take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            text = piece.arguments if isinstance(piece, CallPiece) else piece.text
            (self._parts if isinstance(piece, ContentPiece) else self.arguments).append(text)
            self._num_said += len(text)
            self.longest = max(self.longest, len(text))

    def check_bounds(self) -> None:
        assert self.longest < MAX_HELD_CHARS + 1000
        assert self.most_held < MAX_HELD_CHARS + 1000


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_what_may_become_a_call_is_text_when_it_is_long(name: str, head: str) -> None:
    """All of it left as one event at the end, megabytes, and each token took longer than the last."""
    said = Said(name)
    start = time.thread_time()
    said.feed(head, *[TOKEN] * NUM_TOKENS)
    assert time.thread_time() - start < 2
    said.check_bounds()
    assert said.finish() == (head + TOKEN * NUM_TOKENS, "")


def test_short_members_without_end_are_as_much_as_a_long_one() -> None:
    said, member = Said("hermes"), '"type": "function", '
    said.feed("{", *[member] * 20_000)
    said.check_bounds()
    assert said.finish() == ("{" + member * 20_000, "")


def test_the_cut_does_not_matter_where_too_much_is_held() -> None:
    text = '{"type": "' + TOKEN * 600 + f'"}} <tool_call>{CALL}}}</tool_call>'
    for size in (len(text), 50_000, 7):
        said = Said("hermes")
        said.feed(*(text[start : start + size] for start in range(0, len(text), size)))
        assert said.finish() == (text[: text.index("<tool_call>")], '{"a": 1}')


def test_what_is_behind_a_call_of_the_same_list_is_text_too() -> None:
    said, rest = Said("hermes"), '{"type": "' + TOKEN * 600
    said.feed(f"[{CALL}}},", rest)
    assert said.finish() == (rest, '{"a": 1}')


def test_other_members_of_a_call_that_has_begun_are_of_any_length() -> None:
    said = Said("hermes")
    said.feed(f'<tool_call>{CALL}, "id": "', *[TOKEN] * NUM_TOKENS, '"}</tool_call>and text')
    assert said.finish() == ("and text", '{"a": 1}')


@pytest.mark.parametrize("key", ["listed", "maybe", "any"])
@pytest.mark.parametrize("name", VALUES)
def test_a_long_value_that_is_no_json_leaves_as_a_string_while_it_comes(name: str, key: str) -> None:
    said, (head, end) = Said(name), VALUES[name]
    start = time.thread_time()
    said.feed(head.format(key), *[TOKEN] * NUM_TOKENS)
    assert time.thread_time() - start < 2
    said.check_bounds()
    said.feed(end)
    text, arguments = said.finish()
    assert (text, json.loads(arguments)) == ("", {key: TOKEN * NUM_TOKENS})


@pytest.mark.parametrize("name", VALUES)
def test_a_long_list_stays_one_and_leaves_while_it_comes(name: str) -> None:
    said, (head, end), listed = Said(name), VALUES[name], [TOKEN] * NUM_TOKENS
    start = time.thread_time()
    said.feed(head.format("listed"), "\n[", *[f'"{TOKEN}", '] * (NUM_TOKENS - 1), f'"{TOKEN}"] ')
    assert time.thread_time() - start < 2
    said.check_bounds()
    said.feed(end)
    text, arguments = said.finish()
    assert (text, json.loads(arguments)) == ("", {"listed": listed})


def test_what_follows_a_long_list_that_ends_before_its_mark_is_text() -> None:
    said, (head, end) = Said("qwen3-coder"), VALUES["qwen3-coder"]
    said.feed(head.format("listed"), "[", *[f'"{TOKEN}", '] * 600, "1] and more", end)
    text, arguments = said.finish()
    assert text.startswith("and more")
    assert json.loads(arguments) == {"listed": [*[TOKEN] * 600, 1]}


def test_a_long_value_that_the_token_limit_cuts_is_the_beginning_of_it() -> None:
    said, (head, _) = Said("glm"), VALUES["glm"]
    said.feed(head.format("any"), '{"a": ["', *[TOKEN] * 600)
    [*pieces] = said.parser.finish(cut_off=True)
    assert pieces == []
    assert "".join(said.arguments) == '{"any": {"a": ["' + TOKEN * 600


@pytest.mark.parametrize("name", ["qwen3-coder", "glm"])
def test_the_values_that_a_schema_lists_are_looked_through_once(name: str) -> None:
    """60,000 of them took 3 ms of the event loop for each time that the model wrote the parameter."""
    wide = tool("f", a={"enum": list(range(60_000))})
    begin, one = {
        "qwen3-coder": ("<tool_call>\n<function=f>\n", "<parameter=a>\n1\n</parameter>\n"),
        "glm": ("<tool_call>f\n", "<arg_key>a</arg_key><arg_value>1</arg_value>"),
    }[name]
    parser = parser_of(family(name), Ask(tools=(wide,)))
    parser.feed(begin + one)
    began = time.process_time()
    pieces = parser.feed(one * 200)
    assert time.process_time() - began < 0.2
    assert "".join(piece.arguments for piece in pieces if isinstance(piece, CallPiece)) == ', "a": 1' * 200


def test_a_long_schema_is_decoded_as_the_parser_is_made_and_a_longer_one_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parser is made on a thread, and reads on the event loop: 70 ms there for 2 MB of floats, for each answer."""
    decoded: list[str] = []

    def noted(text: str) -> dict[str, Any]:
        decoded.append(json.loads(text)["title"][:1])
        schema: dict[str, Any] = json.loads(text)
        return schema

    monkeypatch.setattr("workers.protocol.requests.decode_object", noted)
    numbers = {"type": "object", "properties": {"a": {"type": "string"}}}
    sizes = {"short": 10, "long": QUICK_CHARS, "longer": MAX_SCHEMA_CHARS}
    tools = tuple(tool_of(name, None, {"title": name[-1] * size, **numbers}) for name, size in sizes.items())
    parser = parser_of(family("qwen3-coder"), Ask(tools=tools))
    assert decoded == ["g"]
    head = "<tool_call>\n<function={}>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    pieces = [piece for name in sizes for piece in parser.feed(head.format(name))]
    assert decoded == ["g", "t"]
    said = [piece.arguments for piece in pieces if isinstance(piece, CallPiece)]
    assert said == ['{"a": "1"}', '{"a": "1"}', '{"a": 1}'], "of the last one it is not known that it wants a text"


@pytest.mark.serial
def test_names_of_many_tools_are_looked_up_and_not_compiled() -> None:
    """A parser is made on the event loop: as one regular expression the names took 9 ms, for each call."""

    def seconds(turn: int) -> float:
        ask = Ask(tools=tuple(tool(f"{turn}{number:062}") for number in range(128)))
        began = time.thread_time()
        parser_of(family("functionary-v3.2"), ask)
        return time.thread_time() - began

    assert min(map(seconds, range(5))) < 0.002
