"""Tool calls as Hermes, Qwen and this project's demo model write them:

    <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>

Source of the format: NousResearch/Hermes-Function-Calling. Arguments leave as they grow. Text that begins like a call
and turns out to be none leaves as text. Every character ends up in text, in a name, in arguments, or was syntax.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable

from workers.chat.tools import CallPiece, ContentPiece, Piece

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MAX_HEAD_CHARS = 512
"""A call that has not named its function by then is text. Arguments that precede the name do not count."""

_WHITESPACE = " \t\r\n"
_OUTSIDE_STRING = re.compile(r'[{}\[\]"<]')
_INSIDE_STRING = re.compile(r'["\\]')


class HermesParser:
    """One answer's parser. Each `_read_*` takes what it can from the waiting text and says whether it made progress."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._text = ""
        """Read but not yet understood."""
        self._read: Callable[[], bool] = self._read_content
        self._pieces: list[Piece] = []
        self._after_call = False
        """A call has begun, and no text since."""
        self._head = ""
        """Syntax of the present call so far, to be given back as text if it is none."""
        self._begun = False
        self._key = ""
        self._name: str | None = None
        self._early_arguments = ""
        """Arguments that came before the name."""
        self._has_arguments = False
        self._depth = 0
        self._in_string = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        while self._read():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back. A call that is cut off before its arguments began is text; later it stays a call."""
        rest = self._text
        if self._begun and self._in_string:
            self._arguments(rest)
        else:
            self._content(self._head)
            if not (self._after_call and rest.strip(_WHITESPACE) == ""):
                self._content(rest)
        self._text = self._head = ""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _reset_call(self) -> None:
        self._head = self._key = self._early_arguments = ""
        self._name = None
        self._begun = self._has_arguments = self._in_string = False
        self._depth = 0

    def _content(self, text: str) -> None:
        if not text:
            return
        self._after_call = False
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, ContentPiece):
            self._pieces[-1] = ContentPiece(last.text + text)
        else:
            self._pieces.append(ContentPiece(text))

    def _read_content(self) -> bool:
        text = self._text
        if self._after_call:
            stripped = text.lstrip(_WHITESPACE)
            if stripped == "" or (OPEN.startswith(stripped) and stripped != OPEN):
                return False  # whitespace between two calls is syntax; after the last one it may be text
            if stripped.startswith(OPEN):
                text = stripped
        start = text.find(OPEN)
        if start >= 0:
            self._content(text[:start])
            self._text = text[start + len(OPEN) :]
            self._reset_call()
            self._head = OPEN
            self._read = self._read_brace
            return True
        held = _held_back(text, OPEN)
        self._content(text[: len(text) - held])
        self._text = text[len(text) - held :]
        return False

    def _read_brace(self) -> bool:
        return self._expect("{", self._read_key)

    def _read_key(self) -> bool:
        return self._read_string(self._take_key)

    def _take_key(self, value: str) -> bool:
        if value not in ("name", "arguments") or (value == "name" and self._name is not None):
            return False
        if value == "arguments" and self._has_arguments:
            return False
        self._key = value
        self._read = self._read_colon
        return True

    def _read_colon(self) -> bool:
        return self._expect(":", self._read_name if self._key == "name" else self._read_arguments_start)

    def _read_name(self) -> bool:
        return self._read_string(self._take_name)

    def _take_name(self, value: str) -> bool:
        if not value or any("\ud800" <= character <= "\udfff" for character in value):
            return False  # half a surrogate pair is JSON but can't be sent as UTF-8
        self._name = value
        self._read = self._read_separator
        if self._has_arguments:
            self._begin()
            self._arguments(self._early_arguments)
            self._early_arguments = ""
        return True

    def _read_arguments_start(self) -> bool:
        if not self._skip_whitespace():
            return False
        if self._text[0] != "{":
            return self._not_a_call()
        self._has_arguments = True
        if self._name is not None:
            self._begin()
        self._depth = 0
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        text, position = self._text, 0
        while True:
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(text, position)
            if found is None:
                self._arguments(text)
                self._text = ""
                return False
            mark, position = found.group(), found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                if position == len(text):  # what it escapes is still to come
                    self._arguments(text[:-1])
                    self._text = "\\"
                    return False
                position += 1
            elif mark == "<":  # never JSON: the arguments break off here
                return self._end_arguments(position - 1, self._read_close if self._begun else self._not_a_call)
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return self._end_arguments(position, self._read_separator)

    def _end_arguments(self, position: int, then: Callable[[], bool]) -> bool:
        self._arguments(self._text[:position])
        self._text = self._text[position:]
        self._in_string = False
        self._read = then
        return True

    def _arguments(self, text: str) -> None:
        if not self._begun:
            self._early_arguments += text
            self._head += text
        elif text:
            last = self._pieces[-1] if self._pieces else None
            if isinstance(last, CallPiece) and last.number == self.num_calls - 1:
                self._pieces[-1] = last._replace(arguments=last.arguments + text)
            else:
                self._pieces.append(CallPiece(self.num_calls - 1, "", "", text))

    def _read_separator(self) -> bool:
        if not self._skip_whitespace():
            return False
        mark = self._text[0]
        if mark == "," and not (self._name is not None and self._has_arguments):
            return self._expect(",", self._read_key)
        if mark != "}" or self._name is None:
            return self._not_a_call()
        self._take(1)
        if not self._begun:  # a function without arguments
            self._begin()
            self._arguments("{}")
        self._read = self._read_close
        return True

    def _read_close(self) -> bool:
        stripped = self._text.lstrip(_WHITESPACE)
        if stripped.startswith(CLOSE):
            self._text = stripped[len(CLOSE) :]
        elif CLOSE.startswith(stripped):
            return False
        self._reset_call()
        self._read = self._read_content
        return True

    def _begin(self) -> None:
        """From here on it is a call, whatever follows."""
        self._begun = self._after_call = True
        self._head = ""
        self._pieces.append(CallPiece(self.num_calls, f"call_{secrets.token_hex(12)}", self._name or "", ""))
        self.num_calls += 1

    def _not_a_call(self) -> bool:
        """What has been read is text; what follows it is looked at afresh."""
        self._content(self._head)
        self._reset_call()
        self._read = self._read_content
        return True

    def _expect(self, mark: str, then: Callable[[], bool]) -> bool:
        if not self._skip_whitespace():
            return False
        if self._text[0] != mark:
            return self._not_a_call()
        self._take(1)
        self._read = then
        return True

    def _read_string(self, take: Callable[[str], bool]) -> bool:
        """A whole JSON string, then `take(value)`, which returns False for a value that does not belong here."""
        if not self._skip_whitespace():
            return False
        if self._text[0] != '"':
            return self._not_a_call()
        position = 1
        while True:
            found = _INSIDE_STRING.search(self._text, position)
            if found is None or (found.group() == "\\" and found.end() == len(self._text)):
                return self._not_a_call() if len(self._text) > MAX_HEAD_CHARS else False
            if found.group() == '"':
                break
            position = found.end() + 1
        try:
            value = json.loads(self._text[: found.end()])
        except ValueError:
            return self._not_a_call()
        if found.end() > MAX_HEAD_CHARS or not take(value):
            return self._not_a_call()
        self._take(found.end())
        return True

    def _skip_whitespace(self) -> bool:
        """Whether there is something else to look at."""
        rest = self._text.lstrip(_WHITESPACE)
        self._take(len(self._text) - len(rest))
        return rest != ""

    def _take(self, num_chars: int) -> None:
        if not self._begun:
            self._head += self._text[:num_chars]
        self._text = self._text[num_chars:]


def _held_back(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
