"""Writes an answer to a terminal while it comes: lines broken between words, and Markdown shown as what it means."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

from rich.console import Console
from rich.markdown import Markdown

from workers.commands.layout import width_of

BREAKS = re.compile(r"([ \t\n])")
"""Splits a text into words and what is between them."""
TAB, MIN_WIDTH = 8, 20
BACK = "\x1b[{}D\x1b[K"
"""Moves the cursor back by so many characters, and clears the line from there on."""
UP = "\x1b[{}A"
CLEAR = "\r\x1b[J"
"""Moves the cursor to the beginning of its line, and clears the screen from there on."""
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
MARKS = re.compile(r"[*_`~|#]|\]\(|^\s*(?:[-+>]|\d+[.)])\s", re.MULTILINE)
"""What a block has that is more than words."""
THEME = "ansi_dark"
"""Colours of code: the terminal's own, which its owner can read."""


class Words:
    """Writes text to a terminal and breaks its lines between words: a word that reaches the edge is taken back, and
    written on a line of its own."""

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        """`width`: characters of a line; the last one stays free, since terminals differ in where the cursor is after
        it."""
        self._write = write
        self._width = max(MIN_WIDTH, width) - 1
        self._column = 0
        self._word = ""
        """The word under way, as far as it is written."""
        self.num_breaks = 0
        """Lines that were ended since the last `begin_block`."""
        self.is_counted = True
        """Whether `num_breaks` is sure: a terminal itself breaks words that are longer than a line."""

    def write(self, text: str) -> None:
        for part in BREAKS.split(text):
            if part == "\n":
                self._write(part)
                self.num_breaks += 1
                self.begin_line()
            elif part in (" ", "\t"):
                self._word = ""
                if self._column < self._width:
                    self._write(part)
                    self._column += 1 if part == " " else TAB - self._column % TAB
            elif part:
                self._add(part)

    def begin_line(self) -> None:
        """Note that what is written next begins a line."""
        self._column, self._word = 0, ""

    def begin_block(self) -> None:
        """Count lines from here on, at the beginning of one."""
        self.begin_line()
        self.num_breaks, self.is_counted = 0, True

    def _add(self, part: str) -> None:
        """Write a part of a word."""
        taken, added = width_of(self._word), width_of(part)
        self._word += part
        if self._column + added <= self._width:
            self._write(part)
            self._column += added
            return
        if self._column > taken:  # the word does not begin the line
            self._write((BACK.format(taken) if taken else "") + "\n" + self._word)
            self.num_breaks += 1
            self._column = taken + added
        else:
            self._write(part)
            self._column += added
        self.is_counted = self.is_counted and self._column <= self._width
        self._column %= self._width


class MarkdownBlocks:
    """Writes Markdown as it comes, and each block once more when it is whole, as what it means: a heading, a list, a
    table, code in colours. A block that has left the screen stays as it came."""

    def __init__(self, write: Callable[[str], None], width: int, height: int) -> None:
        self._write = write
        self._words = Words(write, width)
        self._width, self._height = max(MIN_WIDTH, width) - 1, height
        self._block = ""
        self._line = ""
        self._fence = ""
        """The fence of the code under way; empty: there is none."""

    def write(self, text: str) -> None:
        for piece in text.splitlines(keepends=True):
            self._words.write(piece)
            self._block += piece
            self._line += piece
            if piece.endswith("\n"):
                self._end_line()

    def end(self) -> None:
        """Show the last block: the answer is over."""
        self._show(is_last=True)
        self._fence = self._line = ""

    def _end_line(self) -> None:
        line, self._line = self._line, ""
        if (mark := FENCE.match(line)) is not None:
            if not self._fence:
                self._fence = mark[1]
            elif mark[1].startswith(self._fence):
                self._fence = ""
        if not self._fence and not line.strip():
            self._show()

    def _show(self, *, is_last: bool = False) -> None:
        """Show the block that has come in place of its text, and begin the next one."""
        block, self._block = self._block, ""
        num_breaks, is_counted = self._words.num_breaks, self._words.is_counted
        self._words.begin_block()
        if not block.strip() or not MARKS.search(block) or not is_counted or num_breaks >= self._height - 1:
            return
        up = UP.format(num_breaks) if num_breaks else ""
        self._write(f"{up}{CLEAR}{render(block, self._width)}" + ("" if is_last else "\n\n"))


def render(text: str, width: int) -> str:
    """Return Markdown as a terminal shows it, without a line break at its end. Addresses of links are shown: they are
    the model's, and may be others than the words say."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width)
    with console.capture() as captured:
        console.print(Markdown(text, code_theme=THEME, hyperlinks=False))
    lines = [line.rstrip() for line in captured.get().split("\n")]
    return "\n".join(lines).strip("\n")
