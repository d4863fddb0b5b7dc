"""Passes on JSON while a model writes it, and repairs what is not valid.

The output so far is always the beginning of a JSON value, and `close` returns the text that completes it. Valid JSON
comes out unchanged, except for whitespace and a trailing comma before its end. These are repaired: single quotes, names
and words without quotes, line ends inside strings, escapes that JSON does not have, Python's True, False, None and
tuples, missing and trailing commas. With `parameters`, the value is a Python call's arguments: `("Rome", days=3)`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from workers.chat.tools.scanner import MAX_SPACE_CHARS

GEMMA_QUOTE = '<|"|>'
MAX_DEPTH = 200
MAX_WORD_CHARS = 4096
"""Maximum length of a number or a word without quotes; a longer one ends the value as broken."""

_MARKS = {
    '"': re.compile(r'["\\\x00-\x1f]'),
    "'": re.compile(r"""['"\\\x00-\x1f]"""),
    GEMMA_QUOTE: re.compile(r'<\|"\|>|["\\\x00-\x1f]|<(?:\|(?:"\|?)?)?\Z'),
}
"""Opening quote of a string -> pattern of what ends a run of plain text in the string."""

_SPACE = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"""[^\s,:{}\[\]()"'=<>]+""")
_SCALAR = re.compile(r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\Z")
_HEX = re.compile(r"[0-9a-fA-F]*")
_DIGITS = {"u": 4, "x": 2, "U": 8}
"""Letter of an escape -> number of digits after the letter; `x` and `U` are Python's."""
MAX_CODE = 0x10FFFF
_PYTHON = {"True": "true", "False": "false", "None": "null"}

VALUE, FIRST_VALUE, NEXT_VALUE, FIRST_KEY, NEXT_KEY, COLON, COMMA = range(7)
"""What JsonText expects next. `FIRST_...`: after an opening bracket; `NEXT_...`: after a comma. In both places a
closing bracket may come instead."""
_KEYS = (FIRST_KEY, NEXT_KEY)
_UNNAMED = frozenset("\"'[{(-0123456789")
"""Characters that begin an argument without a name in a Python call."""
_ENDS = (COMMA, FIRST_VALUE, NEXT_VALUE, FIRST_KEY, NEXT_KEY)


class JsonText:
    """Reads one JSON value: call `feed` until `is_done` or `is_broken`. Text left unread is not part of it."""

    __slots__ = ("_in_key", "_is_call", "_names", "_quote", "_stack", "_want", "held", "is_broken", "is_done")

    def __init__(self, *, parameters: Iterable[str] | None = None) -> None:
        """`parameters`: the value is the arguments of a Python call; these names, in order, are for arguments without
        a name."""
        self.is_done = False
        self.is_broken = False
        """Whether the next character can't be part of the value; `close` then completes the value."""
        self._is_call = parameters is not None
        self._names = iter(parameters or ())
        self._want = VALUE
        self._stack: list[str] = []
        self._quote = ""
        """Quote that opened the present string; empty outside strings."""
        self._in_key = False
        self.held = ""
        """Whitespace held back, perhaps with a comma; the comma is dropped if a closing bracket follows."""

    def feed(self, text: str, start: int, *, ended: bool) -> tuple[str, int]:
        """Read `text` from `start` on; return the output and the position reached. `ended`: nothing follows `text`."""
        out: list[str] = []
        while start < len(text) and not (self.is_done or self.is_broken):
            reached = self._string(text, start, ended, out) if self._quote else self._part(text, start, ended, out)
            if reached == start and not self.is_broken:
                break  # more text is needed to decide
            start = reached
        return "".join(out), start

    def close(self) -> str:
        """Return the text that completes the value."""
        out = []
        if self._quote:
            out.append('"')
            self._want, self._quote = (COLON if self._in_key else COMMA), ""
        if self._want == COLON:
            out.append(":")
            self._want = VALUE
        if self._want == VALUE and not self.is_done:
            out.append("null")
        out.extend(reversed(self._stack))
        self._stack.clear()
        self.is_done = True
        return "".join(out)

    def _part(self, text: str, start: int, ended: bool, out: list[str]) -> int:
        """Read the next part outside strings; return the position reached."""
        if space := _SPACE.match(text, start):
            if len(self.held) < MAX_SPACE_CHARS:  # further whitespace is dropped
                self.held += space.group()
            return space.end()
        mark = text[start]
        if mark in ":=" and self._want == COLON and (mark == ":" or self._in_call):
            out.append(self.held + (":" if mark == ":" else ": "))
            self.held, self._want = "", VALUE
            return start + 1
        if mark in "}])" and self._stack and self._want in _ENDS and self._closes(mark):
            out.append(self.held.replace(",", "") + self._stack.pop())
            self.held = ""
            self._after_value()
            return start + 1
        if mark == "," and self._want == COMMA:
            self.held += ","
            self._want = NEXT_KEY if self._stack[-1] == "}" else NEXT_VALUE
            return start + 1
        if self._in_call and self._want in _KEYS and mark in _UNNAMED:
            name = next(self._names, None)
            if name is None:
                return self._break(start)
            self._lead(out)
            out.append(json.dumps(name, ensure_ascii=False) + ": ")
            self._want = VALUE
        return self._begin(mark, text, start, ended, out)

    @property
    def _in_call(self) -> bool:
        return self._is_call and len(self._stack) == 1

    def _closes(self, mark: str) -> bool:
        if mark == ")":
            return self._in_call or (self._is_call and self._stack[-1] == "]")
        return mark == self._stack[-1] and not (self._in_call and mark == "}")

    def _begin(self, mark: str, text: str, start: int, ended: bool, out: list[str]) -> int:
        """Read the quote that opens a string, or a whole word, or an opening bracket; return the position reached."""
        if self._want == COLON:
            return self._break(start)
        quote = GEMMA_QUOTE if mark == "<" else mark
        if quote in _MARKS:
            return self._open_string(quote, text, start, ended, out)
        if mark in "{[(":
            return self._open(mark, start, out)
        word = _WORD.match(text, start)
        if word is None:
            return self._break(start)
        if word.end() == len(text) and not ended and word.end() - start <= MAX_WORD_CHARS:
            return start
        if word.end() - start > MAX_WORD_CHARS:
            return self._break(start)
        self._lead(out)
        is_key = self._want in _KEYS
        out.append(json.dumps(word.group(), ensure_ascii=False) if is_key else _scalar(word.group()))
        if is_key:
            self._want = COLON
        else:
            self._after_value()
        return word.end()

    def _open_string(self, quote: str, text: str, start: int, ended: bool, out: list[str]) -> int:
        if not text.startswith(quote, start):
            return start if quote.startswith(text[start:]) and not ended else self._break(start)
        self._lead(out)
        self._in_key = self._want in _KEYS
        self._quote = quote
        out.append('"')
        return start + len(quote)

    def _open(self, mark: str, start: int, out: list[str]) -> int:
        is_call = mark == "(" and self._is_call and not self._stack
        in_object = bool(self._stack) and self._stack[-1] == "}" and self._want != VALUE
        if in_object or len(self._stack) >= MAX_DEPTH or (mark == "(" and not self._is_call):
            return self._break(start)
        self._lead(out)
        is_object = mark == "{" or is_call
        out.append("{" if is_object else "[")
        self._stack.append("}" if is_object else "]")
        self._want = FIRST_KEY if is_object else FIRST_VALUE
        return start + 1

    def _lead(self, out: list[str]) -> None:
        """Output what is held back (`held`) before the next part; add a comma if the model left it out."""
        if self._want == COMMA:
            self.held = "," + self.held
            self._want = NEXT_KEY if self._stack[-1] == "}" else NEXT_VALUE
        out.append(self.held)
        self.held = ""

    def _after_value(self) -> None:
        self._want = COMMA
        self.is_done = not self._stack

    def _break(self, start: int) -> int:
        self.is_broken = True
        return start

    def _string(self, text: str, start: int, ended: bool, out: list[str]) -> int:
        """Read a run of text in a string, and the mark that ends the run; return the position reached."""
        found = _MARKS[self._quote].search(text, start)
        if found is None:
            out.append(text[start:])
            return len(text)
        out.append(text[start : found.start()])
        mark, start = found.group(), found.start()
        if mark == self._quote:
            self._quote = ""
            out.append('"')
            if self._in_key:
                self._want = COLON
            else:
                self._after_value()
            return found.end()
        if mark == "\\" and self._quote != GEMMA_QUOTE:
            return _escape(text, start, ended, out)
        if mark[0] == "<":  # the closing quote may have begun
            if ended:
                out.append(json.dumps(mark)[1:-1])
            return found.end() if ended else start
        out.append(json.dumps(mark)[1:-1])
        return found.end()


def _scalar(word: str) -> str:
    word = _PYTHON.get(word, word)
    return word if _SCALAR.match(word) else json.dumps(word, ensure_ascii=False)


def _escape(text: str, start: int, ended: bool, out: list[str]) -> int:
    """Read the escape at `start`; return the position reached, or `start` if more text must come first."""
    kind = text[start + 1 : start + 2]
    if not kind and not ended:
        return start
    if kind and kind in '"\\/bfnrt':
        out.append("\\" + kind)
        return start + 2
    if kind == "'":
        out.append("'")
        return start + 2
    if kind in _DIGITS:
        length = _DIGITS[kind]
        digits = text[start + 2 : start + 2 + length]
        if _HEX.fullmatch(digits):
            if len(digits) < length and not ended:
                return start
            if len(digits) == length and (kind != "U" or int(digits, 16) <= MAX_CODE):
                out.append(f"\\u{digits:0>4}" if kind != "U" else json.dumps(chr(int(digits, 16)))[1:-1])
                return start + 2 + length
    out.append("\\\\")  # an escape that JSON does not have stands for itself
    return start + 1
