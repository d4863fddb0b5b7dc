"""Turns messages into the form that a chat template reads; what the template can't show is written as text.

Nothing is left out: if need be, system messages are moved into the user's messages, and tools, calls and results are
written as text. llama.cpp does part of this (`workaround` in common/chat.cpp); that part is done here in the same way,
so that prompts are the same.

A template may show tools but not how the model calls them (LFM2, Granite 3), show calls but no tools (DeepSeek R1), or
show neither (Gemma 2). The text then has the form that the model's family writes (`workers.chat.answers`); the family
is known by marks in the template. For other models calls look like Hermes' and Qwen's, which most models have seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from workers.chat.abilities import Abilities, Form, thinking_parts, typed
from workers.chat.environment import to_json
from workers.protocol.requests import Message, Tool, ToolCall

Call = tuple[str, Any]
"""A tool call: the tool's name, and the arguments as an object."""

EXAMPLE: Call = ("function_name", {"argument": "value"})


def signatures(tools: Sequence[Tool], source: str) -> str:
    """Return a text that describes the tools and how to call them. `source`: the template's text."""
    lines = [
        to_json({"name": tool.name, "description": tool.description or "", "parameters": tool.schema()})
        for tool in tools
    ]
    listed = "\n".join(lines)
    return (
        "You can call functions. Each line between <tools> and </tools> describes one, with a JSON Schema of its "
        f"arguments:\n<tools>\n{listed}\n</tools>\nTo call a function, answer with its name and its arguments in this "
        f"form:\n{calls([EXAMPLE], source)}"
    )


def calls(made: Sequence[Call], source: str) -> str:
    """Return a text with the calls as the model writes them. `source`: the template's text."""
    write = next((write for marks, write in WRITERS if all(mark in source for mark in marks)), _hermes)
    return write(made)


def result(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _hermes(made: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in made)


def _granite(made: Sequence[Call]) -> str:
    return f"<|tool_call|>[{', '.join(map(_object, made))}]"


def _lfm2(made: Sequence[Call]) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_python, made))}]<|tool_call_end|>"


def _gemma(made: Sequence[Call]) -> str:
    return f"```tool_code\n[{', '.join(map(_python, made))}]\n```"


def _deepseek_r1(made: Sequence[Call]) -> str:
    return _deepseek(f"function<｜tool▁sep｜>{name}\n```json\n{to_json(arguments)}\n```" for name, arguments in made)


def _deepseek_v3_1(made: Sequence[Call]) -> str:
    return _deepseek(f"{name}<｜tool▁sep｜>{to_json(arguments)}" for name, arguments in made)


def _deepseek(bodies: Iterable[str]) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _object(call: Call) -> str:
    name, arguments = call
    return to_json({"name": name, "arguments": arguments})


def _python(call: Call) -> str:
    name, arguments = call
    if not isinstance(arguments, dict):
        return f"{name}({to_json(arguments)})"
    return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in arguments.items())})"


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


WRITERS: Sequence[tuple[Sequence[str], Callable[[Sequence[Call]], str]]] = (
    (("<|tool_list_start|>",), _lfm2),
    (("List of tools: [",), _lfm2),
    (("<start_of_turn>",), _gemma),
    (("<|tool_call|>",), _granite),
    (("<｜tool▁sep｜>", "```json"), _deepseek_r1),
    (("<｜tool▁sep｜>",), _deepseek_v3_1),
)
"""Marks -> function that writes calls. The first entry whose marks are all in a template's text is used."""


SHORT_ID_CHARS = 9


