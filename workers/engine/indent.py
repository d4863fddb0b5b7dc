"""Where an answer ends that may hold indented lines only: the body of a function, and not what comes after it.

Source: `n_indent` in tools/server/README.md and server-context.cpp of llama.cpp. Lines after the first need so many
blanks or tabs; a line without them ends the answer, an empty one too.
"""

from __future__ import annotations

BLANKS = " \t"


class Indent:
    """Reads one answer's text as it comes."""

    __slots__ = ("_least", "_seen")

    def __init__(self, least: int) -> None:
        self._least = least
        self._seen: int | None = None
        """Blanks at the beginning of the present line; None: it is the first line, or goes on behind them."""

    def end_in(self, text: str) -> int | None:
        """Where in `text` the answer ends; None: it does not."""
        for place, character in enumerate(text):
            if self._seen is not None and character in BLANKS:
                self._seen += 1
            elif self._seen is not None and self._seen < self._least:
                return place
            else:
                self._seen = 0 if character == "\n" else None
        return None
