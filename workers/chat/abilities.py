"""Finds out what a chat template can show by rendering small test conversations with it.

The test conversations contain marked words, and the output is searched for these words. llama.cpp finds out the same by
watching its own interpreter (common/jinja/caps.cpp); callers get the abilities under llama.cpp's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from workers.chat.conversation import EFFORT_NAMES, PRESERVED, spoken_turn_of, turn_marks_of

Form = dict[str, Any]
"""A message, a tool or a tool call, as the dictionary that templates read."""

Render = Callable[[Sequence[Form], Sequence[Form] | None, Mapping[str, Any]], str | None]
"""A function that takes messages, tools and more variables and returns the prompt; None: the template refuses them."""

USER, SYSTEM, RESULT, THOUGHT, SAID = "Uq7x", "Sq7x", "Rq7x", "Tq7x", "Aq7x"
TOOL, OTHER_TOOL, ARGUMENT, VALUE = "tool_q7a", "tool_q7b", "argq7x", "valq7x"
SHORT_ID, OTHER_SHORT_ID = "q7a123456", "q7b123456"
LONG_ID = "call_q7a12345678"

QUESTION: Form = {"role": "user", "content": USER}
ANSWER: Form = {"role": "assistant", "content": "ok"}
SIGNATURES: tuple[Form, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {
                "type": "object",
                "properties": {"other": {"type": "string", "description": "What to do."}},
                "required": ["other"],
            },
        },
    }
    for name in (TOOL, OTHER_TOOL)
)


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities and needs of one chat template. The first nine fields are llama-server's `chat_template_caps`."""

    string_content: bool = True
    typed_content: bool = False
    tools: bool = True
    tool_calls: bool = True
    parallel_tool_calls: bool = True
    system_role: bool = True
    preserve_reasoning: bool = False
    reasoning_effort: bool = False
    object_arguments: bool = True
    """Whether the arguments of tool calls must be an object, not text."""
    tool_results: bool = True
    thinking_parts: bool = False
    """Whether the template shows a thought of an earlier turn only if it is a part of the message's content."""
    null_content: bool = False
    """Whether tool calls are shown only in messages whose content is null."""
    words_apart: bool = False
    """Whether the template leaves out the tool calls of a message that also has text."""
    later_system: bool = True
    """Whether system messages are also shown in the middle of a conversation."""
    short_ids: bool = False
    """Whether the ids of tool calls must be nine letters or digits."""
    tool_list: bool = False
    """Whether the template needs an empty list, not null, for a request without tools."""
    thought_open: str = ""
    """Text before the thought in an assistant's turn, whitespace included; empty: turns have no thought."""
    thought_close: str = ""
    """Text between the thought and the answer in an assistant's turn."""

    def caps(self) -> dict[str, bool]:
        names = self.__struct_fields__[:9]
        return {f"supports_{name}": getattr(self, name) for name in names}


def find_abilities(render: Render, source: str) -> Abilities:
    """Return a template's abilities, found by some 25 renderings. `source`: the template's text, which is searched for
    the marks of thoughts."""
    return _Probe(render, source).abilities()


