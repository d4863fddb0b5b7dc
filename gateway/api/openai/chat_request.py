"""Reads OpenAI's chat dialect into the canonical request."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from gateway.api.body import read_object
from gateway.api.openai.chat_body import (
    ChatBody,
    Content,
    MessageBody,
    ToolBody,
    ToolCallBody,
)
from gateway.api.openai.refused import IGNORED, REFUSED
from gateway.api.parameters.faults import shown, translated
from gateway.api.parameters.form import MAX_SCHEMA_DEPTH, read_form, too_deep
from gateway.api.parameters.hints import with_hints
from gateway.api.parameters.probs import read_n_probs
from gateway.api.parameters.repeats import requests_of
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.stops import read_stop
from gateway.api.parameters.unread import sift
from gateway.errors import InvalidRequest, UnsupportedParameter
from workers.protocol.requests import GenerateRequest, Message, Tool, ToolCall


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat request asks for, and how its answers are to be written."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool


def read_chat(raw: bytes) -> ChatRequest:
    """Raises InvalidRequest or UnsupportedParameter, each naming the parameter by its path."""
    document = sift(read_object(raw), IGNORED, REFUSED)
    try:
        body = ChatBody.model_validate(document)
    except ValidationError as error:
        raise translated(error) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply. Send a flatter JSON object.") from None
    options = body.stream_options
    if options is not None and not body.stream:
        message = "`stream_options` needs `stream: true`. Leave it out, or stream."
        raise InvalidRequest(message, param="stream_options")
    tools = _tools(body)
    request = GenerateRequest(
        messages=tuple(_message(message, f"messages.{n}") for n, message in enumerate(body.messages)),
        tools=tools,
        forced_tools=_forced(body, tools),
        constraint=read_form(body),
        sampling=read_sampling(body),
        max_tokens=_max_tokens(body),
        stop=read_stop(body.stop),
        n_probs=read_n_probs(body),
        post_sampling_probs=body.post_sampling_probs,
    )
    include_usage = options is not None and bool(options.include_usage)
    return ChatRequest(body.model, requests_of(with_hints(request, body), body.n), body.stream, include_usage)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"`max_tokens` ({old}) and `max_completion_tokens` ({new}) contradict each other. Send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _message(message: MessageBody, path: str) -> Message:
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise UnsupportedParameter(f"`{path}.{name}` is not supported. Leave it out.", param=f"{path}.{name}")
    tool_calls = tuple(_tool_call(call, f"{path}.tool_calls.{n}") for n, call in enumerate(message.tool_calls or ()))
    if tool_calls and message.role != "assistant":
        remedy = "Only messages of role `assistant` carry tool calls."
        raise InvalidRequest(f"`{path}.tool_calls` does not fit role `{message.role}`. {remedy}", param=path)
    if message.content is None and not tool_calls:
        raise InvalidRequest(f"`{path}.content` is missing. Send a string.", param=f"{path}.content")
    if message.role == "tool" and message.tool_call_id is None:
        remedy = "Send the id of the tool call that this message answers."
        raise InvalidRequest(f"`{path}.tool_call_id` is missing. {remedy}", param=f"{path}.tool_call_id")
    return Message(
        role=message.role,
        content=_text(message.content, f"{path}.content"),
        name=message.name,
        tool_calls=tool_calls,
        tool_call_id=message.tool_call_id,
    )


def _text(content: Content | None, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    for n, part in enumerate(content):
        if part.type != "text":
            message = f"`{path}.{n}` is of type {shown(part.type)}; the models here read text only. Send text parts."
            raise UnsupportedParameter(message, param=f"{path}.{n}")
        if part.text is None:
            raise InvalidRequest(f"`{path}.{n}.text` is missing. Send a string.", param=f"{path}.{n}.text")
        texts.append(part.text)
    return "".join(texts)


def _tool_call(call: ToolCallBody, path: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        raise UnsupportedParameter(f"`{path}` is not a function call. Send `type: function`.", param=path)
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
    return () if body.tool_choice == "none" else tools


def _forced(body: ChatBody, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """Names of the tools of which the answer must call one."""
    choice, names = body.tool_choice, tuple(tool.name for tool in tools)
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise InvalidRequest(
                "`tool_choice` is `required` and there are no `tools`. Send some.", param="tool_choice"
            )
        return names
    if isinstance(choice, str) or choice.type != "function" or choice.function is None:
        given = shown(choice if isinstance(choice, str) else choice.type)
        message = f"`tool_choice` is {given}. Send `auto`, `none`, `required` or a function of `tools`."
        raise InvalidRequest(message, param="tool_choice")
    if choice.function.name not in names:
        message = f"`tool_choice` names {shown(choice.function.name)}, which is none of `tools`. Send one of them."
        raise InvalidRequest(message, param="tool_choice")
    return (choice.function.name,)


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type != "function" or tool.function is None:
        message = f"`{path}` is of type {shown(tool.type)}. Send `type: function` with a `function`."
        raise UnsupportedParameter(message, param=path)
    function = tool.function
    if too_deep(function.parameters):
        message = (
            f"`{path}.function.parameters` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send a flatter schema."
        )
        raise InvalidRequest(message, param=f"{path}.function.parameters")
    return Tool(function.name, function.description, function.parameters, strict=bool(function.strict))
