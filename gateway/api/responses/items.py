"""Reads input items into the form that is stored and listed, and converts items to messages.

The id of an item contains the id of its response. Source: OpenAI's API reference, "Responses", input items.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from gateway.api.intake.decoding import let_loop_run
from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import quote
from gateway.api.parameters.custom_tools import arguments_of
from gateway.api.parameters.media_parts import (
    MEDIA,
    ContentWriter,
    Gallery,
    read_media_part,
    refuse_unseen,
)
from gateway.api.parameters.messages import Content, Part
from gateway.api.responses.body import ItemBody
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import Medium, Message, ToolCall

RESPONSE = "resp_"
_ITEM = re.compile(r"[a-z]{2,5}_([0-9a-f]{32})_[io]?[0-9]{1,6}")
_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def new_response_id() -> str:
    return RESPONSE + secrets.token_hex(16)


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def stream_of(response_id: str) -> str:
    """Return the id of the stream that carries a response's events."""
    return response_id.removeprefix(RESPONSE)


def output_id(response_id: str, kind: str, index: int) -> str:
    return f"{PREFIXES[kind]}_{stream_of(response_id)}_{index}"


def input_id(response_id: str, kind: str, index: int) -> str:
    return f"{PREFIXES[kind]}_{stream_of(response_id)}_i{index}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to; None: Paddock did not make this item id."""
    found = _ITEM.fullmatch(item_id)
    return RESPONSE + found[1] if found else None


Item = dict[str, Any]
NeededT = TypeVar("NeededT")

OUTPUTS = ("function_call_output", "custom_tool_call_output")
TYPES = ("message", "function_call", "custom_tool_call", *OUTPUTS, "reasoning", "item_reference")
TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


KEPT_FIELDS = ("image_url", "detail", "input_audio", "file", "file_data", "file_url", "filename")
"""The fields of a part with a medium that its item keeps, as they were sent."""


