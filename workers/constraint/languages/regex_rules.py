"""Translates regular expressions into Lark rules for the same texts inside a JSON string.

A character that JSON writes as it is stays one; a quotation mark, a backslash or a control character becomes its
escape. Source of the syntax: the documentation of Rust's crate `regex`, which llguidance reads.
"""

from __future__ import annotations

import json
import re

MAX_NESTING = 40

SHORT = '"\\\b\f\n\r\t'
"""Characters that JSON escapes with a backslash and one more character. Other control characters are written as escapes
where a grammar names them, and not where it only does not exclude them."""
SPECIAL = frozenset((*map(chr, range(32)), '"', "\\"))
"""Characters that do not stand in a JSON string as they are."""
PLAIN = r'[^\x00-\x1f"\\]'
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
SPACES = frozenset("\t\n\v\f\r")
CLASSES = {"d": frozenset[str](), "w": frozenset[str](), "s": SPACES, "h": frozenset("\t")}
"""Letter of an escape for a set of characters -> which of `SPECIAL` are in the set; in upper case it is the others."""
OPERATORS = ("&&", "--", "~~")
"""Operators of Rust's classes."""
COUNT = re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}")
GROUP = re.compile(r"\(\?([is]*):|\(\?P?<\w+>|\((?!\?)")
CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[xu]\{([0-9A-Fa-f]{1,6})\}")


class NotTranslatable(Exception):
    """Raised for a part of a grammar that has no translation here; the message names the part."""


def literal(text: str, *, any_case: bool = False) -> str:
    """Return Lark for a text inside a JSON string."""
    parts = []
    for run in re.findall(r'[^\x00-\x1f"\\]+|[\x00-\x1f"\\]', text):
        if run in SPECIAL:
            parts.append(json.dumps(json.dumps(run)[1:-1]))
        else:
            parts.append(json.dumps(run, ensure_ascii=False) + ("i" if any_case else ""))
    return f"({' '.join(parts)})" if parts else '""'


def regex_rule(pattern: str, flags: str = "") -> str:
    """Return Lark for the texts that a regular expression matches as a whole. Raises NotTranslatable."""
    if set(flags) - set("isu"):
        raise NotTranslatable(f"the flags {flags!r} of a pattern")
    return _Pattern(pattern).whole(any_case="i" in flags, dot_all="s" in flags)


