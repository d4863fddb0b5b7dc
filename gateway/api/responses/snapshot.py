"""Writes the response object at a moment of its life.

Source of the shape: OpenAI's API reference, "The response object"; `timings` is llama-server's.

Writes a response as one whole object.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.http.answers import gathered, in_parts
from gateway.api.responses.output import Output
from gateway.api.responses.records import NewRecord
from gateway.api.responses.request import ResponseRequest
from gateway.api.shapes import timings_object
from gateway.call import Call
from gateway.errors import ContextOverflow, InvalidRequest, PaddockError, QueueFull
from workers.protocol.events import CallEvent, Finished, FinishReason


@dataclass(slots=True)
class Snapshot:
    """The parts of a response that do not change while it grows."""

    asked: ResponseRequest
    call: Call
    is_kept: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_kept = self.asked.store

    def object(self, status: str, output: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self.asked.created_at,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.call.alias,
            "output": list(output),
            **self.asked.echo,
            "store": self.is_kept,
            **more,
        }

    def standing(self) -> dict[str, Any]:
        """Return what identifies the response, and no more: a prompt that is being read tells it at every step."""
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self.asked.created_at,
            "status": "in_progress",
            "model": self.call.alias,
            "output": [],
        }

    def ended(self, output: Sequence[dict[str, Any]], end: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
        cut = end.reason is FinishReason.LENGTH and self.asked.generates
        return self.object(
            "incomplete" if cut else "completed",
            output,
            completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage=_usage(end, num_reasoning_tokens),
            timings=timings_object(end.timings),
        )

    def failed(self, output: Sequence[dict[str, Any]], error: PaddockError) -> dict[str, Any]:
        return self.object("failed", output, error=error_object(error))


def error_object(error: PaddockError) -> dict[str, str]:
    """Return the error's object, with one of the few codes that a response's error may have."""
    code = "server_error"
    if isinstance(error, ContextOverflow):
        code = error.code  # not in the reference, and what OpenAI answers: Codex looks for it
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, QueueFull):
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message}


def _usage(end: Finished, num_reasoning_tokens: int) -> dict[str, Any]:
    usage = end.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class WholeWriter:
    def __init__(self, asked: ResponseRequest, call: Call) -> None:
        self.snapshot = Snapshot(asked, call)
        self._output = Output(asked.id, None, custom=asked.custom_tools)

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            self._output.add(event)

    def parts(self) -> Iterator[bytes]:
        """Yield the `response` object as JSON."""
        return gathered(in_parts(self.response()))

    def response(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the response; `brief` as in `Output.objects`."""
        output = self._output
        if output.end is None:
            raise ValueError("the answer has no end")
        return self.snapshot.ended(output.objects(brief=brief), output.end, output.num_reasoning_tokens)

    def record(self, response: dict[str, Any]) -> NewRecord:
        asked = self.snapshot.asked
        return NewRecord(response=response, input=asked.to_keep, chain=asked.chain)
