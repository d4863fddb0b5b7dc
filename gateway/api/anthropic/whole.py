"""Writes a message of Anthropic's dialect as one whole object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from gateway.api.answers import in_parts
from gateway.api.anthropic.shapes import message_id, stop_reason, usage_object
from gateway.call import Call
from workers.protocol.events import CallEvent, Finished, Reasoning, Text, ToolCallDelta


class WholeWriter:
    """Collects one whole message from the events: its blocks in the order in which they began."""

    def __init__(self, call: Call) -> None:
        self._model = call.alias
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        """Block -> the pieces of its text: joined piece by piece, a long text would be copied with each."""
        self._calls: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._end: Finished | None = None

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            match event:
                case Text():
                    self._add_to("text", event.text)
                case Reasoning():
                    self._add_to("thinking", event.text)
                case ToolCallDelta():
                    self._call(event)[1].append(event.arguments)
                case Finished():
                    self._end = event

    def parts(self) -> Iterator[bytes]:
        """Yield the message as JSON; the call must have finished."""
        end = self._end
        if end is None:
            raise ValueError("the answer has no end")
        for block, texts in zip(self._blocks, self._texts, strict=True):
            if texts:
                block[block["type"]] = "".join(texts)
        for block, arguments in self._calls.values():
            block["input"] = _object("".join(arguments))
        usage = end.usage
        return in_parts(
            {
                "id": message_id(),
                "type": "message",
                "role": "assistant",
                "model": self._model,
                "content": self._blocks,
                "stop_reason": stop_reason(end),
                "stop_sequence": end.stop,
                "usage": usage_object(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            }
        )

    def _add_to(self, kind: str, text: str) -> None:
        """Add text to the last block, or to a new one. `kind`: the block's type and the name of its text."""
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            self._begin({"type": kind, kind: "", **signature})
        self._texts[-1].append(text)

    def _begin(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        self._texts.append([])

    def _call(self, event: ToolCallDelta) -> tuple[dict[str, Any], list[str]]:
        known = self._calls.get(event.index)
        if known is None:
            block: dict[str, Any] = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            self._begin(block)
            known = self._calls[event.index] = (block, [])
        return known


def _object(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object; if the answer was cut off inside of them, it has what came of them."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
