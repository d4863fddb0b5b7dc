"""Reads the tool calls of Llama 3.1, 3.2 and 3.3, where the answer begins with them:

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>get_weather.call(city="Paris")
    [get_weather(city="Paris")]

Several calls follow each other, with semicolons or without. JSON or Python that names no tool is text. Source: Meta's
prompt formats of Llama 3.1 and 3.2, and the chat templates.
"""

from __future__ import annotations

from workers.chat.tools.family import CallSyntax, Family
from workers.chat.tools.hermes import HermesReader
from workers.chat.tools.python_calls import PythonReader
from workers.chat.tools.scanner import Steps

PYTHON_TAG = "<|python_tag|>"


class LlamaReader(HermesReader, PythonReader):
    openers: tuple[str, ...] = (*HermesReader.openers, PYTHON_TAG)

    def _call(self, mark: str) -> Steps[bool]:
        if mark not in ("[", PYTHON_TAG):
            return (yield from super()._call(mark))
        begun = self._at = 0 if mark == "[" else self._at
        if not (yield from self._python_calls(known=True)):
            self._at = begun
            if not (yield from self._json_calls(known=True)):
                return False
        yield from self._mark(";")
        return True


LLAMA = Family(
    name="llama3",
    parse=LlamaReader,
    syntax=CallSyntax(
        before='{ "name": "', middle='" , "parameters": ', after=" }", between=" ; ", triggers=('{"name"',)
    ),
    marks=(("<|start_header_id|>", '"parameters": '), (PYTHON_TAG,)),
    controls=(PYTHON_TAG,),
)
