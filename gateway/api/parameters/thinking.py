"""Reads the settings of a model's thinking, and further variables for its chat template.

Sources: OpenAI's API reference (`reasoning_effort`); tools/server/README.md and server-common.cpp of llama.cpp
(`reasoning_format`, `reasoning_budget_tokens`, `thinking_budget_tokens`, `reasoning_budget_message`,
`chat_template_kwargs`); Hugging Face's chat templates (`documents`, `enable_thinking`); Anthropic's API reference and
those of DeepSeek, Z.ai and Moonshot (`thinking`); OpenRouter's (`reasoning`) and Ollama's (`think`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Loose, quote
from gateway.api.parameters.response_format import MAX_SCHEMA_DEPTH, is_too_deep, to_json
from gateway.errors import InvalidRequest
from workers.protocol.requests import MAX_BUDGET_MESSAGE_CHARS, MAX_THINKING_BUDGET, UNBOUNDED, Thinking

MAX_DOCUMENTS = 1000
MAX_KWARGS = 64
MAX_EFFORT_CHARS = 32

Budget = Annotated[int, Field(ge=-1, le=MAX_THINKING_BUDGET)]
Effort = Annotated[str, Field(min_length=1, max_length=MAX_EFFORT_CHARS)]
TemplateKwargs = Annotated[dict[str, Any], Field(max_length=MAX_KWARGS)]


class ThinkingSwitch(Loose):
    """The object form of `thinking`: whether to think, and the maximum tokens of thought (`budget_tokens`)."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_THINKING_BUDGET)] | None = None


def switch_or_flag(value: Any) -> str:
    return "<object>" if isinstance(value, dict | ThinkingSwitch) else "<flag>"


Switch = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[ThinkingSwitch, Tag("<object>")], Discriminator(switch_or_flag)
]


class ThinkingBody(Body):
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] = "auto"
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    reasoning_budget_message: Annotated[str, Field(max_length=MAX_BUDGET_MESSAGE_CHARS)] = ""
    enable_thinking: bool | None = None
    thinking: Switch | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    documents: Annotated[list[dict[str, Any] | str], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None


class RoutedReasoning(Loose):
    """OpenRouter's `reasoning` object."""

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_THINKING_BUDGET)] | None = None
    enabled: bool | None = None
    exclude: bool = False
    """Without effect: answers have their thoughts in any case, and callers can leave them unread."""


class ChatThinkingBody(ThinkingBody):
    reasoning: RoutedReasoning | None = None
    think: bool | Effort | None = None


@dataclass(frozen=True, slots=True)
class OtherWords:
    """Settings of thinking under other APIs' names. Settings under OpenAI's or llama-server's names take precedence."""

    effort: str | None = None
    enabled: bool | None = None
    budget: int | None = None


def other_words(body: ChatThinkingBody) -> OtherWords:
    """Return what `reasoning` and `think` set. An effort or budget turns thinking on, as in OpenRouter and Ollama."""
    routed, think = body.reasoning or RoutedReasoning(), body.think
    effort = routed.effort or (think if isinstance(think, str) else None)
    enabled = routed.enabled
    if enabled is None:
        enabled = think if isinstance(think, bool) else True if effort or routed.max_tokens else None
    return OtherWords(effort, enabled, routed.max_tokens)


def read_thinking(body: ThinkingBody, others: OtherWords = OtherWords()) -> Thinking:
    """Return the settings of thinking. If several parameters switch thinking on or off, the first of these counts:
    `chat_template_kwargs` (as in llama-server), `enable_thinking`, `thinking`, an effort of "none", `others`.

    Raises InvalidRequest."""
    kwargs = body.chat_template_kwargs or {}
    switch = body.thinking if isinstance(body.thinking, ThinkingSwitch) else None
    effort = body.reasoning_effort
    if effort is None:
        within = kwargs.get("reasoning_effort")
        effort = within if isinstance(within, str) else others.effort
    enabled = enabled_by_kwargs(kwargs)
    if enabled is None:
        enabled = body.enable_thinking
    if enabled is None and body.thinking is not None:
        enabled = is_on(switch) if switch is not None else body.thinking is True
    if effort == "none":
        enabled, effort = enabled is True, None
    if enabled is None:
        enabled = others.enabled
    # As in llama-server, the name that begins with "reasoning" goes first, and -1 means no bound.
    within_switch = switch.budget_tokens if switch is not None else None
    budgets = (body.reasoning_budget_tokens, body.thinking_budget_tokens, within_switch, others.budget)
    budget = next((one for one in budgets if one is not None), UNBOUNDED)
    split = body.reasoning_format != "none"
    return Thinking(enabled=enabled, effort=effort, budget=budget, message=body.reasoning_budget_message, split=split)


def is_on(switch: ThinkingSwitch) -> bool | None:
    """Return whether `thinking`, sent as an object, switches thinking on; None: the model's default decides."""
    return None if switch.type == "auto" else switch.type != "disabled"


def enabled_by_kwargs(kwargs: dict[str, Any]) -> bool | None:
    """Return the switch in `chat_template_kwargs`: `enable_thinking`, else `thinking`. Raises InvalidRequest."""
    enabled = kwargs.get("enable_thinking")
    if enabled is not None and not isinstance(enabled, bool):
        path = "chat_template_kwargs.enable_thinking"
        raise InvalidRequest(f"`{path}` is {quote(enabled)}. Send true or false.", param=path)
    if enabled is None and isinstance(kwargs.get("thinking"), bool):
        return bool(kwargs["thinking"])
    return enabled


def read_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the variables among `chat_template_kwargs` that `read_thinking` does not read.

    Raises InvalidRequest if they are nested too deeply."""
    values = dict(kwargs or {})
    if values.pop("enable_thinking", None) is None and isinstance(values.get("thinking"), bool):
        del values["thinking"]
    if isinstance(values.get("reasoning_effort"), str):
        del values["reasoning_effort"]
    _check_depth("chat_template_kwargs", values)
    return values


def read_template_values(body: ThinkingBody) -> str:
    """Return a body's chat template variables, except those of thinking, as `GenerateRequest.template_values` has them.

    Raises InvalidRequest for deep nesting."""
    values = read_kwargs(body.chat_template_kwargs)
    _check_depth("documents", body.documents)
    for name in ("documents", "add_generation_prompt", "continue_final_message"):
        given = getattr(body, name)
        if given is not None:
            values[name] = given
    return values_json(values)


def template_values_of(kwargs: dict[str, Any] | None, **values: Any) -> str:
    """Return `chat_template_kwargs`, those of thinking included, and further variables as `read_template_values` does.

    Raises InvalidRequest for deep nesting."""
    _check_depth("chat_template_kwargs", kwargs)
    return values_json({**(kwargs or {}), **values})


def values_json(values: dict[str, Any]) -> str:
    """Return chat template variables as JSON; empty if there are none."""
    return to_json(values) if values else ""


def _check_depth(name: str, given: Any) -> None:
    if is_too_deep(given):
        message = f"`{name}` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send flatter values."
        raise InvalidRequest(message, param=name)
