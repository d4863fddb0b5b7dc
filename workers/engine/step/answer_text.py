"""Decodes tokens' bytes to text that can be sent: whole characters only, and no part of a stop string."""

from __future__ import annotations

from codecs import utf_8_decode
from functools import lru_cache


class AnswerText:
    """The text of one answer. Text that may begin a stop string is held back; all other text is returned at once.

    Of several stop strings the one that is complete first ends the answer (of two that end together, the longer one),
    so the result does not depend on how the text is cut into tokens."""

    __slots__ = ("_bytes", "_held", "_place", "_stops", "stop")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._stops = _stops_of(stops) if any(stops) else None
        self._place = 0
        """The place in the automaton `_Stops` after all text so far."""
        self._bytes = b""
        self._held = ""
        self.stop: str | None = None
        """The stop string that has ended the answer; no text is returned after it. None: none has."""

    def push(self, piece: bytes) -> str:
        """Add a token's bytes; return the text that can be sent now. Bytes that can't be UTF-8 become U+FFFD."""
        data = self._bytes + piece if self._bytes else piece
        text, num_used = utf_8_decode(data, "replace", False)
        self._bytes = data[num_used:]
        return text if self._stops is None or not text else self._release(text, self._stops)

    def finish(self) -> str:
        """Return the text that is still held back. Call it after the last token."""
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
    """The stop strings as an Aho-Corasick automaton: the cost of a character does not depend on the number of stop
    strings or on the text held back. Immutable. Each state (`place`) stands for a prefix of a stop string: the longest
    prefix with which the text so far ends. Place 0 stands for the empty prefix."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        """For each place: next character -> the place whose prefix is longer by this character."""
        self._shorter = [0]
        """For each place: the place to fall back to, which stands for the longest proper suffix of its prefix."""
        self.lengths = [0]
        """For each place: the length of its prefix in characters."""
        self.met: list[str] = [""]
        """For each place: the longest stop string with which its prefix ends; empty: none."""
        for stop in stops:
            self._add(stop)
        self.firsts = frozenset(self._next[0])
        self._join()

    def after(self, place: int, character: str) -> int:
        """Return the place that follows `place` when `character` is added to the text."""
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
        """Fill in `_shorter` and `met` of all places, in order of the lengths of their prefixes."""
        places = list(self._next[0].values())
        for place in places:
            for character, longer in self._next[place].items():
                self._shorter[longer] = shorter = self.after(self._shorter[place], character)
                self.met[longer] = self.met[longer] or self.met[shorter]
                places.append(longer)


@lru_cache(maxsize=8)
def _stops_of(stops: tuple[str, ...]) -> _Stops:
    """Return the automaton of these stop strings, which all answers of one request share."""
    return _Stops(stops)
