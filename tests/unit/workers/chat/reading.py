"""An answer as a parser reads it, put together again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.support.tools import tool_of
from workers.chat.answers import family_of
from workers.chat.tools import CallPiece, ContentPiece, Parser
from workers.chat.tools.family import Ask, Family
from workers.protocol.requests import Tool


@dataclass(frozen=True)
class Outcome:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each."""


def tool(name: str, **properties: object) -> Tool:
    """A property is given by its type, or by its schema."""
    schemas = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return tool_of(name, None, {"type": "object", "properties": schemas})


def family(name: str, template: str = "") -> Family:
    return family_of(template, name)


def parser_of(family: Family, ask: Ask) -> Parser:
    parser = family.parser(ask)
    assert parser is not None
    return parser


def read(parser: Parser, portions: Iterable[str], *, cut_off: bool = False) -> Outcome:
    """What comes out, with the rules that hold for every parser checked."""
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    pieces = [piece for portion in portions for piece in parser.feed(portion)]
    for piece in pieces + parser.finish(cut_off=cut_off):
        if isinstance(piece, CallPiece):
            if piece.number == len(calls):
                assert piece.id
                assert piece.name
                ids.append(piece.id)
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.number == len(calls) - 1
                assert (piece.id, piece.name) == ("", "")
                assert piece.arguments
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + piece.arguments)
        elif isinstance(piece, ContentPiece):
            assert piece.text
            content += piece.text
        else:
            assert piece.text
            reasoning += piece.text
    assert parser.num_calls == len(calls) == len(set(ids))
    return Outcome(content, reasoning, tuple(calls))


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """The text whole, in characters, and in portions of several sizes."""
    yield [text]
    yield list(text)
    draw = random.Random(seed)
    for longest in (3, 7, 20):
        portions, start = [], 0
        while start < len(text):
            end = start + draw.randint(1, longest)
            portions.append(text[start:end])
            start = end
        yield portions


def read_every_way(family: Family, ask: Ask, text: str, *, cut_off: bool = False) -> Outcome:
    """The same outcome for every cut."""
    outcomes = {read(parser_of(family, ask), portions, cut_off=cut_off) for portions in cuts(text)}
    assert len(outcomes) == 1, outcomes
    return outcomes.pop()
