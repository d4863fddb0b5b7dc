"""Parameters of the Responses API that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from gateway.api.parameters.others import OTHERS_IGNORED, OTHERS_REFUSED
from gateway.api.parameters.unread import Refusal

IGNORED = {
    **OTHERS_IGNORED,
    "client_metadata": "what a client says of itself, as Codex does",
    "max_tool_calls": "it bounds calls of the provider's own tools, of which there are none",
    "moderation": "there is no moderation to choose",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
}
"""Parameters that are accepted and have no effect on the answer, and why."""

REFUSED: dict[str, Refusal] = {
    **OTHERS_REFUSED,
    "context_management": Refusal("Leave it out, and send the items that the model is to see."),
    "conversation": Refusal("Use `previous_response_id`, or send the whole conversation as `input`."),
    "prompt": Refusal("Paddock keeps no prompt templates; send the text as `input` and `instructions`."),
    "service_tier": Refusal("There is one tier.", ("auto", "default"), is_hint=True),
}
