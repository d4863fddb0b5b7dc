"""Decoding of tokens' bytes to text that may leave: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from codecs import utf_8_decode
from functools import lru_cache


class AnswerText:
    """The text of one answer. Text that may still become a stop string is held back, all other text leaves at once.

    Of several stop strings the one that is complete first ends the answer (of two that end together, the longer), so
    the result does not depend on how the text was cut into tokens.
    """

    __slots__ = ("_bytes", "_held", "_place", "_stops", "stop")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = _stops_of(stops) if any(stops) else None
        self._place = 0
        """Number of the longest beginning of a stop string that the text ends in (see `_Stops`)."""
        self._bytes = b""
        self._held = ""
        self.stop: str | None = None
        """The stop string that was met, after which no text leaves any more; None: none was met."""

    def push(self, piece: bytes) -> str:
        """Add a token's bytes; return the text that may leave now. Bytes that can't form a character become U+FFFD."""
        data = self._bytes + piece if self._bytes else piece
        text, num_used = utf_8_decode(data, "replace", False)
        self._bytes = data[num_used:]
        return text if self._stops is None or not text else self._release(text, self._stops)

    def finish(self) -> str:
        """Return the text that was held back, since the model is done."""
        text = utf_8_decode(self._bytes, "replace", True)[0] if self._bytes else ""
        self._bytes = b""
        if self._stops is None:
            return text
        text = self._release(text, self._stops)
        if self.stop is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str, stops: _Stops) -> str:
        if self.stop is not None:
            return ""
        place = self._place
        if not place and stops.firsts.isdisjoint(new):
            return new
        text, end = self._held + new, len(self._held)
        for character in new:
            end += 1
            place = stops.after(place, character)
            if met := stops.met[place]:
                self.stop, self._held = met, ""
                return text[: end - len(met)]
        self._place = place
        cut = len(text) - stops.lengths[place]
        self._held = text[cut:]
        return text[:cut]


class _Stops:
    """Stop strings as a tree of their beginnings (as by Aho and Corasick): a character costs the same, however many
    stop strings there are and however much of them is held back. Immutable.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """By place (the number of a beginning): character -> the place of the beginning that is longer by it."""
        self._shorter = [0]
        """By place: the place of the longest other beginning that this one ends in."""
        self.lengths = [0]
        """By place: characters of the beginning."""
        self.met: list[str] = [""]
        """By place: the longest stop string that this beginning ends in; empty: none."""
        for stop in stops:
            self._add(stop)
        self.firsts = frozenset(self._next[0])
        self._join()

    def after(self, place: int, character: str) -> int:
        """Return the place of the longest beginning that a text ends in, which ended in `place` before `character`."""
        steps = self._next
        while place and character not in steps[place]:
            place = self._shorter[place]
        return steps[place].get(character, 0)

    def _add(self, stop: str) -> None:
        place = 0
        for character in stop:
            found = self._next[place].get(character)
            if found is None:
                found = self._next[place][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.lengths.append(self.lengths[place] + 1)
                self.met.append("")
            place = found
        self.met[place] = stop

    def _join(self) -> None:
        """Fill `_shorter` and `met`, for shorter beginnings before longer ones."""
        places = list(self._next[0].values())
        for place in places:
            for character, longer in self._next[place].items():
                self._shorter[longer] = shorter = self.after(self._shorter[place], character)
                self.met[longer] = self.met[longer] or self.met[shorter]
                places.append(longer)


@lru_cache(maxsize=8)
def _stops_of(stops: tuple[str, ...]) -> _Stops:
    """Return the tree of these stop strings, which the answers of one request share."""
    return _Stops(stops)