class _Probe:
    """Finds the abilities one by one. If the template reads content only as a list of parts, later tests send lists."""

    def __init__(self, render: Render, source: str) -> None:
        self._render = render
        self._source = source
        self._typed = False
        self._no_tools: Sequence[Form] | None = None

    def abilities(self) -> Abilities:
        string, typed = self._content()
        system = self._shows_system([{"role": "system", "content": SYSTEM}, QUESTION])
        tools = self._tools()
        null_content, object_arguments, calls = self._calls()
        thought_open, thought_close = self._thought()
        return Abilities(
            string_content=string,
            typed_content=typed,
            tools=tools,
            tool_calls=calls,
            parallel_tool_calls=calls
            and self._both(self._called([SHORT_ID, OTHER_SHORT_ID], null=null_content, as_text=not object_arguments)),
            system_role=system,
            later_system=system
            and self._shows_system([QUESTION, ANSWER, {"role": "system", "content": SYSTEM}, QUESTION]),
            preserve_reasoning=self._preserves_reasoning(),
            reasoning_effort=self._knows_effort(),
            object_arguments=calls and object_arguments,
            tool_results=self._shows_results(tools, calls, null=null_content, as_text=not object_arguments),
            thinking_parts=self._wants_thinking_parts(),
            null_content=null_content,
            words_apart=calls
            and TOOL not in (self._called([SHORT_ID], null=False, as_text=not object_arguments, words="ok") or TOOL),
            short_ids=calls and self._called([LONG_ID], null=null_content, as_text=not object_arguments) is None,
            tool_list=self._no_tools is not None,
            thought_open=thought_open,
            thought_close=thought_close,
        )

    def _content(self) -> tuple[bool, bool]:
        parts = [{"type": "text", "text": USER}]
        for no_tools in (None, ()):
            self._no_tools = no_tools
            text = self._plain([QUESTION])
            listed = self._plain([{"role": "user", "content": parts}])
            if text is not None or listed is not None:
                break
        else:
            self._no_tools = None
        string = USER in (text or "")
        typed = USER in (listed or "") and not any(quoted in (listed or "") for quoted in ("'type'", '"type"'))
        self._typed = typed and not string
        return string or not typed, typed

    def _tools(self) -> bool:
        """Return whether the template shows tools; some templates do so only beside a system message."""
        bare = self._asked([QUESTION], SIGNATURES)
        beside = self._asked([{"role": "system", "content": SYSTEM}, QUESTION], SIGNATURES)
        return TOOL in (bare or "") or TOOL in (beside or "")

    def _calls(self) -> tuple[bool, bool, bool]:
        """Return whether content must be null, whether arguments are objects, and whether calls are shown at all."""
        for null in (False, True):
            for as_text in (False, True):
                text = self._called([SHORT_ID], null=null, as_text=as_text)
                if text is not None and _called_well(text):
                    return null, not as_text, True
        return False, True, False

    def _called(self, ids: Sequence[str], *, null: bool, as_text: bool, words: str = "") -> str | None:
        """Render a conversation in which the assistant calls tools. No tools are listed or, if the template refuses
        that, tools of another name: so the names of the called tools, if the output has them, come from the calls."""
        arguments: Any = f'{{"{ARGUMENT}": "{VALUE}"}}' if as_text else {ARGUMENT: VALUE}
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name in zip(ids, (TOOL, OTHER_TOOL), strict=False)
        ]
        content = None if null else words
        messages: list[Form] = [QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}]
        messages += [
            {"role": "tool", "content": RESULT, "tool_call_id": id, "name": name}
            for id, name in zip(ids, (TOOL, OTHER_TOOL), strict=False)
        ]
        bare = self._asked(messages, self._no_tools)
        return bare if bare is not None else self._asked(messages, [_renamed(one) for one in SIGNATURES])

    def _shows_results(self, tools: bool, calls: bool, *, null: bool, as_text: bool) -> bool:
        """Return whether the template shows tool results; False if it shows neither tools nor calls: the model may then
        not know the role `tool`."""
        if calls:
            return RESULT in (self._called([SHORT_ID], null=null, as_text=as_text) or "")
        result = {"role": "tool", "content": RESULT, "tool_call_id": SHORT_ID, "name": TOOL}
        return tools and RESULT in (self._asked([QUESTION, ANSWER, result], self._no_tools) or "")

    def _both(self, text: str | None) -> bool:
        return text is not None and TOOL in text and OTHER_TOOL in text

    def _preserves_reasoning(self) -> bool:
        thought = {**ANSWER, "reasoning_content": THOUGHT, "thinking": THOUGHT}
        messages = [QUESTION, thought, QUESTION, ANSWER, QUESTION]
        return THOUGHT in (self._asked(messages, self._no_tools, {**PRESERVED, "enable_thinking": True}) or "")

    def _wants_thinking_parts(self) -> bool:
        thought = {**ANSWER, "reasoning_content": THOUGHT, "thinking": THOUGHT}
        parts = {"role": "assistant", "content": thinking_parts(THOUGHT, "ok")}
        as_field, as_parts = (
            self._asked([QUESTION, answer, QUESTION], self._no_tools, PRESERVED) or "" for answer in (thought, parts)
        )
        quoted = any(mark in as_parts for mark in ("'thinking'", '"thinking"'))
        return THOUGHT not in as_field and THOUGHT in as_parts and not quoted

    def _thought(self) -> tuple[str, str]:
        """Return the texts around a thought in an assistant's turn: the marks, and what the template adds to them.
        If the template does not render thoughts: only the marks. If the model's turns have no thoughts: empty texts."""
        marks = turn_marks_of(self._source)
        if marks is None:
            return "", ""
        if spoken_turn_of(self._source) is not None:
            return marks.open, marks.close
        answer = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "thinking": THOUGHT}
        values = {**PRESERVED, "enable_thinking": True, "add_generation_prompt": False}
        text = self._asked([QUESTION, answer], self._no_tools, values) or ""
        before, _, behind = text.rpartition(THOUGHT)
        opened, close = before.rfind(marks.open.strip()), behind.partition(SAID)[0]
        if opened < 0 or marks.close.strip() not in close:
            return marks.open, marks.close
        return before[opened:], close

    def _knows_effort(self) -> bool:
        low, high = (
            self._asked([QUESTION], self._no_tools, {"enable_thinking": True, **dict.fromkeys(EFFORT_NAMES, effort)})
            for effort in ("low", "high")
        )
        return low != high

    def _shows_system(self, messages: Sequence[Form]) -> bool:
        return SYSTEM in (self._asked(messages, self._no_tools) or "")

    def _plain(self, messages: Sequence[Form]) -> str | None:
        return self._render(messages, self._no_tools, {})

    def _asked(
        self, messages: Sequence[Form], tools: Sequence[Form] | None, values: Mapping[str, Any] | None = None
    ) -> str | None:
        if self._typed:
            messages = [typed(message) for message in messages]
        return self._render(messages, tools, values or {})


def typed(message: Form) -> Form:
    """Return the message with its text as a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def thinking_parts(thought: str, text: str) -> list[Form]:
    """Return an assistant's content, a thought and a text, as the list of parts that Mistral's templates read."""
    said = [{"type": "text", "text": text}] if text else []
    return [{"type": "thinking", "thinking": thought}, *said]


def _called_well(text: str) -> bool:
    """Return whether a call is shown as JSON or in the model's own form, but not as Python or inside a string."""
    return (
        all(word in text for word in (TOOL, ARGUMENT, VALUE))
        and f"'{ARGUMENT}'" not in text
        and f'\\"{ARGUMENT}' not in text
    )


def _renamed(signature: Form) -> Form:
    """Return a tool's signature under another name, so that the tool's own name in an output comes from calls only."""
    return {**signature, "function": {**signature["function"], "name": "unrelated"}}
