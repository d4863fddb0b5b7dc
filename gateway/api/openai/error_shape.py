"""Writes errors in OpenAI's form, and answers the routes of its API that have nothing but one.

Writes errors in OpenAI's form; routes of no dialect use it as well.

Source: OpenAI's API reference, "Error".

Routes of OpenAI's API and of llama-server's that are known and not served: their callers are told why, and what to
do instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.dialect import ErrorShape, Handler
from gateway.call import Principal
from gateway.errors import ContextOverflow, NotSupported, PaddockError
from gateway.telemetry.trail import Trail

_encode = msgspec.json.Encoder().encode


class OpenAiErrors:
    def __init__(self, prompt: str = "messages") -> None:
        """`prompt`: the route's name for the model's input, which workers call `messages`."""
        self._names = {"messages": prompt}

    def status(self, error: PaddockError) -> int:
        return error.status

    def body(self, error: PaddockError, trail: Trail) -> bytes:
        return error_body(error, self._names)


OPENAI: ErrorShape = OpenAiErrors()
COMPLETIONS: ErrorShape = OpenAiErrors("prompt")
RESPONSES: ErrorShape = OpenAiErrors("input")


def error_body(error: PaddockError, names: Mapping[str, str] | None = None) -> bytes:
    """Return `{"error": {...}}`. `names`: a worker's name for a parameter -> the route's name.

    The numbers of a prompt that is too long are llama-server's, whose own page shows them.
    """
    param = (names or {}).get(error.param or "", error.param)
    inner: dict[str, Any] = {"message": error.message, "type": error.type, "param": param, "code": error.code}
    if isinstance(error, ContextOverflow) and error.n_ctx:
        inner |= {"n_prompt_tokens": error.num_prompt_tokens, "n_ctx": error.n_ctx}
    return _encode({"error": inner})


REASONS: Mapping[str, str] = {
    "moderations": "Paddock has no model that moderates texts. Ask a chat model to judge them, with a "
    "`response_format` for its verdict.",
    "conversations": "Paddock keeps no conversations by an id of their own. Continue a stored response by "
    "`previous_response_id`, or send the whole conversation as `input`.",
    "compact": "Paddock shortens no conversations. Send `truncation: auto`, which leaves out the oldest turns, or have "
    "a model sum them up and go on from that.",
    "transcriptions": "Paddock takes text, and no sound yet. Have it written down elsewhere, and send the text.",
    "streams": "Paddock knows a stream by an id of its own, not by a conversation. Ask with the header "
    "`x-resume-grace`, and go on from the last event with `last-event-id`.",
    "control": "Paddock ends no thought that is under way. Send its bound with the request: `reasoning_budget_tokens`.",
    "agent_tools": "Paddock runs no tools. Send yours as `tools` of a chat, run what the model calls, and send what "
    "came of it.",
    "model_files": "Paddock fetches and deletes no models for callers. List them in the catalog, with where they "
    "come from.",
    "model_news": "Paddock sends no news of models. Ask `GET /models` again, which tells the state of each.",
}
"""Name of the route -> what its callers are told."""


def unserved_handlers() -> dict[str, Handler]:
    """Return the handlers, named as in `gateway.api.routes`."""
    return {name: partial(_refuse, reason) for name, reason in REASONS.items()}


async def _refuse(reason: str, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    raise NotSupported(reason)
