"""Reads the tool calls of Mistral's models: until 2024 a JSON list, with ids or without; later each has own marks.

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
    [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

Both are read whatever the template shows. Ids are nine letters or digits: the templates refuse others. Source: the
chat templates of Mistral-Nemo-Instruct-2407, Mistral-Small-3.2-24B-Instruct-2506, Ministral-3-14B-Reasoning-2512.
"""

from __future__ import annotations

import secrets
import string

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_CHARS = 9

_AFTER_NAME = Tags((CALL_ID, ARGS, "{"))
_AFTER_ID = Tags((ARGS,))


class MistralReader(Reader):
    openers: tuple[str, ...] = (OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        if (yield from self._sees("[")) or (yield from self._sees("{")):
            return (yield from self._json_calls())
        found = yield from self._name_up_to(_AFTER_NAME)
        if found is None or not self._is_name(found[0].strip()):
            return False
        (name, mark), id = found, ""
        if mark == CALL_ID:
            told = yield from self._up_to(_AFTER_ID)
            if told is None:
                return False
            id = told[0].strip()
        if mark == "{":
            self._at -= 1
        if not (yield from self._sees("{")):
            return False
        self._begin(name.strip(), id if _is_id(id) else "")
        self._drop()
        yield from self._arguments(JsonText())
        return True

    def _new_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))


def _is_id(text: str) -> bool:
    return len(text) == ID_CHARS and text.isascii() and text.isalnum()


MISTRAL = Family(
    name="mistral",
    parse=MistralReader,
    syntax=CallSyntax(before=OPEN, middle=ARGS, after="", between="", triggers=(OPEN,)),
    marks=((OPEN, ARGS),),
    controls=(OPEN, CALL_ID, ARGS),
    calls_end_thoughts=True,
)

MISTRAL_LIST = Family(
    name="mistral-list",
    parse=MistralReader,
    syntax=CallSyntax(
        open=f"{OPEN} [ ",
        before='{ "name": "',
        middle='" , "arguments": ',
        after=" }",
        between=" , ",
        close=" ]",
        triggers=(OPEN,),
    ),
    marks=((OPEN,),),
    controls=(OPEN, CALL_ID, ARGS),
    calls_end_thoughts=True,
)
