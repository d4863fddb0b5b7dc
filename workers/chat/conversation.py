"""The input of a chat template: the part of a request that the prompt is made of.

It is also what is sent to the process that renders; see `workers.chat.render_process`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from workers.chat.variables import ANSWER_SCHEMA
from workers.protocol.catalog import RESERVED, ThinkingMode
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import UNBOUNDED, GenerateRequest, Message, Thinking, Tool


class ChatDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """A model's defaults for chat templates, from its catalog entry; a caller's values take precedence."""

    thinking: ThinkingMode = "auto"
    values: dict[str, Any] = {}
    """The entry's `chat_template_kwargs`."""
    budget: int = UNBOUNDED
    """The entry's `thinking_budget`."""
    message: str = ""
    """The entry's `thinking_budget_message`."""

    def variables(self) -> dict[str, Any]:
        """Return the template's variables; those of `values` take precedence over `thinking`."""
        switched = {} if self.thinking == "auto" else {"enable_thinking": self.thinking == "on"}
        return switched | plain_names(self.values)

    def bounded(self, thinking: Thinking) -> Thinking:
        """Return a caller's `thinking`, with the entry's budget and message where the caller gives none."""
        budget = self.budget if thinking.budget == UNBOUNDED else thinking.budget
        return msgspec.structs.replace(thinking, budget=budget, message=thinking.message or self.message)


UNSET = ChatDefaults()


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    values: dict[str, Any] = {}
    """More variables, by the templates' names for them."""
    template: str = ""
    """Name of one of the model's templates; empty: the one that fits."""
    continued: bool = False
    """Whether the answer goes on where the last message, the assistant's, ends."""


def conversation_of(request: GenerateRequest, defaults: ChatDefaults = UNSET) -> Conversation:
    """Return a request's conversation. Its variables take precedence over `defaults`, and those over the ones that
    templates always get (`workers.chat.variables`).

    Raises CallFailed: INVALID_REQUEST for `template_values` that callers may not set.
    """
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
        values=defaults.variables() | _form_values(request) | _thinking_values(request.thinking) | values,
        template=template,
        continued=continued,
    )


def _is_continued(messages: tuple[Message, ...], values: dict[str, Any]) -> bool:
    """Return whether the answer goes on with the last message: with an assistant's by default, as in llama-server."""
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
    if asked == "reasoning_content" and messages[-1].content:
        raise _refused(
            "`continue_final_message` is 'reasoning_content' and the message has said something after its thought; "
            "leave out its content"
        )
    return bool(asked)


def _form_values(request: GenerateRequest) -> dict[str, Any]:
    """Return the answer's schema, for templates that show it (`ANSWER_SCHEMA` of `workers.chat.variables`)."""
    form = request.constraint
    return {ANSWER_SCHEMA: form.text} if form is not None and form.kind == "json_schema" else {}


def is_thinking_off(request: GenerateRequest, defaults: ChatDefaults = UNSET) -> bool:
    """Return whether the request, or by default the catalog, wants an answer without a thought."""
    values = defaults.variables() | _thinking_values(request.thinking) | request.template_values
    return values.get("enable_thinking") is False


def plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat_template_kwargs` with thinking under the names used here: `thinking` becomes `enable_thinking`, and
    a `reasoning_effort` of "none" switches it off, as in a request.
    """
    named = dict(values)
    if isinstance(named.get("thinking"), bool):
        named.setdefault("enable_thinking", named.pop("thinking"))
    if named.get("reasoning_effort") == "none":
        del named["reasoning_effort"]
        named.setdefault("enable_thinking", False)
    return named


def _thinking_values(thinking: Thinking) -> dict[str, Any]:
    values: dict[str, Any] = {}
    enabled, effort = thinking.enabled, thinking.effort
    if effort == "none":
        enabled, effort = False if enabled is None else enabled, None
    if enabled is None and thinking.budget == 0 and not thinking.message:
        enabled = False
    if enabled is not None:
        values["enable_thinking"] = enabled
    if effort is not None:
        values["reasoning_effort"] = effort
    return values


def _refused(message: str, param: str = "chat_template_kwargs") -> CallFailed:
    return CallFailed(Failure(FailureCode.INVALID_REQUEST, message, param))
