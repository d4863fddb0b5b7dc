"""Reads the tool calls of GLM 4.5 to 4.7 and others in this form:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

Source: the chat templates of zai-org/GLM-4.6 and GLM-4.7-Flash.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.parameters import ParameterReader
from workers.chat.tools.scanner import Steps, Tags

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

_AFTER_NAME = Tags(("\n", KEY, CLOSE, "{"))
_NEXT = Tags((KEY, CLOSE))
_KEY_END = Tags((KEY_END,))
_VALUE_END = Tags((VALUE_END,))


class GlmReader(ParameterReader):
    openers: tuple[str, ...] = (OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        yield from self._skip_space()
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None:
            return False
        name, mark = found[0].strip(), found[1]
        if mark == "{" and not name:  # as Hermes has it
            self._at -= 1
            return (yield from self._json_calls()) and ((yield from self._mark(CLOSE)) or True)
        if not self._is_name(name) or mark == "{":
            return False
        self._at -= len(mark)
        self._begin_object(name)
        while (mark := (yield from self._any_mark(_NEXT)) or "") == KEY:
            key = yield from self._up_to(_KEY_END)
            if key is None or not (yield from self._mark(VALUE)):
                break
            if not (yield from self._parameter(key[0].strip(), _VALUE_END)):
                break
        self._end_object(found=mark == CLOSE)
        return True


GLM = Family(
    name="glm",
    parse=GlmReader,
    syntax=CallSyntax(
        before=f"{OPEN} ",
        middle=" ",
        after=f" {CLOSE}",
        triggers=(OPEN,),
        parameter=(KEY, (f"{KEY_END} {VALUE}",), VALUE_END),
    ),
    marks=(("<arg_key>", "<arg_value>"),),
    controls=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    calls_end_thoughts=False,
)