def read_input(given: str | list[ItemBody] | None, response_id: str, attachments: Attachments) -> tuple[Item, ...]:
    """Return the items of a request's `input`. Files that were cut out of it stay tokens of `attachments`.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the item by its path."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (_message(input_id(response_id, "message", 0), "user", [{"type": "input_text", "text": given}]),)
    return tuple(_item(item, f"input.{n}", response_id, n, attachments) for n, item in enumerate(given))


def reference_of(item: Item) -> str | None:
    """Return the id of the item that a reference stands for; None: the item is no reference."""
    return str(item["id"]) if item["type"] == "item_reference" else None


def _item(item: ItemBody, path: str, response_id: str, number: int, attachments: Attachments) -> Item:
    kind = item.type or ("message" if item.role is not None else "item_reference")
    if kind == "item_reference":
        return {"type": kind, "id": _require(item.id, f"{path}.id")}
    if kind not in TYPES:
        message = f"`{path}` is of type {quote(kind)}. Send items of the types {', '.join(TYPES)}."
        raise UnsupportedParameter(message, param=path)
    own_id = item.id or input_id(response_id, kind, number)
    if kind == "message":
        return _message(own_id, _require(item.role, f"{path}.role"), _parts(item, path, attachments))
    if kind == "reasoning":
        thoughts = [{"type": "reasoning_text", "text": text} for text in _texts(item.content, f"{path}.content")]
        summary = [{"type": "summary_text", "text": text} for text in _texts(item.summary, f"{path}.summary")]
        return {"id": own_id, "type": kind, "summary": summary, "content": thoughts, "status": "completed"}
    call_id = _require(item.call_id, f"{path}.call_id")
    if kind in OUTPUTS:
        if item.output is None:
            raise _missing(f"{path}.output")
        parts = _contents(item.output, f"{path}.output", attachments)
        output = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else _input_parts(parts)
        return {"id": own_id, "type": kind, "call_id": call_id, "output": output, "status": "completed"}
    if kind == "custom_tool_call":
        name, text = _require(item.name, f"{path}.name"), _require(item.input, f"{path}.input")
        return {"id": own_id, "type": kind, "call_id": call_id, "name": name, "input": text, "status": "completed"}
    name, arguments = _require(item.name, f"{path}.name"), _require(item.arguments, f"{path}.arguments")
    said = {"call_id": call_id, "name": name, "arguments": arguments, "status": "completed"}
    return {"id": own_id, "type": kind, **said}


def _message(id_: str, role: str, content: list[Item]) -> Item:
    return {"id": id_, "type": "message", "role": role, "status": "completed", "content": content}


def _parts(item: ItemBody, path: str, attachments: Attachments) -> list[Item]:
    if item.content is None:
        raise _missing(f"{path}.content")
    if item.role == "assistant":
        said = _texts(item.content, f"{path}.content")
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in said]
    return _input_parts(_contents(item.content, f"{path}.content", attachments))


def _input_parts(parts: Sequence[str | Item]) -> list[Item]:
    return [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]


def _contents(content: Content, path: str, attachments: Attachments) -> list[str | Item]:
    """Return the texts of a content, and its parts with media as they were sent."""
    if isinstance(content, str):
        return [content]
    return [
        _kept(part, f"{path}.{n}", attachments) if part.type in MEDIA else _text(part, f"{path}.{n}")
        for n, part in enumerate(content)
    ]


def _kept(part: Part, path: str, attachments: Attachments) -> Item:
    """Return a part with a medium as its item keeps it. Raises InvalidRequest, NotSupported."""
    read_media_part(part, path, attachments)
    fields = {name: value for name in KEPT_FIELDS if (value := getattr(part, name)) is not None}
    return {"type": part.type, **fields}


def _texts(content: Content | list[Part] | None, path: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_text(part, f"{path}.{n}") for n, part in enumerate(content)]


def _text(part: Part, path: str) -> str:
    refuse_unseen(part.type, path)
    if part.type == "refusal":
        return _require(part.refusal, f"{path}.refusal")
    if part.type not in TEXTS:
        raise UnsupportedParameter(f"`{path}` is of type {quote(part.type)}. Send text parts.", param=path)
    return _require(part.text, f"{path}.text")


def _require(value: NeededT | None, path: str) -> NeededT:
    if value is None:
        raise _missing(path)
    return value


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` is missing. Send it.", param=path)


def messages_of(
    items: Iterable[Item], attachments: Attachments, num_before: int = 0
) -> tuple[tuple[Message, ...], tuple[Medium, ...]]:
    """Return the messages of a conversation and their media. The assistant's reasoning, text and calls in one turn make
    one message. `num_before`: items of the conversation before the request's own.

    Raises InvalidRequest, NotSupported."""
    turns, gallery = _Turns(), Gallery(attachments.max_text_chars)
    names: dict[str, str] = {}
    for number, item in enumerate(items, -num_before):
        path = f"input.{number}" if number >= 0 else "previous_response_id"
        match item["type"]:
            case "reasoning":
                turns.thought("".join(part["text"] for part in item["content"] or item["summary"]))
            case "function_call":
                names[item["call_id"]] = item["name"]
                turns.called(ToolCall(item["call_id"], item["name"], item["arguments"]))
            case "custom_tool_call":
                names[item["call_id"]] = item["name"]
                turns.called(ToolCall(item["call_id"], item["name"], arguments_of(item["input"])))
            case "function_call_output" | "custom_tool_call_output":
                call_id, output = item["call_id"], item["output"]
                writer = ContentWriter(gallery, joint="")
                parts = [output] if isinstance(output, str) else output
                _write(writer, gallery, parts, f"{path}.output", attachments)
                turns.other(Message("tool", writer.content, None, names.get(call_id), (), call_id, media=writer.places))
            case _:
                if item["role"] == "assistant":
                    turns.said("".join([part["text"] for part in item["content"]]))
                else:
                    writer = ContentWriter(gallery)
                    _write(writer, gallery, item["content"], f"{path}.content", attachments)
                    turns.other(Message(role=item["role"], content=writer.content, media=writer.places))
        let_loop_run()
    return turns.messages(), gallery.media


def _write(
    writer: ContentWriter, gallery: Gallery, parts: Iterable[str | Item], path: str, attachments: Attachments
) -> None:
    for n, part in enumerate(parts):
        if isinstance(part, str):
            writer.add(part)
        elif part["type"] in MEDIA:
            found = read_media_part(Part.model_validate(part), f"{path}.{n}", attachments)
            writer.add(gallery.counted(found, f"{path}.{n}"))
        else:
            writer.add(part["text"])


class _Turns:
    """Builds messages from items: the messages that are complete, and the assistant's turn that may still grow."""

    def __init__(self) -> None:
        self._done: list[Message] = []
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def thought(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._end()
        if text:
            self._reasoning.append(text)

    def said(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._end()
        self._content = text

    def called(self, call: ToolCall) -> None:
        self._calls.append(call)

    def other(self, message: Message) -> None:
        self._end()
        self._done.append(message)

    def messages(self) -> tuple[Message, ...]:
        self._end()
        return tuple(self._done)

    def _end(self) -> None:
        if self._reasoning or self._content is not None or self._calls:
            calls, reasoning = tuple(self._calls), "".join(self._reasoning) or None
            turn = Message(role="assistant", content=self._content, reasoning=reasoning, tool_calls=calls)
            self._done.append(turn)
            self._reasoning, self._content, self._calls = [], None, []
