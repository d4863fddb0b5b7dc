"""Decodes tokens' bytes to text that can be sent: whole characters only, and no part of a stop string."""

from __future__ import annotations

from array import array
from codecs import utf_8_decode
from collections.abc import Iterable
from functools import lru_cache

_NONE = 0xFFFFFFFF
"""No character: more than any code point."""


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
        for character in map(ord, new):
            end += 1
            place = stops.after(place, character)
            if met := stops.met(place):
                self.stop, self._held = met, ""
                return text[: end - len(met)]
        self._place = place
        cut = len(text) - stops.lengths[place]
        self._held = text[cut:]
        return text[:cut]


class _Stops:
    """The stop strings as an Aho-Corasick automaton: the cost of a character does not depend on the number of stop
    strings or on the text held back. Immutable. Each state (`place`) stands for a prefix of a stop string: the longest
    prefix with which the text so far ends. Place 0 stands for the empty prefix.

    Most places have one successor, which is the next place. So an array has the character that leads there, and only
    the other successors (at most one per stop string) are in dictionaries: a dictionary for each place took 2.4 MB for
    the longest stop strings of a request, which stay in the cache below."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._to_next = array("I", (_NONE,))
        """For each place: the code point that leads to the place after it; _NONE: it has another successor or none."""
        self._branches: dict[int, dict[int, int]] = {}
        """For some places: code point -> successor, for successors other than the place after it."""
        self._shorter = array("I", (0,))
        """For each place: the place to fall back to, which stands for the longest proper suffix of its prefix."""
        self.lengths = array("I", (0,))
        """For each place: the length of its prefix in characters."""
        self._met = array("I", (0,))
        """For each place: 1 + the index in `_stops` of the longest stop string with which its prefix ends; 0: none."""
        self._stops = stops
        for index, stop in enumerate(stops):
            self._add(stop, index + 1)
        self.firsts = frozenset(stop[0] for stop in stops if stop)
        self._join()

    def after(self, place: int, character: int) -> int:
        """Return the place that follows `place` when the code point `character` is added to the text."""
        to_next, branches = self._to_next, self._branches
        while True:
            if to_next[place] == character:
                return place + 1
            if place in branches and character in branches[place]:
                return branches[place][character]
            if not place:
                return 0
            place = self._shorter[place]

    def met(self, place: int) -> str:
        """Return the longest stop string with which the prefix of `place` ends; empty: none."""
        index = self._met[place]
        return self._stops[index - 1] if index else ""

    def _add(self, stop: str, index: int) -> None:
        """Add the places of a stop string's prefixes, of which the shorter ones may be there already."""
        characters = array("I", map(ord, stop))
        place = num_known = 0
        for character in characters:
            found = self._successor(place, character)
            if not found:
                break
            place = found
            num_known += 1
        if new := characters[num_known:]:
            first = len(self._to_next)
            if first == place + 1:
                self._to_next[place] = new[0]
            else:
                self._branches.setdefault(place, {})[new[0]] = first
            self._to_next.extend(new[1:])
            self._to_next.append(_NONE)
            self.lengths.extend(range(num_known + 1, len(stop) + 1))
            for filled_later in (self._shorter, self._met):
                filled_later.frombytes(bytes(filled_later.itemsize * len(new)))
            place = len(self._to_next) - 1
        self._met[place] = index

    def _successor(self, place: int, character: int) -> int:
        """Return the place whose prefix is longer by `character`; 0: there is none."""
        if self._to_next[place] == character:
            return place + 1
        return self._branches[place].get(character, 0) if place in self._branches else 0

    def _join(self) -> None:
        """Fill in `_shorter` and `_met` of all places, in order of the lengths of their prefixes."""
        to_next, branches, shorter, met, after = self._to_next, self._branches, self._shorter, self._met, self.after
        places = array("I", (0,))
        for place in places:
            successors: Iterable[tuple[int, int]] = branches[place].items() if place in branches else ()
            if to_next[place] != _NONE:
                successors = ((to_next[place], place + 1), *successors)
            for character, longer in successors:
                places.append(longer)
                if place and (fallback := after(shorter[place], character)):
                    shorter[longer] = fallback
                    met[longer] = met[longer] or met[fallback]


@lru_cache(maxsize=8)
def _stops_of(stops: tuple[str, ...]) -> _Stops:
    """Return the automaton of these stop strings, which all answers of one request share."""
    return _Stops(stops)