class _Pattern:
    """Reads one regular expression, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def whole(self, *, any_case: bool, dot_all: bool) -> str:
        run = self._run(any_case, dot_all)
        if run:
            return run
        found = self._alternatives(any_case, dot_all)
        if self._at < len(self._text):
            raise NotTranslatable(f"{self._text[self._at :][:20]!r} in a pattern")
        return found

    def _run(self, any_case: bool, dot_all: bool) -> str:
        """Return Lark for a pattern that is one set of characters, repeated, such as `(.+)`; empty: it is not.

        Such patterns are frequent, and take whole runs of plain characters at once. Any other takes them one by one,
        since a run would take away what comes after it in the pattern."""
        inner = self._text
        while inner.startswith("(") and inner.endswith(")") and not inner.startswith("(?"):
            inner = inner[1:-1]
        found = re.fullmatch(r"(\.|\[\^?(?:\\.|[^\]\\])(?:\\.|[^\]\\])*\]|\\[dwsDWS])([*+])", inner, re.DOTALL)
        if found is None:
            return ""
        plain, escaped = _Pattern(found[1]).set_of_characters(any_case, dot_all)
        parts = [f"/{plain}+/" if plain else "", escaped]
        return f"({' | '.join(part for part in parts if part)}){found[2]}"

    def set_of_characters(self, any_case: bool, dot_all: bool) -> tuple[str, str]:
        """Return the pattern of a set's plain characters and Lark for the others; either may be empty."""
        char = self._next()
        if char == ".":
            return (PLAIN, _escapes(SPECIAL if dot_all else SPECIAL - {"\n"}, named=False))
        if char == "[":
            return self._class(any_case)
        letter = self._next()
        return _plain(f"\\{letter}", any_case), _escapes(_special_of(letter), named=False)

    def _alternatives(self, any_case: bool, dot_all: bool) -> str:
        branches = [self._sequence(any_case, dot_all)]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence(any_case, dot_all))
        return f"({' | '.join(branches)})" if len(branches) > 1 else branches[0]

    def _sequence(self, any_case: bool, dot_all: bool) -> str:
        parts = []
        while (char := self._peek()) and char not in "|)":
            parts.append(self._atom(any_case, dot_all) + self._repetition())
        return f"({' '.join(parts)})" if parts else '""'

    def _atom(self, any_case: bool, dot_all: bool) -> str:
        char = self._peek()
        if char == "(":
            return self._group(any_case, dot_all)
        is_set = char in ".[" or (char == "\\" and self._text[self._at + 1 : self._at + 2].lower() in CLASSES)
        if is_set:
            plain, escaped = self.set_of_characters(any_case, dot_all)
            parts = [f"/{plain}/" if plain else "", escaped]
            return f"({' | '.join(part for part in parts if part)})"
        if char in "*+?{}^$":
            raise NotTranslatable(f"{char!r} in a pattern")
        return literal(self._character(), any_case=any_case)

    def _group(self, any_case: bool, dot_all: bool) -> str:
        found = GROUP.match(self._text, self._at)
        self._depth += 1
        if found is None or self._depth > MAX_NESTING:
            raise NotTranslatable(f"{self._text[self._at :][:4]!r} in a pattern")
        self._at = found.end()
        flags = found[1] or ""
        inner = self._alternatives(any_case or "i" in flags, dot_all or "s" in flags)
        if self._next() != ")":
            raise NotTranslatable("a group without an end in a pattern")
        self._depth -= 1
        return f"({inner})"

    def _repetition(self) -> str:
        char = self._peek()
        if char == "{":
            found = COUNT.match(self._text, self._at)
            if found is None or (found[3] and int(found[3]) < int(found[1])):
                raise NotTranslatable("braces in a pattern")
            self._at = found.end()
            sign = f"{{{found[1]},{found[3]}}}" if found[2] else f"{{{found[1]}}}"
        elif char and char in "*+?":
            self._at += 1
            sign = char
        else:
            return ""
        if self._peek() == "?":  # the same texts match, whether the pattern is eager or not
            self._at += 1
        return sign

    def _class(self, any_case: bool) -> tuple[str, str]:
        """Read a class behind its bracket."""
        start = self._at
        negated = self._peek() == "^"
        self._at += negated
        special: set[str] = set()
        while self._peek() != "]" or self._at == start + negated:
            special |= self._member()
        text = self._text[start : self._at]
        self._at += 1
        if any(operator in text for operator in OPERATORS):
            raise NotTranslatable("an operator in a class of a pattern")
        found = SPECIAL - special if negated else frozenset(special)
        return _plain(f"[{text}]", any_case), _escapes(found, named=not negated)

    def _member(self) -> frozenset[str]:
        """Read one character, range or set of a class; return which of SPECIAL it has."""
        if self._peek() == "\\" and self._text[self._at + 1 : self._at + 2].lower() in CLASSES:
            self._at += 2
            return _special_of(self._text[self._at - 1])
        if self._peek() == "[":
            raise NotTranslatable("a class within a class in a pattern")
        first = last = self._character()
        if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
            self._at += 1
            last = self._character()
        return frozenset(char for char in SPECIAL if first <= char <= last)

    def _character(self) -> str:
        char = self._next()
        if char != "\\":
            return char
        found = CODE.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise NotTranslatable("a code in a pattern that is no character")
            return chr(code)
        letter = self._next()
        if letter.isalnum() and letter not in ESCAPES:
            raise NotTranslatable(f"'\\{letter}' in a pattern")
        return ESCAPES.get(letter, letter)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise NotTranslatable("a pattern that breaks off")
        self._at += 1
        return char


def _special_of(letter: str) -> frozenset[str]:
    found = CLASSES[letter.lower()]
    return found if letter.islower() else SPECIAL - found


def _plain(members: str, any_case: bool) -> str:
    """Return a pattern for the plain characters among `members`, a class or an escape for a set of characters."""
    found = f"[{members}&&{PLAIN}]"
    return f"(?i:{found})" if any_case else found


def _escapes(special: frozenset[str], *, named: bool) -> str:
    """Return Lark for one of these characters as JSON writes it. `named`: the grammar names them."""
    written = sorted(json.dumps(char)[1:-1] for char in special if named or char in SHORT)
    return " | ".join(map(json.dumps, written))
