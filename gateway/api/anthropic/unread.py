"""Parameters of Anthropic's messages that are not read (`gateway.api.parameters.unread`)."""

from __future__ import annotations

from typing import Any

from gateway.api.parameters.others import OTHERS_IGNORED, OTHERS_REFUSED
from gateway.api.parameters.unread import Refusal

_LABEL = "a label for the provider's own bookkeeping"
_CACHE = "the prompt cache finds what it knows by itself"

IGNORED = {
    **OTHERS_IGNORED,
    "cache_control": _CACHE,
    "inference_geo": "the models run where the workers are",
    "metadata": _LABEL,
}
"""Parameters that are accepted and have no effect on the answer, and why."""

_CLEAR_THOUGHTS = "clear_thinking_20251015"

THOUGHTS_ONLY: tuple[dict[str, Any], ...] = (
    {"edits": []},
    {"edits": [{"type": _CLEAR_THOUGHTS, "keep": "all"}]},
    {"edits": [{"type": _CLEAR_THOUGHTS, "keep": {"type": "thinking_turns", "value": 1}}]},
)
"""The values that Claude Code sends: which earlier thoughts a model sees is up to its template in any case."""

THREAD = "thread"
"""The parameter by which Anthropic's SDK first tries to leave a tool runner's conversation with the server."""

REFUSED = {
    **OTHERS_REFUSED,
    "container": Refusal("Paddock runs no code; leave it out."),
    "context_management": Refusal("The client shortens its conversations; leave it out.", THOUGHTS_ONLY),
    "mcp_servers": Refusal("Paddock calls no servers for the model; offer their tools in `tools`.", ([],)),
    "service_tier": Refusal("There is one tier.", ("auto", "standard_only"), is_hint=True),
    "speed": Refusal("There is one speed.", ("standard",), is_hint=True),
    THREAD: Refusal("Paddock keeps no messages; send the whole conversation without it."),
}
