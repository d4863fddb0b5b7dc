"""Reads the tools of a Responses request, and which of these tools the model may or must call."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from gateway.api.parameters.base import quote
from gateway.api.parameters.custom_tools import CUSTOM, custom_tool
from gateway.api.parameters.response_format import schema_json
from gateway.api.responses.body import ChoiceBody, NamedTool, ResponsesBody, ToolBody
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import Tool


def read_tools(body: ResponsesBody) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Return the tools that the model sees, and the names of those of which it must call one; empty: it need not.

    Raises InvalidRequest or UnsupportedParameter."""
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
    names = {(one.type, one.name) for one in body.tools or ()}
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
        return tools, tuple(tool.name for tool in tools)
    if not isinstance(choice, ChoiceBody):
        raise TypeError(f"no such choice: {choice!r}")
    if choice.type in ("function", CUSTOM):
        return tools, (_check_named(choice, names, "tool_choice"),)
    if choice.type != "allowed_tools":
        message = (
            f"`tool_choice` is of type {quote(choice.type)}. Send `auto`, `none`, `required`, or an object of type "
            "`function`, `custom` or `allowed_tools`."
        )
        raise UnsupportedParameter(message, param="tool_choice")
    allowed = tuple(_check_named(one, names, f"tool_choice.tools.{n}") for n, one in enumerate(choice.tools or ()))
    if not allowed:
        raise InvalidRequest("`tool_choice.tools` is empty. Name some of `tools`.", param="tool_choice.tools")
    return tuple(tool for tool in tools if tool.name in allowed), allowed if choice.mode == "required" else ()


def tools_object(tools: list[ToolBody] | None) -> list[dict[str, Any]]:
    """Return the field `tools` of the response, which repeats the request's tools."""
    return [_tool_object(tool) for tool in tools or ()]


def custom_names(tools: list[ToolBody] | None) -> frozenset[str]:
    """Return the names of the tools whose input is a text."""
    return frozenset(tool.name for tool in tools or () if tool.type == CUSTOM and tool.name is not None)


def _tool_object(tool: ToolBody) -> dict[str, Any]:
    named = {"type": tool.type, "name": tool.name, "description": tool.description}
    if tool.type == CUSTOM:
        form = tool.format
        if form is None or form.type == "text":
            return {**named, "format": {"type": "text"}}
        return {**named, "format": {"type": form.type, "syntax": form.syntax, "definition": form.definition}}
    return {**named, "parameters": tool.parameters, "strict": bool(tool.strict)}


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type not in ("function", CUSTOM):
        message = (
            f"`{path}` is of type {quote(tool.type)}; Paddock has no tools of its own. Send tools of type `function` "
            "or `custom`, and run what the model calls."
        )
        raise UnsupportedParameter(message, param=path)
    if tool.name is None:
        raise InvalidRequest(f"`{path}.name` is missing. Send it.", param=f"{path}.name")
    if tool.type == CUSTOM:
        return custom_tool(tool.name, tool.description, tool.format, f"{path}.format")
    schema = None if tool.parameters is None else schema_json(tool.parameters, f"{path}.parameters")
    return Tool(tool.name, tool.description, schema, strict=bool(tool.strict))


def _check_named(choice: NamedTool, names: Set[tuple[str, str | None]], path: str) -> str:
    if choice.name is None or (choice.type, choice.name) not in names:
        told = choice.name if choice.type in ("function", CUSTOM) else choice.type
        raise InvalidRequest(f"`{path}` names {quote(told)}, which is none of `tools`. Send one of them.", param=path)
    return choice.name
