"""How a model is to think, and what else its chat template gets.

Sources: OpenAI's API reference (`reasoning_effort`); tools/server/README.md and server-common.cpp of llama.cpp
(`reasoning_format`, `reasoning_budget_tokens`, `thinking_budget_tokens`, `chat_template_kwargs`); Hugging Face's chat
templates (`documents`, `enable_thinking`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.api.parameters.base import Body
from gateway.api.parameters.faults import shown
from gateway.api.parameters.form import MAX_SCHEMA_DEPTH, too_deep
from gateway.errors import InvalidRequest
from workers.protocol.requests import Thinking

MAX_DOCUMENTS = 1000
MAX_KWARGS = 64
MAX_EFFORT_CHARS = 32
MAX_BUDGET = 2**31 - 1

Budget = Annotated[int, Field(ge=-1, le=MAX_BUDGET)]


class ThinkingBody(Body):
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=MAX_EFFORT_CHARS)] | None = None
    reasoning_format: Literal["auto", "none", "deepseek"] = "auto"
    reasoning_budget_tokens: Budget | None = None
    thinking_budget_tokens: Budget | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_KWARGS)] | None = None
    documents: Annotated[list[dict[str, Any] | str], Field(max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def read_thinking(body: ThinkingBody) -> Thinking:
    """Raises InvalidRequest."""
    enabled = _enabled(body)
    effort = body.reasoning_effort
    if effort is None:
        within = (body.chat_template_kwargs or {}).get("reasoning_effort")
        effort = within if isinstance(within, str) else None
    if effort == "none":
        enabled, effort = False, None
    # As in llama-server, the name that begins with "reasoning" goes first, and -1 leaves it open.
    budgets = (body.reasoning_budget_tokens, body.thinking_budget_tokens)
    budget = next((one for one in budgets if one is not None), -1)
    return Thinking(enabled=enabled, effort=effort, budget=budget, split=body.reasoning_format != "none")


def read_template_values(body: ThinkingBody) -> dict[str, Any]:
    """More variables for the template. Raises InvalidRequest where they are nested too deeply."""
    values = dict(body.chat_template_kwargs or {})
    values.pop("enable_thinking", None)
    if isinstance(values.get("reasoning_effort"), str):
        del values["reasoning_effort"]
    for name, given in (("chat_template_kwargs", values), ("documents", body.documents)):
        if too_deep(given):
            message = f"`{name}` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send flatter values."
            raise InvalidRequest(message, param=name)
    for name in ("documents", "add_generation_prompt", "continue_final_message"):
        given = getattr(body, name)
        if given is not None:
            values[name] = given
    return values


def _enabled(body: ThinkingBody) -> bool | None:
    enabled = (body.chat_template_kwargs or {}).get("enable_thinking")
    if enabled is not None and not isinstance(enabled, bool):
        path = "chat_template_kwargs.enable_thinking"
        raise InvalidRequest(f"`{path}` is {shown(enabled)}. Send true or false.", param=path)
    return enabled
