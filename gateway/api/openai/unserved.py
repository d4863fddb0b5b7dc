"""Routes of OpenAI's API and of llama-server's that are known and not served: their callers are told why, and what to
do instead.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.caller import identified
from gateway.errors import NotSupported

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


def unserved_apps(keys: Keys) -> dict[str, ASGIApp]:
    """Return the apps, named as in `gateway.api.routes`."""
    return {name: Unserved(keys, reason) for name, reason in REASONS.items()}


class Unserved:
    """Answers one of these routes with 501, for callers with a key."""

    def __init__(self, keys: Keys, reason: str) -> None:
        self._keys = keys
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await identified(self._keys, scope)
        raise NotSupported(self._reason)
