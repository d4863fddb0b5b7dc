"""Reads messages and tools in OpenAI's form, pydantic models, into canonical ones.

Source: OpenAI's API reference, "Create chat completion", with its older `functions` and `function_call`;
`reasoning_content` is DeepSeek's and llama-server's, `reasoning` vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import Body, Entry, Loose, quote, text_or_parts
from gateway.api.parameters.custom_tools import CUSTOM, CustomFormat, arguments_of, custom_tool
from gateway.api.parameters.media_parts import MEDIA, ContentWriter, Gallery, read_media_part, refuse_unseen
from gateway.api.parameters.response_format import schema_json
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from workers.protocol.requests import Medium, Message, Role, Tool, ToolCall

MAX_MESSAGES = 10_000
MAX_PARTS = 4_000
"""Maximum parts of one message; more are refused. They are validated without a pause for other threads."""
MAX_TOOLS = 128


class Part(Loose):
    """A part of any type; `gateway.api.parameters.media_parts` reads those fields that can hold media."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    file_data: Any = None
    file_url: Any = None
    file_id: Any = None
    filename: Any = None
    detail: Any = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


class FunctionCallBody(Loose):
    name: str
    arguments: str


class CustomCallBody(Loose):
    name: str
    input: str


class ToolCallBody(Loose):
    id: str
    type: str = "function"
    function: FunctionCallBody | None = None
    custom: CustomCallBody | None = None


class MessageBody(Entry):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCallBody | None = None
    audio: dict[str, Any] | None = None


