"""Tool calls of models that no other family knows: an answer that begins with JSON which names a tool.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

One object, a list of them, or one after the other; also inside of a Markdown fence. JSON that names no tool is text.
Calls in the form of Hermes are read too: templates without a place for tools are told to ask for that.
"""

from __future__ import annotations

from workers.chat.tools.family import Family
from workers.chat.tools.hermes import HERMES, HermesReader
from workers.chat.tools.scanner import Steps

FENCE = "```json"


class PlainReader(HermesReader):
    bare: tuple[str, ...] = ("{", "[", FENCE)

    def _call(self, mark: str) -> Steps[bool]:
        if mark in HermesReader.openers:
            return (yield from super()._call(mark))
        fenced = mark == FENCE
        if not fenced:
            self._at = 0
        if not (yield from self._json_calls(known=True)):
            return False
        if fenced:
            yield from self._mark("```")
        else:
            yield from self._mark(";")
        return True


PLAIN = Family(name="json", parse=PlainReader, syntax=HERMES.syntax)