def fit(messages: Sequence[Message], tools: Sequence[Tool], abilities: Abilities, source: str) -> list[Message]:
    """Return messages that the template can show. `source`: the template's text."""
    fit = _with_names(messages)
    if "<|channel|>" not in source:  # only gpt-oss has the role of a developer, as in llama-server
        fit = [replace(one, role="system") if one.role == "developer" else one for one in fit]
    if not abilities.tool_calls:
        fit = [_call_in_words(one, source) for one in fit]
    elif abilities.null_content or abilities.words_apart:
        fit = [part for one in fit for part in _words_apart(one)]
    if not abilities.tool_results:
        fit = [_result_in_words(one) for one in fit]
    if abilities.tool_calls and not abilities.parallel_tool_calls:
        fit = _one_call_at_a_time(fit)
    if abilities.short_ids:
        fit = [_with_short_ids(one) for one in fit]
    if tools and not abilities.tools:
        fit = _with_opening(fit, signatures(tools, source))
    if abilities.system_role and not abilities.later_system:
        return [*fit[:1], *_system_in_users(fit[1:])]
    return fit if abilities.system_role else _system_in_users(fit)


def repair_roles(messages: Sequence[Message]) -> list[Message]:
    """Return messages for a template that refuses the order of roles: at most one system message, at the start, then
    user and assistant in turn, as far as joining neighbouring messages can achieve that."""
    opening, rest = list(messages[:1]), messages[1:]
    if opening and opening[0].role != "system":
        opening, rest = [], messages
    rest = [_as_user(one) if one.role in ("system", "developer") else one for one in rest]
    if opening and all(one.role != "user" for one in rest):
        opening, rest = [], [_as_user(opening[0]), *rest]
    return [*opening, *_joined(rest)]


def forms(messages: Iterable[Message], abilities: Abilities, source: str) -> list[Form]:
    """Return messages in OpenAI's form. Their `content` is text, since many templates append to it, or a list of parts
    if the template reads nothing else."""
    thinking = "reasoning_content" not in source and _reads(source, "thinking")
    made = [_form(message, abilities, thinking=thinking) for message in messages]
    if _reads(source, "tool_responses") and "OpenAI Chat Completions" not in source:
        made = _with_responses(made)
    return [typed(one) for one in made] if abilities.typed_content and not abilities.string_content else made


def _reads(source: str, field: str) -> bool:
    """Return whether a template's text reads this field of a message."""
    return f".{field}" in source or f"['{field}']" in source


