"""Translates a caller's Lark grammar into rules for the same texts inside a JSON string.

A custom tool's input is a text, which models write as a string of a function's JSON arguments. Each terminal becomes a
rule over the characters as JSON writes them: terminals as they are could not be told apart, since several begin with
the backslash of an escape. Source: Lark's documentation, "Grammar Reference".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from workers.constraint.languages.regex_rules import ESCAPES, NotTranslatable, literal, regex_rule
from workers.constraint.mask import Unusable

MAX_TEXT_BYTES = 32 << 10
MAX_RULES_BYTES = 192 << 10
"""Maximum bytes of the rules that a grammar is translated into: a character of it can become dozens."""

TOKEN = re.compile(
    r"""
      (?P<space>[ \t\r]+|//[^\n]*)
    | (?P<line>\n)
    | (?P<import>%import[ \t]++common\.(?P<imported>\w++)[ \t]*+(?:->[ \t]*+(?P<renamed>\w++)[ \t]*+)?+(?=\n|//|\Z))
    | (?P<imports>%import[ \t]++common[ \t]*+\((?P<several>[\w,\s]*+)\))
    | (?P<text>"(?:[^"\\\n]|\\.)*+")(?P<case>i?)
    | (?P<regex>/(?![/*])(?:[^/\\\n]|\\.)++/)(?P<flags>[a-z]*)
    | (?P<name>[!?]*+_*+[A-Za-z]\w*+)
    | (?P<number>\d+)
    | (?P<sign>->|\.\.|[:|()\[\]*+?~.])
    """,
    re.VERBOSE,
)

COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"[0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+([eE][+-]?[0-9]+)?|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[_A-Za-z][_A-Za-z0-9]*",
}
"""Lark's common terminals as patterns. Source: lark/grammars/common.lark."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    after: str = ""
    """The flags of a text or a pattern."""


def input_rules(lark: str, rule: str) -> str:
    """Return Lark rules, of which `rule` stands for the texts of the grammar `lark` as they are in a JSON string.

    Raises NotTranslatable for what has no translation, Unusable for a grammar that is wrong or too long."""
    if len(lark.encode()) > MAX_TEXT_BYTES:
        raise Unusable(f"the grammar has more than {MAX_TEXT_BYTES >> 10} KiB; send a smaller one")
    imported: dict[str, str] = {}
    definitions: dict[str, list[_Token]] = {}
    body: list[_Token] | None = None
    tokens = list(_tokens(lark, imported))
    at = 0
    while at < len(tokens):
        name, end = _head(tokens, at)
        if name:
            if name in definitions or name in imported:
                raise Unusable(f"the grammar defines {name} twice; leave one out")
            body = definitions[name] = []
        elif tokens[at].kind != "line":
            if body is None:
                raise Unusable("the grammar does not begin with a rule; write `start: ...`")
            body.append(tokens[at])
        at = end
    if "start" not in definitions:
        raise Unusable("the grammar has no rule `start`; name the first one so")
    names = {name: f"{rule}_{number}" for number, name in enumerate((*definitions, *imported))}
    rules = [f"{rule}: {names['start']}"]
    rules += [f"{names[name]}: {_body(body, names)}" for name, body in definitions.items()]
    rules += [f"{names[name]}: {regex_rule(COMMON[common])}" for name, common in imported.items()]
    text = "\n".join(rules) + "\n"
    if len(text.encode()) > MAX_RULES_BYTES:
        raise Unusable("the grammar is too long; send a smaller one")
    return text


def _tokens(lark: str, imported: dict[str, str]) -> Iterator[_Token]:
    """Yield a grammar's tokens; note in `imported` what it imports: its name -> Lark's name."""
    at = 0
    while at < len(lark):
        found = TOKEN.match(lark, at)
        if found is None:
            raise NotTranslatable(repr(lark[at:].split("\n")[0][:20]))
        at = found.end()
        kind = found.lastgroup or ""
        if found["import"]:
            _import(found["renamed"] or found["imported"], found["imported"], imported)
        elif found["imports"]:
            for name in found["several"].split(","):
                _import(name.strip(), name.strip(), imported)
        elif found["text"]:
            yield _Token("text", _unescaped(found["text"][1:-1]), found["case"])
        elif found["regex"]:
            yield _Token("regex", found["regex"][1:-1], found["flags"])
        elif kind != "space":
            yield _Token(kind, found[0])


def _import(name: str, common: str, imported: dict[str, str]) -> None:
    if common not in COMMON:
        raise NotTranslatable(f"the terminal common.{common}")
    imported[name] = common


def _unescaped(text: str) -> str:
    def char(found: re.Match[str]) -> str:
        if found[1] or found[2]:
            return chr(int(found[1] or found[2], 16))
        if found[3].isalnum() and found[3] not in ESCAPES:
            raise NotTranslatable(f"the escape {found[0]}")
        return ESCAPES.get(found[3], found[3])

    return re.sub(r"\\(?:x([0-9A-Fa-f]{2})|u((?![dD][89a-fA-F])[0-9A-Fa-f]{4})|(.))", char, text)


def _head(tokens: list[_Token], at: int) -> tuple[str, int]:
    """Return the name that is defined from `at` on and where its body begins; else an empty name and `at` + 1."""
    at_line = at == 0 or tokens[at - 1].kind == "line"
    if at_line and tokens[at].kind == "name":
        rest = [token.text for token in tokens[at + 1 : at + 4]]
        if rest[:1] == [":"]:
            return tokens[at].text.lstrip("!?"), at + 2
        if rest[:1] == ["."] and rest[2:] == [":"]:  # a priority, which says how to parse and not what may be said
            return tokens[at].text.lstrip("!?"), at + 4
    return "", at + 1


def _body(tokens: list[_Token], names: dict[str, str]) -> str:
    parts = []
    at = 0
    while at < len(tokens):
        token, after = tokens[at], [one.text for one in tokens[at + 1 : at + 3]]
        at += 1
        if token.kind == "text" and after[:1] == [".."]:
            parts.append(_range(token, tokens[at + 1 : at + 2]))
            at += 2
        elif token.kind == "text":
            parts.append(literal(token.text, any_case=bool(token.after)))
        elif token.kind == "regex":
            parts.append(f"({regex_rule(token.text, token.after)})")
        elif token.kind == "name":
            if token.text not in names:
                raise Unusable(f"the grammar names {token.text}, which it does not define")
            parts.append(names[token.text])
        elif token.text == "->":
            at += 1  # the name of a node of the tree
        elif token.text == "~":
            times, more = _times(tokens, at)
            parts.append(times)
            at += more
        elif token.kind == "sign" and token.text in "|()[]*+?":
            parts.append(token.text)
        else:
            raise NotTranslatable(repr(token.text))
    return " ".join(parts) or '""'


def _range(first: _Token, rest: list[_Token]) -> str:
    if not rest or rest[0].kind != "text" or len(first.text) != 1 or len(rest[0].text) != 1:
        raise NotTranslatable("a range of other than two characters")
    low, high = (f"\\x{{{ord(token.text):x}}}" for token in (first, rest[0]))
    return regex_rule(f"[{low}-{high}]")


def _times(tokens: list[_Token], at: int) -> tuple[str, int]:
    """Return the repetition behind a `~`, and how many tokens it has."""
    numbers = [token.text for token in tokens[at : at + 3]]
    if not numbers or not numbers[0].isdigit() or len(numbers[0]) > 4:
        raise NotTranslatable("a complement")
    if len(numbers) == 3 and numbers[1] == ".." and numbers[2].isdigit() and len(numbers[2]) <= 4:
        return f"~ {numbers[0]}..{numbers[2]}", 3
    return f"~ {numbers[0]}", 1
