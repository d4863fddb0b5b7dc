"""Reads input items into the form that is stored and listed, and converts items to messages.

The id of an item contains the id of its response. Source: OpenAI's API reference, "Responses", input items.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Any, TypeVar

from gateway.api.intake.decoding import let_loop_run
from gateway.api.parameters.base import quote
from gateway.api.parameters.custom_tools import arguments_of
from gateway.api.parameters.messages import PART_END, Content, Part
from gateway.api.responses.body import ItemBody
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from workers.protocol.requests import Message, ToolCall

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
MEDIA = frozenset({"input_image", "input_file", "input_audio", "image", "file"})
TEXTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def read_input(given: str | list[ItemBody] | None, response_id: str) -> tuple[Item, ...]:
    """Return the items of a request's `input`.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the item by its path."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (_message(input_id(response_id, "message", 0), "user", [{"type": "input_text", "text": given}]),)
    return tuple(_item(item, f"input.{n}", response_id, n) for n, item in enumerate(given))


def reference_of(item: Item) -> str | None:
    """Return the id of the item that a reference stands for; None: the item is no reference."""
    return str(item["id"]) if item["type"] == "item_reference" else None


def _item(item: ItemBody, path: str, response_id: str, number: int) -> Item:
    kind = item.type or ("message" if item.role is not None else "item_reference")
    if kind == "item_reference":
        return {"type": kind, "id": _require(item.id, f"{path}.id")}
    if kind not in TYPES:
        message = f"`{path}` is of type {quote(kind)}. Send items of the types {', '.join(TYPES)}."
        raise UnsupportedParameter(message, param=path)
    own_id = item.id or input_id(response_id, kind, number)
    if kind == "message":
        return _message(own_id, _require(item.role, f"{path}.role"), _parts(item, path))
    if kind == "reasoning":
        parts = [{"type": "reasoning_text", "text": text} for text in _texts(item.content, f"{path}.content")]
        summary = [{"type": "summary_text", "text": text} for text in _texts(item.summary, f"{path}.summary")]
        return {"id": own_id, "type": kind, "summary": summary, "content": parts, "status": "completed"}
    call_id = _require(item.call_id, f"{path}.call_id")
    if kind in OUTPUTS:
        if item.output is None:
            raise _missing(f"{path}.output")
        texts = _texts(item.output, f"{path}.output")
        return {"id": own_id, "type": kind, "call_id": call_id, "output": "".join(texts), "status": "completed"}
    if kind == "custom_tool_call":
        name, text = _require(item.name, f"{path}.name"), _require(item.input, f"{path}.input")
        return {"id": own_id, "type": kind, "call_id": call_id, "name": name, "input": text, "status": "completed"}
    name, arguments = _require(item.name, f"{path}.name"), _require(item.arguments, f"{path}.arguments")
    said = {"call_id": call_id, "name": name, "arguments": arguments, "status": "completed"}
    return {"id": own_id, "type": kind, **said}


def _message(id_: str, role: str, content: list[Item]) -> Item:
    return {"id": id_, "type": "message", "role": role, "status": "completed", "content": content}


def _parts(item: ItemBody, path: str) -> list[Item]:
    if item.content is None:
        raise _missing(f"{path}.content")
    texts = _texts(item.content, f"{path}.content")
    if item.role == "assistant":
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]


def _texts(content: Content | list[Part] | None, path: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [_text(part, f"{path}.{n}") for n, part in enumerate(content)]


def _text(part: Part, path: str) -> str:
    if part.type in MEDIA:
        message = f"`{path}` is of type {quote(part.type)}; the models here read text only. Send text parts."
        raise NotSupported(message, param=path)
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


def messages_of(items: Iterable[Item]) -> tuple[Message, ...]:
    """Return the messages of a conversation. The assistant's reasoning, text and calls in one turn make one message."""
    turns = _Turns()
    names: dict[str, str] = {}
    for item in items:
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
                call_id = item["call_id"]
                turns.other(Message(role="tool", content=item["output"], name=names.get(call_id), tool_call_id=call_id))
            case _:
                texts = [part["text"] for part in item["content"]]
                if item["role"] == "assistant":
                    turns.said("".join(texts))
                else:
                    turns.other(Message(role=item["role"], content=PART_END.join(texts)))
        let_loop_run()
    return turns.messages()


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
