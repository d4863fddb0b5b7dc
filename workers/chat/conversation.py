"""What a chat template is given: the part of a request that the prompt is made of.

This is also what travels to the process that renders; see `workers.chat.render_process`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import GenerateRequest, Message, Thinking, Tool

RESERVED = frozenset({"messages", "tools", "functions", "raise_exception", "strftime_now"})
"""Variables that are not a caller's to set."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    values: dict[str, Any] = {}
    """More variables, by the names that templates know."""
    template: str = ""
    """Name of one of the model's templates; empty: the one that fits."""
    continued: bool = False
    """The last message is the assistant's, and the answer goes on where it ends."""


def conversation_of(request: GenerateRequest) -> Conversation:
    """Raises CallFailed: INVALID_REQUEST for `template_values` that are not a caller's to set."""
    values = dict(request.template_values)
    if taken := sorted(RESERVED & values.keys()):
        raise _refused(f"`chat_template_kwargs` may not set {taken[0]!r}; leave it out")
    template = values.pop("chat_template", None) or ""
    if not isinstance(template, str):
        raise _refused("`chat_template` must be the name of one of the model's templates")
    continued = _is_continued(request.messages, values)
    return Conversation(
        messages=request.messages,
        tools=request.tools,
        values=_thinking_values(request.thinking) | values,
        template=template,
        continued=continued,
    )


def _is_continued(messages: tuple[Message, ...], values: dict[str, Any]) -> bool:
    """As llama-server has it: an assistant's message at the end is continued, unless the caller says otherwise."""
    asked = values.pop("continue_final_message", None)
    possible = bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
    if asked is None:
        return possible and not values.get("add_generation_prompt")
    if asked and values.get("add_generation_prompt"):
        raise _refused("`continue_final_message` and `add_generation_prompt` contradict each other; set one of them")
    if asked and not possible:
        raise _refused(
            "`continue_final_message` needs a last message of the assistant's without tool calls", "messages"
        )
    return bool(asked)


def _thinking_values(thinking: Thinking) -> dict[str, Any]:
    """By every name that templates give to these two."""
    values: dict[str, Any] = {}
    enabled, effort = thinking.enabled, thinking.effort
    if effort == "none":
        enabled, effort = False, None
    if enabled is None and thinking.budget == 0:
        enabled = False
    if enabled is not None:
        values["enable_thinking"] = values["thinking"] = enabled
    if effort is not None:
        values["reasoning_effort"] = values["reasoning_strength"] = values["thinking_effort"] = effort
    return values


def _refused(message: str, param: str = "chat_template_kwargs") -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message, param))
