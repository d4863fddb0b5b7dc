"""How an answer looks in a terminal: words whole, Markdown rendered block by block, nothing left of its text."""

from __future__ import annotations

import re

import pytest

from gateway.commands.chat_text import MarkdownBlocks, Words, render

CONTROL = re.compile(r"\x1b\[([\d;]*)([A-Za-z])")
ANSWER = """# A fox

The *quick* fox, see [its page](https://example.com/fox), said `hi` to **everybody** that came along the road.

Plain words.

1. one
2. two

```python
def f():

    return "```"
```

| a | b |
|---|---|
| 1 | 2 |

The end, **almost**"""


class Screen:
    """As much of a terminal as the text needs: characters, line breaks, moves up and back, clearing."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0
        self.written = ""

    def write(self, text: str) -> None:
        self.written += text
        at = 0
        while at < len(text):
            if (control := CONTROL.match(text, at)) is not None:
                self._control(control[1], control[2])
                at = control.end()
                continue
            self._put(text[at])
            at += 1

    def _control(self, number: str, name: str) -> None:
        if name == "A":
            self.row -= int(number)
            assert self.row >= 0, "above its beginning"
        elif name == "D":
            self.column -= int(number)
            assert self.column >= 0
        elif name in "JK":
            self.lines[self.row] = self.lines[self.row][: self.column]
            if name == "J":
                del self.lines[self.row + 1 :]
        else:
            assert name == "m", name

    def _put(self, char: str) -> None:
        if char == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.lines):
                self.lines.append("")
        elif char == "\r":
            self.column = 0
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def shown(pieces: list[str], height: int = 40) -> Screen:
    screen = Screen()
    blocks = MarkdownBlocks(screen.write, 60, height)
    for piece in pieces:
        blocks.write(piece)
    blocks.end()
    return screen


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_each_block_is_rendered_however_it_comes(size: int) -> None:
    text = shown([ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]).text
    assert "The quick fox, see its page (https://example.com/fox)," in text
    assert "Plain words.\n\n 1 one\n 2 two\n" in text
    assert "def f():\n\n" in text
    assert text.endswith("The end, almost")
    assert [mark for mark in ("**", "*quick*", "`hi`", "```python", "|---|") if mark in text] == []


def test_a_block_that_left_the_screen_stays_as_it_came() -> None:
    block = "".join(f"- **{number}**\n" for number in range(30))
    screen = shown([block, "\n**last**"], height=10)
    assert "- **0**\n" in screen.text
    assert screen.text.endswith("\nlast")


def test_words_longer_than_a_line_are_not_counted_wrongly() -> None:
    assert "\x1b[J" not in shown(["**" + "x" * 200 + "**\n\n"]).written


def test_plain_text_is_written_once() -> None:
    assert "\x1b" not in shown(["Just words, and 1.5 of them. A [bracket].\n\nMore."]).written


def test_nothing_in_it_controls_the_terminal() -> None:
    told = render("[a](https://e.example) <b>bold</b> [red]no[/red] ![pic](http://e/x.png)", 60)
    assert "\x1b]8" not in told, "no hidden links"
    assert "https://e.example" in told
    assert "[red]no[/red]" in told


def lines_of(*pieces: str, width: int) -> list[str]:
    """The lines of a terminal, with what was taken back gone."""
    written: list[str] = []
    words = Words(written.append, width)
    for piece in pieces:
        words.write(piece)
    text = "".join(written)
    while match := re.search(r"\x1b\[(\d+)D\x1b\[K", text):
        text = text[: match.start() - int(match[1])] + text[match.end() :]
    return text.split("\n")


def test_words_are_not_broken_at_the_edge() -> None:
    pieces = ("The quick bro", "wn fox jumps over the la", "zy dog. A-word-that-is-longer-than-the-line and", " so on.")
    assert lines_of(*pieces, width=21) == [
        "The quick brown fox ",
        "jumps over the lazy ",
        "dog. ",
        "A-word-that-is-longer-than-the-line and ",
        "so on.",
    ]
    assert lines_of("x" * 19, " ", "yy", width=21) == ["x" * 19 + " ", "yy"]


def test_lines_of_a_text_stay() -> None:
    assert lines_of("def f():\n    return 1\n\n\tend", width=40) == ["def f():", "    return 1", "", "\tend"]