def tool_form(tool: Tool) -> Form:
    """Return a tool in OpenAI's form, always with a description and parameters, as in llama-server."""
    parameters = tool.schema() if tool.parameters is not None else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _form(message: Message, abilities: Abilities, *, thinking: bool) -> Form:
    form: Form = {"role": message.role, "content": message.content or ""}
    if message.reasoning is not None:
        form["reasoning_content"] = message.reasoning
        if abilities.thinking_parts:
            form["content"] = thinking_parts(message.reasoning, message.content or "")
        if thinking:
            form["thinking"] = message.reasoning
            if message.tool_calls and not abilities.thinking_parts:  # beside a call, these templates show only one text
                form["content"] = ""
    if message.name is not None:
        form["name"] = message.name
    if message.tool_call_id is not None:
        form["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        form["tool_calls"] = [_call_form(call, as_object=abilities.object_arguments) for call in message.tool_calls]
        if abilities.null_content and not form["content"]:
            form["content"] = None
    return form


def _with_responses(messages: Sequence[Form]) -> list[Form]:
    """Put tool results, and the assistant's text after them, into the message with the calls: Gemma 4's first
    templates read them there."""
    folded: list[Form] = []
    for form in messages:
        last = folded[-1] if folded and folded[-1].get("tool_calls") else None
        if last is not None and form["role"] == "tool":
            response = {"name": form.get("name", ""), "response": _json_or_text(form["content"])}
            last.setdefault("tool_responses", []).append(response)
        elif last is not None and form["role"] == "assistant" and not (last["content"] or form.get("tool_calls")):
            last["content"] = form["content"]
        elif form.get("tool_calls") and form["content"]:  # the template would write the content after the results
            folded += [{"role": form["role"], "content": form["content"]}, {**form, "content": ""}]
        else:
            folded.append(form)
    return folded


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _call_form(call: ToolCall, *, as_object: bool) -> Form:
    arguments = arguments_of(call) if as_object else call.arguments or "{}"
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def arguments_of(call: ToolCall) -> Any:
    """Return a call's arguments as an object; if they are no JSON object, as the text that the model once wrote."""
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Add the tool's name to results without one: many templates write the name, and few callers send it."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        unnamed = message.role == "tool" and message.name is None
        named.append(replace(message, name=names.get(message.tool_call_id or "")) if unnamed else message)
    return named


def _call_in_words(message: Message, source: str) -> Message:
    if not message.tool_calls:
        return message
    written = calls([(call.name, arguments_of(call)) for call in message.tool_calls], source)
    return replace(message, content=_paragraphs(message.content, written), tool_calls=())


def _result_in_words(message: Message) -> Message:
    if message.role != "tool":
        return message
    return Message("user", result(message.content or ""))


def _words_apart(message: Message) -> list[Message]:
    """Return a message with text and calls as two messages, the text first; any other message unchanged."""
    if not message.tool_calls or not message.content:
        return [message]
    return [replace(message, tool_calls=()), replace(message, content=None, reasoning=None)]


def _one_call_at_a_time(messages: Sequence[Message]) -> list[Message]:
    """Return messages with one call each, followed by the call's result if the conversation has it."""
    results = {one.tool_call_id: one for one in messages if one.role == "tool"}
    taken: set[str | None] = set()
    single: list[Message] = []
    for message in messages:
        if len(message.tool_calls) < 2:
            single += [] if message.role == "tool" and message.tool_call_id in taken else [message]
            continue
        for number, call in enumerate(message.tool_calls):
            first = number == 0
            content, reasoning = (message.content, message.reasoning) if first else (None, None)
            single.append(replace(message, content=content, reasoning=reasoning, tool_calls=(call,)))
            if call.id in results:
                single.append(results[call.id])
                taken.add(call.id)
    return single


def _with_short_ids(message: Message) -> Message:
    if message.tool_call_id is not None:
        message = replace(message, tool_call_id=_short(message.tool_call_id))
    if message.tool_calls:
        message = replace(message, tool_calls=tuple(replace(one, id=_short(one.id)) for one in message.tool_calls))
    return message


def _short(id: str) -> str:
    if len(id) == SHORT_ID_CHARS and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:SHORT_ID_CHARS]


def _with_opening(messages: Sequence[Message], text: str) -> list[Message]:
    """Return messages with `text` at the end of the first system message, or in a new system message."""
    if messages and messages[0].role in ("system", "developer"):
        return [replace(messages[0], content=_paragraphs(messages[0].content, text)), *messages[1:]]
    return [Message("system", text), *messages]


def _system_in_users(messages: Sequence[Message]) -> list[Message]:
    """Move each system message to the start of the user's next message, on its own line, as llama-server does."""
    held: list[str] = []
    merged: list[Message] = []
    for message in messages:
        if message.role in ("system", "developer"):
            held.append(message.content or "")
        elif held and message.role == "user":
            merged.append(replace(message, content="\n".join([*held, message.content or ""])))
            held = []
        else:
            merged.append(message)
    return [*merged, Message("user", "\n".join(held))] if held else merged


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which neighbours of the same role are joined into one; results of tools stay apart."""
    joined: list[Message] = []
    for role, group in groupby(messages, key=lambda one: one.role):
        alike = list(group)
        joined += alike if role == "tool" else [_together(alike)]
    return joined


def _together(messages: Sequence[Message]) -> Message:
    first = messages[0]
    if len(messages) == 1:
        return first
    return replace(
        first,
        content=_paragraphs(*(one.content for one in messages)),
        reasoning=_paragraphs(*(one.reasoning for one in messages)) or None,
        tool_calls=tuple(call for one in messages for call in one.tool_calls),
    )


def _as_user(message: Message) -> Message:
    return replace(message, role="user")


def _paragraphs(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)
