"""Reads the text that a parser has received: `Scanner` reads parts of it with generators, which pause when they need
more text; `Tags` searches it for several marks at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable
from typing import Protocol, TypeVar


class Tags:
    """A set of marks to search for; immutable. No mark may be the beginning of another mark."""

    __slots__ = ("_first", "_pattern", "_reach", "marks")

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(dict.fromkeys(mark for mark in marks if mark))
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        firsts = "".join(re.escape(mark[0]) for mark in self.marks)
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._reach = max(map(len, self.marks), default=1) - 1
        """Maximum length of an unfinished mark."""

    def absent(self, text: str) -> bool:
        """Return True if the text has no mark and no beginning of one. A quick test; False decides nothing."""
        return self._first.search(text) is None

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the match of the first mark at `start` or later."""
        return self._pattern.search(text, start)

    def at(self, text: str, start: int) -> str | None:
        """Return the mark at `start`; None if there is none."""
        found = self._pattern.match(text, start)
        return found and found.group()

    def may_begin(self, text: str, start: int) -> bool:
        """Return whether more text can turn the text from `start` on into a mark."""
        rest = text[start:]
        return any(mark.startswith(rest) for mark in self.marks)

    def first_open(self, text: str) -> int:
        """Return the position of an unfinished mark at the end of `text`; the text's length if there is none."""
        found = self._first.search(text, max(0, len(text) - self._reach))
        while found is not None:
            if self.may_begin(text, found.start()):
                return found.start()
            found = self._first.search(text, found.end())
        return len(text)


class Marks(Protocol):
    """Marks to look for: `Tags`, or a class that recognises marks in another way."""

    def at(self, text: str, start: int) -> str | None: ...
    def may_begin(self, text: str, start: int) -> bool: ...


T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_HEAD_CHARS = 512
"""Maximum length of a name, or of another text that can be interpreted only when it is complete; a longer one does not
count as part of a call."""

MAX_SPACE_CHARS = 4096
"""Maximum number of whitespace characters to skip: with each new token, all of them are searched again."""

MAX_HELD_CHARS = 64 << 10
"""Maximum characters that are held back, and later sent as one event. A longer beginning of a call is passed on as
text. A longer value of a parameter is passed on in portions, before it is complete."""

NOT_SPACE = re.compile(r"[^ \t\r\n]")
_STRING_END = re.compile(r'["\\]')


class HeadTooLong(Exception):
    """Raised if a text that looks like the beginning of a call is longer than MAX_HELD_CHARS: it counts as no call."""


class Scanner:
    """Reads parts of the text. A step (a method that is a generator) reads from `_at` on, moves `_at` if it finds what
    it looks for, and pauses for more text unless the answer has ended."""

    def __init__(self) -> None:
        self._text = ""
        """Text received but not passed on yet; the part before `_at` has been read as the beginning of a call."""
        self._at = 0
        self._ended = False
        """Whether no more text will come."""
        self._short: str | None = None
        """Set if the answer ended where a step needed more text: the part of a name or string read so far, or ""."""

    def _skip_space(self) -> Steps[bool]:
        """Skip whitespace; return whether other text follows. False after more than MAX_SPACE_CHARS."""
        start = self._at
        while True:
            found = NOT_SPACE.search(self._text, self._at)
            self._at = len(self._text) if found is None else found.start()
            if found is not None:
                return True
            if self._at - start > MAX_SPACE_CHARS:
                return False
            if self._ended:
                self._short = ""
                return False
            yield

    def _sees(self, mark: str) -> Steps[bool]:
        """Return whether `mark` comes next, after any whitespace."""
        if not (yield from self._skip_space()):
            return False
        while True:
            if self._text.startswith(mark, self._at):
                return True
            if not mark.startswith(self._text[self._at :]):
                return False
            if self._ended:
                self._short = ""
                return False
            yield

    def _mark(self, mark: str) -> Steps[bool]:
        """Return whether `mark` comes next, after any whitespace; if so, skip it."""
        sees = yield from self._sees(mark)
        if sees:
            self._at += len(mark)
        return sees

    def _any_mark(self, tags: Marks) -> Steps[str | None]:
        """Return the mark that comes next, after any whitespace, and skip it; None: no mark comes next."""
        if not (yield from self._skip_space()):
            return None
        while True:
            mark = tags.at(self._text, self._at)
            if mark is not None:
                self._at += len(mark)
                return mark
            if not tags.may_begin(self._text, self._at):
                return None
            if self._ended:
                self._short = ""
                return None
            yield

    def _up_to(self, tags: Tags, most: int = MAX_HEAD_CHARS) -> Steps[tuple[str, str] | None]:
        """Skip the text up to a mark, and the mark; return both. None: no mark follows within `most` characters."""
        while True:
            found = tags.find(self._text, self._at)
            if found is not None and found.start() - self._at <= most:
                text = self._text[self._at : found.start()]
                self._at = found.end()
                return text, found.group()
            if found is not None or len(self._text) - self._at > most + len(max(tags.marks, key=len)):
                return None
            if self._ended:
                self._short = self._text[self._at : max(self._at, tags.first_open(self._text))]
                return None
            yield

    def _string(self) -> Steps[str | None]:
        """Skip a JSON string, and return its value; None: no complete string of at most MAX_HEAD_CHARS comes next."""
        if not (yield from self._sees('"')):
            return None
        position = self._at + 1
        while True:
            found = _STRING_END.search(self._text, position)
            if found is not None and found.group() == '"':
                break
            if found is not None and found.end() < len(self._text):
                position = found.end() + 1
            elif len(self._text) - self._at > MAX_HEAD_CHARS:
                return None
            elif self._ended:
                self._short = _unfinished_string(self._text[self._at :])
                return None
            else:
                position = len(self._text) if found is None else found.start()
                yield
        try:
            value = json.loads(self._text[self._at : found.end()])
        except ValueError:
            return None
        if found.end() - self._at > MAX_HEAD_CHARS or not isinstance(value, str):
            return None
        self._at = found.end()
        return value


def _unfinished_string(text: str) -> str:
    """Return the value of a JSON string that lacks its end; empty if the text breaks off in an escape."""
    try:
        value = json.loads(text + '"')
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
