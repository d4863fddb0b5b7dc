"""Has the base class of the parsers of all families of tool calls. They read an answer in portions.

A reader runs a generator that pauses when it needs more text. Text that may be the beginning of a call is held back; it
is called the head. `_begin` turns the head into a call; a head that is no call is passed on as text. So every character
comes out in text, in a thought, in a name or in arguments, or is dropped as syntax: marks, other members of a call's
JSON object, whitespace around calls and thoughts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from enum import Enum

from workers.chat.tools import CallPiece, ContentPiece, Piece, ReasoningPiece
from workers.chat.tools.family import Ask, Family
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.scanner import MAX_HELD_CHARS, MAX_SPACE_CHARS, NOT_SPACE, HeadTooLong, Scanner, Steps, Tags
from workers.chat.tools.typed_text import ToolProperties

SPACE = " \t\r\n"
_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
MIN_MARK_CHARS = 4
"""Minimum characters of an unfinished mark (such as `<tool_ca`) that count as a call if the answer is cut off there. A
shorter one, or one that begins with a letter, is text unless the request forces a call."""
_OTHER_KEYS = ("type", "id", "tool_call_id")


class Gap(Enum):
    """The meaning of whitespace at the current position of the answer."""

    NONE = 0
    """No gap: whitespace is text of the answer."""
    START = 1
    """At the start of the answer: whitespace is text, unless a call or a thought follows."""
    CALL = 2
    """After a call: whitespace is text only if text follows."""
    THOUGHT = 3
    """After a thought that is returned apart from the answer's text: whitespace is dropped."""


