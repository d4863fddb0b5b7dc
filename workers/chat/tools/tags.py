"""Searches for several marks at once in a text that comes in portions."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Tags:
    """A set of marks; immutable. None of them is the beginning of another one."""

    __slots__ = ("_first", "_pattern", "_reach", "marks")

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(dict.fromkeys(mark for mark in marks if mark))
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        firsts = "".join(re.escape(mark[0]) for mark in self.marks)
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._reach = max(map(len, self.marks), default=1) - 1
        """Most characters of a mark that is not whole yet."""

    def absent(self, text: str) -> bool:
        """Return whether no mark is in the text or begins in it: a quick test, true for most texts."""
        return self._first.search(text) is None

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first mark from `start` on."""
        return self._pattern.search(text, start)

    def at(self, text: str, start: int) -> str | None:
        """Return the mark at `start`."""
        found = self._pattern.match(text, start)
        return found and found.group()

    def may_begin(self, text: str, start: int) -> bool:
        """Return whether the text from `start` on may become a mark."""
        rest = text[start:]
        return any(mark.startswith(rest) for mark in self.marks)

    def first_open(self, text: str) -> int:
        """Return where the end of `text` may begin a mark; the text's length if it does not."""
        found = self._first.search(text, max(0, len(text) - self._reach))
        while found is not None:
            if self.may_begin(text, found.start()):
                return found.start()
            found = self._first.search(text, found.end())
        return len(text)
