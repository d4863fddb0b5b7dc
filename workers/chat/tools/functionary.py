"""Reads the tool calls of MeetKai's Functionary. Version 3.1 puts marks around arguments, 3.2 a line with a recipient:

    <function=get_weather>{"city": "Paris"}</function>

    >>>get_weather
    {"city": "Paris"}
    >>>all
    It is sunny.

The prompt of version 3.2 ends with the first `>>>`, so the answer begins with a name. Source: the chat templates of
meetkai/functionary-medium-v3.1 and -v3.2.
"""

from __future__ import annotations

from workers.chat.tools.family import Ask, CallSyntax, Family
from workers.chat.tools.json_text import JsonText
from workers.chat.tools.reader import Gap, Reader
from workers.chat.tools.scanner import Steps, Tags

OPEN, NAMED, CLOSE = "<function=", ">", "</function>"
RECIPIENT = ">>>"
EVERYBODY = "all"

_NAMED = Tags((NAMED,))


class FunctionaryReader(Reader):
    openers: tuple[str, ...] = (OPEN,)

    def _call(self, mark: str) -> Steps[bool]:
        found = yield from self._name_up_to(_NAMED)
        if found is None or not self._is_name(found[0].strip()) or not (yield from self._sees("{")):
            return False
        self._begin(found[0].strip())
        self._drop()
        yield from self._arguments(JsonText())
        yield from self._mark(CLOSE)
        return True


class RecipientReader(Reader):
    def __init__(self, family: Family, ask: Ask) -> None:
        super().__init__(family, ask)
        self._marks = self._at_gap = Tags((RECIPIENT,))
        self._recipients = Tags((f"{EVERYBODY}\n", *(f"{tool.name}\n" for tool in ask.tools)))

    def _answer(self) -> Steps[None]:
        yield from self._mark(RECIPIENT)
        while True:
            recipient = yield from self._any_mark(self._recipients)
            if recipient is None:
                self._reject_recipient()
            elif recipient[:-1] == EVERYBODY:
                self._drop()
                self._gap = Gap.NONE
            elif (yield from self._sees("{")):
                self._begin(recipient[:-1])
                self._drop()
                yield from self._arguments(JsonText())
                self._gap = Gap.CALL
                self.is_over = self._ask.one_call
            elif self._is_cut:
                self._begin_cut(recipient[:-1])
            else:
                self._reject()
            if (yield from self._until(self._marks)) is None:
                return

    def _reject_recipient(self) -> None:
        """Treat a head without a recipient as text, unless the token limit cut it."""
        if not self._is_cut:
            self._reject()
            return
        begun = self._text[self._at :].strip()
        if self._ask.forced or not EVERYBODY.startswith(begun):
            self._begin_cut(self._likely(begun))
        else:
            self._text, self._at = "", 0


FUNCTIONARY_V31 = Family(
    name="functionary-v3.1",
    parse=FunctionaryReader,
    syntax=CallSyntax(before=OPEN, middle=NAMED, after=CLOSE, triggers=(OPEN,)),
    marks=(("<function=", "</function>"),),
)

FUNCTIONARY_V32 = Family(
    name="functionary-v3.2",
    parse=RecipientReader,
    syntax=CallSyntax(before="", middle="\n", after="", between=f" {RECIPIENT}"),
    marks=((">>>", "recipient"),),
    always=True,
)