class FunctionBody(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomBody(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    format: CustomFormat | None = None


class ToolBody(Loose):
    type: str
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class NamedFunction(Loose):
    name: str


class NamedTool(Loose):
    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    @property
    def named(self) -> NamedFunction | None:
        """The tool that is named, a function or a custom one; None: there is none, or it is of another type."""
        return {"function": self.function, CUSTOM: self.custom}.get(self.type)


class AllowedTools(Loose):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedChoice(NamedTool):
    allowed_tools: AllowedTools | None = None


def _choice_kind(value: Any) -> str:
    return "<named>" if isinstance(value, dict) else "<word>"


ToolChoice = Annotated[
    Annotated[str, Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(_choice_kind),
]
FunctionChoice = Annotated[
    Annotated[str, Tag("<word>")] | Annotated[NamedFunction, Tag("<named>")],
    Discriminator(_choice_kind),
]


class ConversationBody(Body):
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: FunctionChoice | None = None


def read_messages(
    messages: Sequence[MessageBody], attachments: Attachments
) -> tuple[tuple[Message, ...], tuple[Medium, ...]]:
    """Return the messages and their media. Raises InvalidRequest, UnsupportedParameter or NotSupported, with the path
    of the fault."""
    called: dict[str, str] = {}
    reader = _Reader(Gallery(attachments.max_text_chars), attachments)
    read = tuple(_message(message, n, called, reader) for n, message in enumerate(messages))
    return read, reader.gallery.media


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the contents of one request's messages."""

    gallery: Gallery
    attachments: Attachments

    def content(self, content: Content | None, path: str) -> tuple[str | None, tuple[int, ...]]:
        """Return the text of a content, and the places of its media. Text parts are joined by line breaks, as in
        llama-server.

        Raises UnsupportedParameter for unknown types of parts, NotSupported, InvalidRequest."""
        if content is None or isinstance(content, str):
            return content, ()
        writer = ContentWriter(self.gallery)
        for n, part in enumerate(content):
            name = f"{path}.{n}"
            if part.type in MEDIA:
                writer.add(self.gallery.counted(read_media_part(part, name, self.attachments), name))
            else:
                writer.add(_part_text(part, name))
        return writer.content, writer.places


def _message(message: MessageBody, number: int, called: dict[str, str], reader: _Reader) -> Message:
    """Return the canonical message. Notes calls of the older form in `called`: function name -> id of its last call."""
    path = f"messages.{number}"
    if message.audio is not None:
        raise NotSupported(
            f"`{path}.audio` names an answer that was spoken; Paddock keeps none. Leave it out.", param=path
        )
    if message.role == "function":
        return _function_result(message, path, reader, called.get(message.name or "", f"call_{number}"))
    tool_calls = tuple(_tool_call(call, f"{path}.tool_calls.{n}") for n, call in enumerate(message.tool_calls or ()))
    if message.function_call is not None:
        id_ = called[message.function_call.name] = f"call_{number}"
        tool_calls += (ToolCall(id_, message.function_call.name, message.function_call.arguments),)
    if tool_calls and message.role != "assistant":
        remedy = "Only messages of role `assistant` carry tool calls."
        raise InvalidRequest(f"`{path}.tool_calls` does not fit role `{message.role}`. {remedy}", param=path)
    content, places = reader.content(message.content, f"{path}.content")
    if content is None and message.role == "assistant":
        content = message.refusal
    reasoning = (message.reasoning_content or message.reasoning) if message.role == "assistant" else None
    if content is None and not tool_calls and not reasoning:
        raise InvalidRequest(f"`{path}.content` is missing. Send a string.", param=f"{path}.content")
    if message.role == "tool" and message.tool_call_id is None:
        remedy = "Send the id of the tool call that this message answers."
        raise InvalidRequest(f"`{path}.tool_call_id` is missing. {remedy}", param=f"{path}.tool_call_id")
    role: Role = message.role
    return Message(
        role=role,
        content=content,
        reasoning=reasoning,
        name=message.name,
        tool_calls=tool_calls,
        tool_call_id=message.tool_call_id,
        media=places,
    )


def _function_result(message: MessageBody, path: str, reader: _Reader, call_id: str) -> Message:
    if not message.name:
        remedy = "Send the name of the function whose result this is."
        raise InvalidRequest(f"`{path}.name` is missing. {remedy}", param=f"{path}.name")
    content, places = reader.content(message.content, f"{path}.content")
    return Message(role="tool", content=content or "", name=message.name, tool_call_id=call_id, media=places)


def _part_text(part: Part, path: str) -> str:
    refuse_unseen(part.type, path)
    name = "refusal" if part.type == "refusal" else "text"
    if part.type != name:
        raise UnsupportedParameter(f"`{path}` is of type {quote(part.type)}. Send text parts.", param=path)
    text = part.refusal if name == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"`{path}.{name}` is missing. Send a string.", param=f"{path}.{name}")
    return text


def _tool_call(call: ToolCallBody, path: str) -> ToolCall:
    if call.type == CUSTOM and call.custom is not None:
        return ToolCall(id=call.id, name=call.custom.name, arguments=arguments_of(call.custom.input))
    if call.type != "function" or call.function is None:
        message = f"`{path}` is no call of a function or of a custom tool. Send `type: function` or `type: custom`."
        raise UnsupportedParameter(message, param=path)
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """Holds the tools that an answer can call, and what the caller demands of the answer's tool calls."""

    tools: tuple[Tool, ...]
    forced: tuple[str, ...]
    """Names of the tools of which the answer must call one; empty: the model decides whether to call any."""
    parallel: bool
    """Whether the answer may have several tool calls."""
    as_function: bool
    """Whether the caller uses the older form: one call at most, written as `function_call`."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools, whose input is a text and not JSON."""


def read_tools(body: ConversationBody) -> Toolbox:
    """Return the tools, and what the body demands of tool calls. Raises InvalidRequest or UnsupportedParameter."""
    old = bool(body.functions) or body.function_call not in (None, *_OLD_WORDS)
    if old and body.tools:
        message = "`functions` and `function_call` are the older form of `tools`. Send `tools` and `tool_choice` alone."
        raise InvalidRequest(message, param="functions" if body.functions else "function_call")
    if old:
        tools = tuple(_function(function, f"functions.{n}") for n, function in enumerate(body.functions or ()))
        choice, name = body.function_call, "function_call"
    else:
        tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
        tools, choice = _visible_tools(tools, body.tool_choice)
        name = "tool_choice"
    forced = _forced_names(choice, tools, name)
    custom = frozenset(tool.custom.name for tool in body.tools or () if tool.type == CUSTOM and tool.custom is not None)
    return Toolbox(() if choice == "none" else tools, forced, body.parallel_tool_calls and not old, old, custom)


def _visible_tools(
    tools: tuple[Tool, ...], choice: str | NamedChoice | None
) -> tuple[tuple[Tool, ...], str | NamedFunction | None]:
    """Return the tools that the model gets to see, and the choice: a word such as `auto`, or the function to call."""
    if choice is None or isinstance(choice, str):
        return tools, choice
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return _allowed_tools(tools, choice.allowed_tools), choice.allowed_tools.mode
    if choice.named is None:
        message = f"`tool_choice` is {quote(choice.type)}. Send `auto`, `none`, `required` or one of `tools`."
        raise InvalidRequest(message, param="tool_choice")
    return tools, choice.named


def _allowed_tools(tools: tuple[Tool, ...], allowed: AllowedTools) -> tuple[Tool, ...]:
    known, names = {tool.name for tool in tools}, set()
    for n, tool in enumerate(allowed.tools):
        if tool.named is None or tool.named.name not in known:
            path = f"tool_choice.allowed_tools.tools.{n}"
            raise InvalidRequest(f"`{path}` is none of `tools`. Send tools that are.", param=path)
        names.add(tool.named.name)
    return tuple(tool for tool in tools if tool.name in names)


def _forced_names(choice: str | NamedFunction | None, tools: tuple[Tool, ...], param: str) -> tuple[str, ...]:
    """Return the names of the tools of which the answer must call one; empty: the model decides whether to call any."""
    names = tuple(tool.name for tool in tools)
    source, words = ("tools", ("auto", "none", "required")) if param == "tool_choice" else ("functions", _OLD_WORDS)
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required" and "required" in words:
        if not tools:
            raise InvalidRequest(f"`{param}` is `required` and there are no `{source}`. Send some.", param=param)
        return names
    if isinstance(choice, str):
        told = ", ".join(f"`{word}`" for word in words)
        message = f"`{param}` is {quote(choice)}. Send {told} or a function of `{source}`."
        raise InvalidRequest(message, param=param)
    if choice.name not in names:
        message = f"`{param}` names {quote(choice.name)}, which is none of `{source}`. Send one of them."
        raise InvalidRequest(message, param=param)
    return (choice.name,)


_OLD_WORDS = ("auto", "none")


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type == CUSTOM and tool.custom is not None:
        one = tool.custom
        return custom_tool(one.name, one.description, one.format, f"{path}.custom.format")
    if tool.type != "function" or tool.function is None:
        remedy = "Send `type: function` with a `function`, or `type: custom` with a `custom`."
        raise UnsupportedParameter(f"`{path}` is of type {quote(tool.type)}. {remedy}", param=path)
    return _function(tool.function, f"{path}.function")


def _function(function: FunctionBody, path: str) -> Tool:
    schema = None if function.parameters is None else schema_json(function.parameters, f"{path}.parameters")
    return Tool(function.name, function.description, schema, strict=bool(function.strict))
