"""Reads messages in OpenAI's shape into canonical ones."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.parameters.conversation_body import Content, MessageBody, Part, ToolCallBody
from gateway.api.parameters.faults import shown
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from workers.protocol.requests import Message, Role, ToolCall

MEDIA = frozenset({"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "input_video", "file"})

PART_END = "\n"
"""The separator that llama-server puts between a message's text parts, where a template takes no parts."""


def read_messages(messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Return the messages. Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming one by its path."""
    called: dict[str, str] = {}
    return tuple(_message(message, n, called) for n, message in enumerate(messages))


def _message(message: MessageBody, number: int, called: dict[str, str]) -> Message:
    """`called`: name of a function that was called in the older form -> the id that its call got here."""
    path = f"messages.{number}"
    if message.audio is not None:
        raise NotSupported(f"`{path}.audio` is not supported: the models here read text. Leave it out.", param=path)
    if message.role == "function":
        return _function_result(message, path, called.get(message.name or "", f"call_{number}"))
    tool_calls = tuple(_tool_call(call, f"{path}.tool_calls.{n}") for n, call in enumerate(message.tool_calls or ()))
    if message.function_call is not None:
        id_ = called[message.function_call.name] = f"call_{number}"
        tool_calls += (ToolCall(id_, message.function_call.name, message.function_call.arguments),)
    if tool_calls and message.role != "assistant":
        remedy = "Only messages of role `assistant` carry tool calls."
        raise InvalidRequest(f"`{path}.tool_calls` does not fit role `{message.role}`. {remedy}", param=path)
    content = read_text(message.content, f"{path}.content")
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
    )


def _function_result(message: MessageBody, path: str, call_id: str) -> Message:
    if not message.name:
        remedy = "Send the name of the function whose result this is."
        raise InvalidRequest(f"`{path}.name` is missing. {remedy}", param=f"{path}.name")
    content = read_text(message.content, f"{path}.content")
    return Message(role="tool", content=content or "", name=message.name, tool_call_id=call_id)


def read_text(content: Content | None, path: str) -> str | None:
    """Return the content as text; text parts are lines, as for llama-server.

    Raises NotSupported for images and sounds, UnsupportedParameter for what is not known.
    """
    if content is None or isinstance(content, str):
        return content
    return PART_END.join([_part_text(part, f"{path}.{n}") for n, part in enumerate(content)])


def _part_text(part: Part, path: str) -> str:
    if part.type in MEDIA:
        message = f"`{path}` is of type {shown(part.type)}; the models here read text only. Send text parts."
        raise NotSupported(message, param=path)
    name = "refusal" if part.type == "refusal" else "text"
    if part.type != name:
        raise UnsupportedParameter(f"`{path}` is of type {shown(part.type)}. Send text parts.", param=path)
    text = part.refusal if name == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"`{path}.{name}` is missing. Send a string.", param=f"{path}.{name}")
    return text


def _tool_call(call: ToolCallBody, path: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        raise UnsupportedParameter(f"`{path}` is not a function call. Send `type: function`.", param=path)
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
