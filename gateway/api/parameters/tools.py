"""Reads tools in OpenAI's shape, also as the older `functions`, and which of them an answer must call."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.parameters.conversation_body import (
    AllowedTools,
    ConversationBody,
    FunctionBody,
    NamedChoice,
    NamedFunction,
    ToolBody,
)
from gateway.api.parameters.faults import shown
from gateway.api.parameters.form import MAX_SCHEMA_DEPTH, too_deep
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import Tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools that an answer may call."""

    tools: tuple[Tool, ...]
    forced: tuple[str, ...]
    """Names of the tools of which it must call one; empty: the model decides."""
    parallel: bool
    """Whether it may call several."""
    as_function: bool
    """Whether the caller speaks the older form: one call, told as `function_call`."""


def read_tools(body: ConversationBody) -> Toolbox:
    """Return the tools and the choice among them. Raises InvalidRequest or UnsupportedParameter."""
    old = bool(body.functions) or body.function_call not in (None, *_OLD_WORDS)
    if old and body.tools:
        message = "`functions` and `function_call` are the older form of `tools`. Send `tools` and `tool_choice` alone."
        raise InvalidRequest(message, param="functions" if body.functions else "function_call")
    if old:
        tools = tuple(_function(function, f"functions.{n}") for n, function in enumerate(body.functions or ()))
        choice, name = body.function_call, "function_call"
    else:
        tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
        tools, choice = _chosen(tools, body.tool_choice)
        name = "tool_choice"
    forced = _forced(choice, tools, name)
    return Toolbox(() if choice == "none" else tools, forced, body.parallel_tool_calls and not old, old)


def _chosen(
    tools: tuple[Tool, ...], choice: str | NamedChoice | None
) -> tuple[tuple[Tool, ...], str | NamedFunction | None]:
    """Return the tools that the model gets to see, and what it must do with them."""
    if choice is None or isinstance(choice, str):
        return tools, choice
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return _allowed(tools, choice.allowed_tools), choice.allowed_tools.mode
    if choice.type != "function" or choice.function is None:
        message = f"`tool_choice` is {shown(choice.type)}. Send `auto`, `none`, `required` or a function of `tools`."
        raise InvalidRequest(message, param="tool_choice")
    return tools, choice.function


def _allowed(tools: tuple[Tool, ...], allowed: AllowedTools) -> tuple[Tool, ...]:
    known, names = {tool.name for tool in tools}, set()
    for n, tool in enumerate(allowed.tools):
        if tool.function is None or tool.function.name not in known:
            path = f"tool_choice.allowed_tools.tools.{n}"
            raise InvalidRequest(f"`{path}` is none of `tools`. Send functions that are.", param=path)
        names.add(tool.function.name)
    return tuple(tool for tool in tools if tool.name in names)


def _forced(choice: str | NamedFunction | None, tools: tuple[Tool, ...], param: str) -> tuple[str, ...]:
    """Return the names of the tools of which the answer must call one."""
    names = tuple(tool.name for tool in tools)
    source, words = ("tools", ("auto", "none", "required")) if param == "tool_choice" else ("functions", _OLD_WORDS)
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required" and "required" in words:
        if not tools:
            raise InvalidRequest(f"`{param}` is `required` and there are no `{source}`. Send some.", param=param)
        return names
    if isinstance(choice, str):
        told = ", ".join(f"`{word}`" for word in words)
        message = f"`{param}` is {shown(choice)}. Send {told} or a function of `{source}`."
        raise InvalidRequest(message, param=param)
    if choice.name not in names:
        message = f"`{param}` names {shown(choice.name)}, which is none of `{source}`. Send one of them."
        raise InvalidRequest(message, param=param)
    return (choice.name,)


_OLD_WORDS = ("auto", "none")


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type != "function" or tool.function is None:
        message = f"`{path}` is of type {shown(tool.type)}. Send `type: function` with a `function`."
        raise UnsupportedParameter(message, param=path)
    return _function(tool.function, f"{path}.function")


def _function(function: FunctionBody, path: str) -> Tool:
    if too_deep(function.parameters):
        message = f"`{path}.parameters` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send a flatter schema."
        raise InvalidRequest(message, param=f"{path}.parameters")
    return Tool(function.name, function.description, function.parameters, strict=bool(function.strict))
