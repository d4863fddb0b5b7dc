"""Reads Anthropic's messages and blocks into canonical messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from gateway.api.anthropic.body import Block, Content, MessageBody
from gateway.api.parameters.faults import shown
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.requests import Message, ToolCall

THOUGHTS = ("thinking", "redacted_thinking")

BILLING = re.compile(r"\A(x-anthropic-billing-header:.{0,500}?\bcch=)\w{5};")
"""The beginning of Claude Code's system prompt. Its stamp differs in every request; no prefix cache gets past that."""
NO_STAMP = r"\g<1>fffff;"

_ENCODER = json.JSONEncoder(ensure_ascii=False)


def read_conversation(system: Content | None, messages: Sequence[MessageBody]) -> tuple[Message, ...]:
    """Return the canonical messages. Raises InvalidRequest, NotSupported."""
    read: list[Message] = []
    if system is not None:
        text = _system(system, "system")
        if text:
            read.append(Message("system", text))
    for n, message in enumerate(messages):
        path = f"messages.{n}"
        if message.role == "user":
            read += _user(message.content, f"{path}.content")
        elif message.role == "system":
            read.append(Message("system", _system(message.content, f"{path}.content")))
        else:
            read.append(_assistant(message.content, f"{path}.content"))
    if not messages:  # llama-server does the same: it answers the instructions alone
        read.append(Message("user", ""))
    return tuple(read)


def _user(content: Content, path: str) -> Iterator[Message]:
    """Yield a user's messages. Each tool result is one; the texts between and after results are joined as lines."""
    if isinstance(content, str):
        yield Message("user", content)
        return
    texts: list[str] = []
    for n, block in enumerate(content):
        if block.type == "tool_result":
            if texts:
                yield Message("user", "\n".join(texts))
                texts = []
            yield _result(block, f"{path}.{n}")
        else:
            texts.append(_text_of(block, f"{path}.{n}"))
    if texts or not content:
        yield Message("user", "\n".join(texts))


def _result(block: Block, path: str) -> Message:
    if block.tool_use_id is None:
        raise _missing(f"{path}.tool_use_id", "the id of the tool use that this is the result of")
    content = block.content
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "".join(
            _text_of(_inner(part, f"{path}.content.{n}"), f"{path}.content.{n}") for n, part in _each(content)
        )
    else:
        raise InvalidRequest(f"`{path}.content` is {shown(content)}. Send a string or blocks.", param=f"{path}.content")
    return Message("tool", f"Error: {text}" if block.is_error else text, tool_call_id=block.tool_use_id)


def _each(content: list[Any]) -> Iterator[tuple[int, Any]]:
    return iter(enumerate(content))


def _inner(part: Any, path: str) -> Block:
    try:
        return Block.model_validate(part)
    except ValidationError:
        raise InvalidRequest(f"`{path}` is {shown(part)}. Send a block of type `text`.", param=path) from None


def _assistant(content: Content, path: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for n, block in enumerate(content):
        if block.type in THOUGHTS:
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{path}.{n}"))
        else:
            texts.append(_text_of(block, f"{path}.{n}"))
    return Message("assistant", "\n".join(texts) or None, reasoning="".join(thoughts) or None, tool_calls=tuple(calls))


def _call(block: Block, path: str) -> ToolCall:
    if block.id is None:
        raise _missing(f"{path}.id", "the id that the tool use came with")
    if not block.name:
        raise _missing(f"{path}.name", "the tool's name")
    return ToolCall(block.id, block.name, _arguments(block.input or {}))


def _arguments(value: dict[str, Any]) -> str:
    """Return what `json.dumps` does, in small steps: in one, 8 MiB of numbers hold the GIL for 0.2 s."""
    return "".join(_ENCODER.iterencode(value))


def _system(content: Content, path: str) -> str:
    """Return the system prompt. Blocks follow each other as they are, as for llama-server."""
    if isinstance(content, str):
        return BILLING.sub(NO_STAMP, content)
    return "".join(BILLING.sub(NO_STAMP, _text_of(block, f"{path}.{n}")) for n, block in enumerate(content))


def _text_of(block: Block, path: str) -> str:
    if block.type == "text":
        if block.text is None:
            raise _missing(f"{path}.text", "a string")
        return block.text
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if block.type in ("image", "document"):
        message = f"`{path}` is of type `{block.type}`; the models here read text only. Send text blocks."
        raise NotSupported(message, param=path)
    message = f"`{path}` is of type {shown(block.type)}, which does not belong here. Send text blocks."
    raise InvalidRequest(message, param=path)


def _missing(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` is missing. Send {what}.", param=path)
