"""Reads OpenAI's chat dialect into the canonical request."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.api.body import read_object
from gateway.api.openai.chat_body import (
    MAX_STOP_CHARS,
    ChatBody,
    Content,
    MessageBody,
    ToolBody,
    ToolCallBody,
)
from gateway.api.openai.faults import shown, translated
from gateway.api.openai.refused import sift
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from workers.protocol.requests import GenerateRequest, Message, Sampling, Tool, ToolCall

MAX_SCHEMA_DEPTH = 100

NUM_SEEDS = 2**32 - 1
"""A seed is below this; llama.cpp takes the next number as "choose one"."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a chat request asks for, and how its answer is to be written."""

    model: str
    request: GenerateRequest
    stream: bool
    include_usage: bool


def read_chat(raw: bytes) -> ChatRequest:
    """Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path."""
    document = sift(read_object(raw))
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
    if body.response_format is not None and body.response_format.type != "text":
        raise NotSupported(
            f"`response_format` of type {shown(body.response_format.type)} is not there yet. "
            'Use {"type": "text"} and ask for the form in the prompt.',
            param="response_format",
        )
    request = GenerateRequest(
        messages=tuple(_message(message, f"messages.{n}") for n, message in enumerate(body.messages)),
        tools=_tools(body),
        sampling=_sampling(body),
        max_tokens=_max_tokens(body),
        stop=_stop(body.stop),
        ignore_eos=body.ignore_eos,
    )
    include_usage = options is not None and bool(options.include_usage)
    return ChatRequest(body.model, request, body.stream, include_usage)


def _sampling(body: ChatBody) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repeat_penalty=body.repeat_penalty,
        repeat_last_n=body.repeat_last_n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        # -1 asks for a random one even where the catalog has a default, which "not given" would bring back.
        seed=secrets.randbelow(NUM_SEEDS) if body.seed == -1 else body.seed,
    )


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"`max_tokens` ({old}) and `max_completion_tokens` ({new}) contradict each other. Send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    for n, text in enumerate(stops):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            path = "stop" if isinstance(stop, str) else f"stop.{n}"
            message = f"`{path}` has {len(text)} characters. A stop string has 1 to {MAX_STOP_CHARS}."
            raise InvalidRequest(message, param=path)
    return tuple(stops)


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
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return ()
    if isinstance(choice, str) and choice != "required":
        message = f"`tool_choice` is {shown(choice)}. Send `auto` or `none`."
        raise InvalidRequest(message, param="tool_choice")
    raise NotSupported(
        "`tool_choice` cannot force a call yet. Send `auto` and say in the prompt which tool to use.",
        param="tool_choice",
    )


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type != "function" or tool.function is None:
        message = f"`{path}` is of type {shown(tool.type)}. Send `type: function` with a `function`."
        raise UnsupportedParameter(message, param=path)
    function = tool.function
    if function.strict:
        raise NotSupported(
            f"`{path}.function.strict` cannot be kept yet. Leave it out or send false; arguments follow the schema "
            "as well as the model can.",
            param=f"{path}.function.strict",
        )
    if _deeper_than(MAX_SCHEMA_DEPTH, function.parameters):
        message = (
            f"`{path}.function.parameters` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send a flatter schema."
        )
        raise InvalidRequest(message, param=f"{path}.function.parameters")
    return Tool(name=function.name, description=function.description, parameters=function.parameters)


def _deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit + 1):
        nested = [
            outer.values() if isinstance(outer, dict) else outer for outer in level if isinstance(outer, dict | list)
        ]
        level = [inner for values in nested for inner in values]
    return bool(level)
