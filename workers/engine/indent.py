"""The end of an answer that may hold indented lines only, such as the body of a function.

Source: `n_indent` in tools/server/README.md and server-context.cpp of llama.cpp. Lines after the first need at least
`n_indent` blanks or tabs; a line with fewer ends the answer, an empty one too.
"""

from __future__ import annotations

BLANKS = " \t"


class Indent:
    """Follows one answer's text as it comes."""

    __slots__ = ("_least", "_seen")

    def __init__(self, least: int) -> None:
        self._least = least
        self._seen: int | None = None
        """Blanks at the beginning of the current line so far; None: it is the first line, or its text has begun."""

    def end_in(self, text: str) -> int | None:
        """Return the position in `text` where the answer ends; None: it does not end."""
        for place, character in enumerate(text):
            if self._seen is not None and character in BLANKS:
                self._seen += 1
            elif self._seen is not None and self._seen < self._least:
                return place
            else:
                self._seen = 0 if character == "\n" else None
        return None
