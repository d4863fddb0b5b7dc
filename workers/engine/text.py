"""From the bytes of tokens to text that may leave: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from codecs import utf_8_decode


class AnswerText:
    """The text of one answer. What may still become a stop string is held back, everything else leaves at once.

    Of several stop strings the one that is complete first ends the answer (of two that end together, the longer), so
    the result does not depend on how the text was cut into tokens.
    """

    __slots__ = ("_bytes", "_held", "_stops", "stop")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops: dict[str, list[str]] = {}
        """By their first characters: of many, few can have begun in the text of a token."""
        for stop in filter(None, stops):
            self._stops.setdefault(stop[0], []).append(stop)
        self._bytes = b""
        self._held = ""
        self.stop: str | None = None
        """The stop string that was met; nothing comes out any more."""

    def push(self, piece: bytes) -> str:
        """-> the text that may leave now. Bytes that can't become a character leave as U+FFFD."""
        data = self._bytes + piece if self._bytes else piece
        text, num_used = utf_8_decode(data, "replace", False)
        self._bytes = data[num_used:]
        return self._release(text) if self._stops and text else text

    def finish(self) -> str:
        """The model is done -> what was held back."""
        text = utf_8_decode(self._bytes, "replace", True)[0] if self._bytes else ""
        self._bytes = b""
        if not self._stops:
            return text
        text = self._release(text)
        if self.stop is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if self.stop is not None:
            return ""
        text = self._held + new
        begun = [stop for first in self._stops.keys() & set(text) for stop in self._stops[first]]
        found = _first_stop(text, begun)
        if found is not None:
            start, self.stop = found
            self._held = ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in begun), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """-> where it starts, and which, of the stop string that ends first."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            one = (start + len(stop), start, stop)
            best = one if best is None or one < best else best
    return None if best is None else best[1:]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, all of `stop` excepted."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
