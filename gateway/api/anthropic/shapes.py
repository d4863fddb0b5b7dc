"""Makes the small objects that whole messages and streams have in common.

Source: Anthropic's API reference, "Create a Message" and "Streaming messages".
"""

from __future__ import annotations

import os
from typing import Any

from workers.protocol.events import Finished, FinishReason

REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


def message_id() -> str:
    return "msg_" + os.urandom(12).hex()


def stop_reason(end: Finished) -> str:
    return "stop_sequence" if end.stop is not None else REASONS[end.reason]


def usage_object(num_prompt: int, num_cached: int, num_answer: int) -> dict[str, Any]:
    """Return `usage`, in which `input_tokens` are those that were not cached."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_answer,
    }
