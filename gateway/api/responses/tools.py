"""Reads the tools of a Responses request, and which of them an answer may or must call."""

from __future__ import annotations

from typing import Any

from gateway.api.parameters.faults import shown
from gateway.api.parameters.form import MAX_SCHEMA_DEPTH, too_deep
from gateway.api.responses.body import ChoiceBody, NamedTool, ResponsesBody, ToolBody
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import Tool


def read_tools(body: ResponsesBody) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Tools that the model sees, and the names of those of which it must call one (none: it decides).

    Raises InvalidRequest or UnsupportedParameter.
    """
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
    names = tuple(tool.name for tool in tools)
    choice = body.tool_choice
    if choice == "none":
        return (), ()
    if choice == "auto":
        return tools, ()
    if choice == "required":
        if not tools:
            raise InvalidRequest(
                "`tool_choice` is `required` and there are no `tools`. Send some.", param="tool_choice"
            )
        return tools, names
    if not isinstance(choice, ChoiceBody):
        raise TypeError(f"no such choice: {choice!r}")
    if choice.type == "function":
        return tools, (_named(choice, names, "tool_choice"),)
    if choice.type != "allowed_tools":
        message = (
            f"`tool_choice` is of type {shown(choice.type)}. Send `auto`, `none`, `required`, or an object of type "
            "`function` or `allowed_tools`."
        )
        raise UnsupportedParameter(message, param="tool_choice")
    allowed = tuple(_named(one, names, f"tool_choice.tools.{n}") for n, one in enumerate(choice.tools or ()))
    if not allowed:
        raise InvalidRequest("`tool_choice.tools` is empty. Name some of `tools`.", param="tool_choice.tools")
    return tuple(tool for tool in tools if tool.name in allowed), allowed if choice.mode == "required" else ()


def tools_object(tools: list[ToolBody] | None) -> list[dict[str, Any]]:
    """As the response repeats them."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": bool(tool.strict),
        }
        for tool in tools or ()
    ]


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type != "function":
        message = (
            f"`{path}` is of type {shown(tool.type)}; Paddock has no tools of its own. Send tools of type `function`, "
            "and run what the model calls."
        )
        raise UnsupportedParameter(message, param=path)
    if tool.name is None:
        raise InvalidRequest(f"`{path}.name` is missing. Send it.", param=f"{path}.name")
    if too_deep(tool.parameters):
        message = f"`{path}.parameters` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send a flatter schema."
        raise InvalidRequest(message, param=f"{path}.parameters")
    return Tool(tool.name, tool.description, tool.parameters, strict=bool(tool.strict))


def _named(choice: NamedTool, names: tuple[str, ...], path: str) -> str:
    if choice.type != "function" or choice.name not in names:
        told = choice.name if choice.type == "function" else choice.type
        raise InvalidRequest(f"`{path}` names {shown(told)}, which is none of `tools`. Send one of them.", param=path)
    return choice.name