class Reader(Scanner):
    """The parser of one answer; the subclass of each family adds `_call`. Marks in `openers` can begin a call anywhere,
    marks in `bare` only at the start of the answer, or after a thought or call.

    If the token limit cuts an answer off at the beginning of a call, the call still comes out: with the part of its
    name that was written, or with the whole name if only one tool's name begins like this."""

    openers: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    thought_ends: tuple[str, ...] | None = None
    """Marks of calls that end a thought, in families where a call can end a thought; None: all of `openers`."""
    silent: tuple[str, ...] = ()
    """Marks that are dropped wherever they stand."""

    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__()
        self.num_calls = 0
        self.is_over = False
        self._ask = ask
        self._properties = ToolProperties(ask.tools)
        self._thought = family.thought
        openers, bare = (self.openers, self.bare) if ask.tools else ((), ())
        thought = () if self._thought is None else (self._thought.open,)
        anywhere = (*openers, *self.silent, *(thought if self._thought and self._thought.anywhere else ()))
        self._anywhere = Tags(anywhere)
        self._at_gap = Tags((*anywhere, *bare, *thought))
        ends = (self.thought_ends or openers) if family.calls_end_thoughts and ask.tools else ()
        self._thought_ends = Tags(() if self._thought is None else (self._thought.close, *ends))
        self._gap = Gap.START
        self._space = ""
        """Whitespace before a mark; it is text if the mark turns out to be text."""
        self._cut_off = False
        self._name = ""
        """Likely name of the call that is being read (see `_likely`); empty if nothing of its name is known."""
        self._written = ""
        """Name of the call that is being read, as far as the model has written it."""
        self._early = ""
        """Arguments of the call that is being read, if the model wrote them before the call's name."""
        self._pieces: list[Piece] = []
        self._reasons: str | None = None
        """Whitespace held back because the thought may end after it; None before the thought's first word."""
        self._steps = self._answer()

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """Return the pieces held back at the end of the answer. If the arguments of a last, unfinished call have not
        begun, it comes out as text; but if `cut_off`, as a call."""
        self._ended, self._cut_off = True, cut_off
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # What the answer is made of

    def _answer(self) -> Steps[None]:
        mark = (yield from self._think("")) if self._ask.opened and self._thought is not None else None
        thinking = mark is not None
        while True:
            mark = mark or (yield from self._until(self._anywhere))
            if mark is None:
                return
            if self._thought is not None and mark == self._thought.open:
                mark = yield from self._think(mark)
                thinking = mark is not None
                continue
            if mark in self.silent:
                self._drop()
            elif (yield from self._calls(mark)):
                self._drop()
                self._gap = Gap.CALL
                self.is_over = self._ask.one_call
            elif thinking:  # the thought only mentioned the mark
                self._reject(thought=self._ask.split)
                mark = yield from self._think_on()
                thinking = mark is not None
                continue
            else:
                self._reject()
            mark, thinking = None, False

    def _calls(self, mark: str) -> Steps[bool]:
        """Read the calls that `mark` opens (the last one may be cut off); return False if there are none."""
        self._name = self._written = ""
        try:
            found = yield from self._call(mark)
        except HeadTooLong:
            self.is_over = self._ask.one_call and self.num_calls > 0  # the head follows calls of the same list
            return False
        if not self._is_cut or not (found or self._is_sure(mark)):
            return found
        self._begin_cut(self._name)
        return True

    def _call(self, mark: str) -> Steps[bool]:
        """Read the calls that `mark` opens; return False if there are none. `mark` has been read, and is held back."""
        yield from ()
        return False

    def _think(self, mark: str) -> Steps[str | None]:
        """Read a thought; return the mark of the call that ended it, or None if no call did."""
        if self._ask.split:
            self._drop()
            self._reasons = None
        else:
            self._reject()
        return (yield from self._think_on())

    def _think_on(self) -> Steps[str | None]:
        self._gap = Gap.NONE
        end = yield from self._until(self._thought_ends, thinking=self._ask.split)
        if end is None or (self._thought is not None and end != self._thought.close):
            return end
        if self._ask.split:
            self._drop()
        else:
            self._reject()
        self._gap = Gap.THOUGHT if self._ask.split else Gap.START
        return None

    def _until(self, tags: Tags, *, thinking: bool = False) -> Steps[str | None]:
        """Pass on the text before the next mark; return the mark, and hold it back. None: the answer ended before."""
        say = self._reason if thinking else self._say
        while True:
            if self._in_gap:
                mark = yield from self._over_gap()
                if mark is not None or self._in_gap:
                    return mark
            text, end = self._text, len(self._text)
            if not tags.absent(text):
                found = tags.find(text, 0)
                if found is not None:
                    say(text[: found.start()])
                    self._text, self._at = text[found.start() :], len(found.group())
                    return found.group()
                begun = tags.first_open(text)
                if self._ended and not thinking and self._cuts_call(text[begun:]):
                    say(text[:begun] if text[:begun].strip() else "")
                    self._begin_cut("")
                    return None
                end = end if self._ended else begun
            say(text[:end])
            self._text = text[end:]
            if self._ended:
                return None
            yield

    def _over_gap(self) -> Steps[str | None]:
        """Skip whitespace; return the mark after it, or None if text follows or the answer ends."""
        while True:
            found = NOT_SPACE.search(self._text)
            if found is not None:
                start = found.start()
                mark = self._at_gap.at(self._text, start)
                if mark is not None:
                    self._space = "" if self._gap is Gap.THOUGHT else self._text[:start]
                    self._text, self._at = self._text[start:], len(mark)
                    return mark
                if self._ended and self._must_call and self._at_gap.may_begin(self._text, start):
                    self._begin_cut("")
                    return None
                if self._ended or not self._at_gap.may_begin(self._text, start):
                    self._text = self._text[start if self._gap is Gap.THOUGHT else 0 :]
                    self._gap = Gap.NONE
                    return None
            elif self._ended:
                if self._gap is Gap.START and not self._must_call:
                    self._say(self._text)
                self._text = ""
                return None
            elif len(self._text) > MAX_SPACE_CHARS:
                if self._gap is Gap.START:
                    self._say(self._text)
                self._text = ""
                if not self._in_gap:
                    return None
            yield

    @property
    def _in_gap(self) -> bool:
        return self._gap is not Gap.NONE

    # What comes out

    def _put(self, piece: Piece) -> None:
        if self.is_over:
            return
        if not self._pieces:
            self._pieces.append(piece)
            return
        last = self._pieces[-1]
        if isinstance(piece, CallPiece):
            if isinstance(last, CallPiece) and last.number == piece.number:
                self._pieces[-1] = last._replace(arguments=last.arguments + piece.arguments)
                return
        elif type(last) is type(piece):
            self._pieces[-1] = type(piece)(last.text + piece.text)
            return
        self._pieces.append(piece)

    def _say(self, text: str) -> None:
        if text:
            self._gap = Gap.NONE
            self._put(ContentPiece(text))

    def _reason(self, text: str) -> None:
        """Pass on more of a thought, without the whitespace around it."""
        text = text.lstrip(SPACE) if self._reasons is None else self._reasons + text
        if text:
            whole = text.rstrip(SPACE)
            self._reasons = text[len(whole) :]
            if len(self._reasons) > MAX_SPACE_CHARS:
                whole, self._reasons = text, ""
            if whole:
                self._put(ReasoningPiece(whole))

    def _begin(self, name: str, id: str = "") -> None:
        """Pass on the beginning of a call: id and name. Whatever text follows, this can't be undone."""
        if self.num_calls and self._ask.one_call:
            self.is_over = True
        if not self.is_over:
            self._put(CallPiece(self.num_calls, id or self._new_id(), name, ""))
            self.num_calls += 1
        self._name = ""

    def _add(self, arguments: str) -> None:
        if arguments and not self.is_over:
            self._put(CallPiece(self.num_calls - 1, "", "", arguments))

    # What the token limit leaves of a call

    @property
    def _is_cut(self) -> bool:
        """Whether the answer was cut off before it was clear if the text held back is a call."""
        return self._cut_off and self._short is not None

    @property
    def _must_call(self) -> bool:
        """Whether cut-off text must be a call, because the request forces one."""
        return self._cut_off and bool(self._ask.forced)

    def _cuts_call(self, begun: str) -> bool:
        """Return whether `begun`, an unfinished mark at the answer's end, is the beginning of a call, and not text."""
        is_long = len(begun) >= MIN_MARK_CHARS and not begun[0].isalpha()
        return bool(begun) and (self._must_call or (self._cut_off and is_long))

    def _is_sure(self, mark: str) -> bool:
        """Return whether cut-off text after `mark` is surely a call: the mark, a tool's name or the request tells."""
        return mark not in self.bare or bool(self._ask.forced) or self._is_name(self._written, known=True)

    def _note_name(self, name: str | None) -> None:
        """Note the name of the call that is being read; None: the name is incomplete or missing."""
        self._written = (self._short or "" if name is None else name).strip()
        self._name = self._likely(self._written) if name is None else self._written

    def _likely(self, begun: str) -> str:
        """Return the name of the tool whose name begins with `begun`; if none or several do, return `begun` itself."""
        names = self._ask.forced or tuple(tool.name for tool in self._ask.tools)
        fitting = [name for name in names if name.startswith(begun)]
        return fitting[0] if len(fitting) == 1 else begun

    def _begin_cut(self, name: str) -> None:
        """Turn the rest of a cut-off answer into a call of `name`, so that none of it comes out as text. If `name` is
        empty and no call came before, call the only tool there is. If several could be meant, drop the rest."""
        self._text, self._at = "", 0
        name = name or ("" if self.num_calls else self._likely(""))
        if self._is_name(name):
            self._begin(name)
            self._add(self._early)

    def _listed(self, one: Callable[[], Steps[bool]], mark: str, close: str) -> Steps[bool]:
        """Read calls up to `close`: `mark` begins each call (the first has been read), `one` reads the rest of it."""
        if not (yield from one()):
            return False
        while (yield from self._mark(mark)):
            self._drop()
            if not (yield from one()):
                return True
        yield from self._mark(close)
        return True

    def _new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def _drop(self) -> None:
        """Drop the text held back, because it was syntax."""
        self._space = ""
        self._text, self._at = self._text[self._at :], 0

    def _reject(self, *, thought: bool = False) -> None:
        """Pass on the text held back, as text of the answer or of a thought. What follows it is parsed next."""
        head, self._at = self._at, 0
        (self._reason if thought else self._say)(self._space + self._text[:head])
        self._text, self._space = self._text[head:], ""

    # What calls are made of

    def _name_up_to(self, tags: Tags) -> Steps[tuple[str, str] | None]:
        """Read and note the name of a call; return it and the tag that follows. None: no tag within MAX_HEAD_CHARS."""
        found = yield from self._up_to(tags)
        self._note_name(found[0] if found is not None else None)
        return found

    def _arguments(self, value: JsonText) -> Steps[None]:
        """Pass on the arguments of the call that has begun, as they come."""
        while True:
            out, reached = value.feed(self._text, self._at, ended=self._ended and not self._cut_off)
            self._add(out)
            self._text, self._at = self._text[reached:], 0
            if value.is_done:
                return
            if value.is_broken or self._ended:
                break
            yield
        if value.is_broken or not self._cut_off:
            self._add(value.close())
        else:
            self._add(value.held + self._text)
            self._text = ""

    def _value(self, *, is_syntax: bool = False) -> Steps[str]:
        """Read a whole JSON value and return it; text after it stays unread. Raises HeadTooLong.

        `is_syntax`: the value is neither the name nor the arguments of the call that has begun, so drop it."""
        value, parts = JsonText(), []
        while True:
            out, self._at = value.feed(self._text, self._at, ended=self._ended)
            if is_syntax:
                self._drop()
            elif self._at > MAX_HELD_CHARS:
                self._at = MAX_HELD_CHARS
                raise HeadTooLong
            else:
                parts.append(out)
            if value.is_done or value.is_broken or self._ended:
                self._short = self._short if value.is_done or value.is_broken else ""
                return "".join((*parts, value.close()))
            yield

    def _is_name(self, name: str | None, *, known: bool = False) -> bool:
        """Return whether `name` can be a call's name. `known`: it must be the name of one of the request's tools."""
        if not name or any("\ud800" <= character <= "\udfff" for character in name):
            return False  # half a surrogate pair can be in JSON but can't be sent as UTF-8
        return not known or any(tool.name == name for tool in self._ask.tools)

    def _json_call(self, *, known: bool = False) -> Steps[bool]:
        """Read an object with name and arguments, in any order; drop other members. Return False if it is no call.

        `known`: the object counts only if it names one of the request's tools and has no members except those of calls,
        since nothing else distinguishes it from other JSON."""
        if not (yield from self._mark("{")):
            return False
        name: str | None = None
        early: str | None = None
        self._early = ""
        begun = False
        while True:
            if begun:
                self._drop()
            key = yield from self._string()
            if key is None or not (yield from self._mark(":")):
                return begun
            if key in _NAME_KEYS and name is None:
                name = yield from self._string()
                self._note_name(name)
                if not self._is_name(name, known=known):
                    return False
                if early is not None:
                    self._begin(name or "")
                    self._add(early)
                    begun = True
            elif key in _ARGUMENT_KEYS and early is None and not begun:
                if not (yield from self._sees("{")):
                    held = yield from self._value()
                    early = _object_in_string(held)
                    if early is None:
                        self._early = _held(held)
                        return False
                    if name is not None:
                        begun = True
                        self._begin(name)
                        self._add(early)
                elif name is None:
                    early = self._early = yield from self._value()
                else:
                    begun = True
                    self._begin(name)
                    yield from self._arguments_of_head()
            elif known and key not in _OTHER_KEYS:
                return begun
            else:
                yield from self._value(is_syntax=begun)
            if not (yield from self._mark(",")):
                break
        return (yield from self._end_of_json_call(name, begun))

    def _json_calls(self, *, known: bool = False) -> Steps[bool]:
        """Read one call in JSON, or a list of such calls; return False if there are none. `known`: see `_json_call`."""
        if not (yield from self._mark("[")):
            return (yield from self._json_call(known=known))
        if not (yield from self._json_call(known=known)):
            return False
        while (yield from self._mark(",")):
            self._drop()
            if not (yield from self._json_call(known=known)):
                return True
        yield from self._mark("]")
        return True

    def _arguments_of_head(self) -> Steps[None]:
        self._drop()
        yield from self._arguments(JsonText())

    def _end_of_json_call(self, name: str | None, begun: bool) -> Steps[bool]:
        closed = yield from self._mark("}")
        if begun or name is None or not closed:
            return begun
        self._begin(name)
        self._add("{}")
        return True


def _object_in_string(value: str) -> str | None:
    """Return the JSON object that a JSON string contains; None if `value` is not such a string. Some models write
    arguments in this way, like OpenAI's API."""
    held = _held(value)
    try:
        return held if isinstance(json.loads(held), dict) else None
    except (ValueError, RecursionError):
        return None


def _held(value: str) -> str:
    """Return the text inside a JSON string if it begins like an object; otherwise an empty text.

    Half a surrogate pair stays escaped, as the model wrote it: it can be in JSON but can't be sent as UTF-8."""
    try:
        held = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(held, str) or not held.lstrip().startswith("{"):
        return ""
    return held.encode("utf-8", "backslashreplace").decode()


class MarkedJsonReader(Reader):
    """Reads calls that are JSON between marks: one object with name and arguments, or a list of such objects."""

    closers: tuple[str, ...] = ()
    """Marks that can follow the JSON; one of them is skipped."""

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._json_calls()):
            return False
        while (yield from self._sees("{")):  # MiniMax M1 writes one call per line
            self._drop()
            if not (yield from self._json_call()):
                return True
        yield from self._any_mark(Tags(self.closers))
        return True
