"""Reads Anthropic's messages and their blocks into the canonical request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gateway.api.anthropic.body import (
    IGNORED,
    REFUSED,
    Block,
    Content,
    FormatBody,
    MessageBody,
    MessagesBody,
    PromptBody,
    ToolBody,
)
from gateway.api.intake.body import read_object
from gateway.api.media.attachments import Attachments, is_data_url
from gateway.api.media.kinds import bare_type
from gateway.api.parameters.base import quote
from gateway.api.parameters.media_parts import ContentWriter, Gallery, read_link
from gateway.api.parameters.options import add_hints, read_lora, read_stop
from gateway.api.parameters.response_format import drop_beside_tools, schema_constraint, schema_json
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.thinking import enabled_by_kwargs, is_on, read_kwargs, values_json
from gateway.api.parameters.unsupported import read_body
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from gateway.telemetry.request_log import Ignored
from workers.protocol.requests import (
    UNBOUNDED,
    Constraint,
    GenerateRequest,
    Medium,
    Message,
    Thinking,
    Tool,
    ToolCall,
)

THOUGHTS = ("thinking", "redacted_thinking")

BILLING = re.compile(r"\A(x-anthropic-billing-header:.{0,500}?\bcch=)\w{5};")
"""Start of Claude Code's system prompt. Its stamp (`cch=`) differs in each request, so no cached prefix would fit."""
NO_STAMP = r"\g<1>fffff;"
"""Replacement for what `BILLING` matches: the same text with a constant stamp."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)


def read_conversation(
    system: Content | None, messages: Sequence[MessageBody], attachments: Attachments
) -> tuple[tuple[Message, ...], tuple[Medium, ...]]:
    """Return the canonical messages and their media. Raises InvalidRequest, NotSupported."""
    read: list[Message] = []
    reader = _Reader(Gallery(attachments.max_text_chars), attachments)
    if system is not None:
        text = _system(system, "system")
        if text:
            read.append(Message("system", text))
    for n, message in enumerate(messages):
        path = f"messages.{n}"
        if message.role == "user":
            read += reader.user(message.content, f"{path}.content")
        elif message.role == "system":
            read.append(Message("system", _system(message.content, f"{path}.content")))
        else:
            read.append(_assistant(message.content, f"{path}.content"))
    if not messages:  # llama-server does the same: it answers the instructions alone
        read.append(Message("user", ""))
    return tuple(read), reader.gallery.media


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the contents that may have media."""

    gallery: Gallery
    attachments: Attachments

    def user(self, content: Content, path: str) -> Iterator[Message]:
        """Yield a user's messages: one per tool result, and one for all blocks between two results, texts joined as
        lines."""
        if isinstance(content, str):
            yield Message("user", content)
            return
        writer: ContentWriter | None = None
        for n, block in enumerate(content):
            if block.type == "tool_result":
                if writer is not None:
                    yield Message("user", writer.content, media=writer.places)
                    writer = None
                yield self._result(block, f"{path}.{n}")
            else:
                writer = writer or ContentWriter(self.gallery)
                writer.add(self._part(block, f"{path}.{n}"))
        if writer is not None or not content:
            writer = writer or ContentWriter(self.gallery)
            yield Message("user", writer.content, media=writer.places)

    def _result(self, block: Block, path: str) -> Message:
        if block.tool_use_id is None:
            raise _missing(f"{path}.tool_use_id", "the id of the tool use that this is the result of")
        content = block.content
        writer = ContentWriter(self.gallery, joint="")
        if block.is_error:
            writer.add("Error: ")
        if isinstance(content, str):
            writer.add(content)
        elif isinstance(content, list):
            for n, part in enumerate(content):
                name = f"{path}.content.{n}"
                writer.add(self._part(_inner(part, name), name))
        elif content is not None:
            message = f"`{path}.content` is {quote(content)}. Send a string or blocks."
            raise InvalidRequest(message, param=f"{path}.content")
        return Message("tool", writer.content, tool_call_id=block.tool_use_id, media=writer.places)

    def _part(self, block: Block, path: str) -> str | Medium:
        """Return the text or the medium of a block. Raises InvalidRequest, NotSupported."""
        if block.type not in ("image", "document") or not isinstance(block.source, dict):
            return _text_of(block, path)
        source, name = block.source, f"{path}.source"
        kind, data, url = source.get("type"), source.get("data"), source.get("url")
        if kind == "base64" and isinstance(data, str):
            content_type = source.get("media_type")
            bare = bare_type(content_type) if isinstance(content_type, str) else ""
            if block.type == "document":
                return self.gallery.counted(self.attachments.document(data, bare, f"{name}.data", path), path)
            return self.attachments.medium(data, f"{name}.data", "picture", path)
        if kind == "url" and isinstance(url, str):
            if block.type == "image":
                return self.attachments.medium(url, f"{name}.url", "picture", path)
            if not is_data_url(url):
                return read_link(url, f"{name}.url", path)
            return self.gallery.counted(self.attachments.document(url, "", f"{name}.url", path), path)
        if block.type == "document" and kind == "text" and isinstance(data, str):
            return data
        message = f"`{name}` is no source that Paddock reads. Send one of type `base64` or `url`."
        raise NotSupported(message, param=name)


def _inner(part: Any, path: str) -> Block:
    try:
        return Block.model_validate(part)
    except ValidationError:
        raise InvalidRequest(f"`{path}` is {quote(part)}. Send a block of type `text`.", param=path) from None


def _assistant(content: Content, path: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for n, block in enumerate(content):
        if block.type in THOUGHTS:
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block, f"{path}.{n}"))
        else:
            texts.append(_text_of(block, f"{path}.{n}"))
    return Message("assistant", "\n".join(texts) or None, reasoning="".join(thoughts) or None, tool_calls=tuple(calls))


def _call(block: Block, path: str) -> ToolCall:
    if block.id is None:
        raise _missing(f"{path}.id", "the id that the tool use came with")
    if not block.name:
        raise _missing(f"{path}.name", "the tool's name")
    return ToolCall(block.id, block.name, _arguments(block.input or {}))


def _arguments(value: dict[str, Any]) -> str:
    """Return the same as `json.dumps`, made in small steps: in one step, 8 MiB of numbers hold the GIL for 0.2 s."""
    return "".join(_ENCODER.iterencode(value))


def _system(content: Content, path: str) -> str:
    """Return the system prompt. As in llama-server, the texts of its blocks are joined without a separator."""
    if isinstance(content, str):
        return BILLING.sub(NO_STAMP, content)
    return "".join(BILLING.sub(NO_STAMP, _text_of(block, f"{path}.{n}")) for n, block in enumerate(content))


def _text_of(block: Block, path: str) -> str:
    if block.type == "text":
        if block.text is None:
            raise _missing(f"{path}.text", "a string")
        return block.text
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if block.type in ("image", "document"):
        message = (
            f"`{path}` is of type `{block.type}`, without a source or where only texts are read. Send text blocks."
        )
        raise NotSupported(message, param=path)
    message = f"`{path}` is of type {quote(block.type)}, which does not belong here. Send text blocks."
    raise InvalidRequest(message, param=path)


def _missing(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` is missing. Send {what}.", param=path)


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A parsed request for a message."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool


def read_messages_request(
    raw: bytes, ignored: Ignored | None = None, attachments: Attachments | None = None
) -> MessagesRequest:
    """Return the parsed body of POST /v1/messages; parameters without effect are noted in `ignored`. `attachments`: the
    files that were cut out of the body.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path."""
    ignored = ignored or Ignored()
    body = read_body(MessagesBody, read_object(raw), (IGNORED, REFUSED), ignored)
    prompt = _prompt(body, attachments or Attachments())
    request = GenerateRequest(
        **prompt,
        constraint=drop_beside_tools(_form(body), prompt["forced_tools"], ignored),
        sampling=read_sampling(body),
        max_tokens=body.max_tokens,
        stop=read_stop(body.stop_sequences, "stop_sequences"),
        adapters=read_lora(body),
    )
    return MessagesRequest(body.model, (add_hints(request, body),), body.stream)


def read_prompt(raw: bytes, ignored: Ignored, attachments: Attachments | None = None) -> tuple[str, GenerateRequest]:
    """Read a body of which only the prompt matters, to count its tokens. Return the model's name and the request.
    Other parameters that POST /v1/messages knows are skipped; unknown parameters are noted in `ignored`.

    Raises InvalidRequest, UnsupportedParameter or NotSupported."""
    beside = (MessagesBody.model_fields.keys() | IGNORED.keys() | REFUSED.keys()) - PromptBody.model_fields.keys()
    document = {name: value for name, value in read_object(raw).items() if name not in beside}
    body = read_body(PromptBody, document, ({}, {}), ignored)
    return body.model, GenerateRequest(**_prompt(body, attachments or Attachments()))


def _prompt(body: PromptBody, attachments: Attachments) -> dict[str, Any]:
    messages, media = read_conversation(body.system, body.messages, attachments)
    choice = body.tool_choice
    tools = tuple(_tool(tool, f"tools.{n}") for n, tool in enumerate(body.tools or ()))
    return {
        "messages": messages,
        "media": media,
        "tools": () if choice is not None and choice.type == "none" else tools,
        "forced_tools": _forced_names(body, tools),
        "parallel_tool_calls": not (choice is not None and choice.disable_parallel_tool_use),
        "thinking": _thinking(body),
        "template_values": values_json(
            read_kwargs(body.chat_template_kwargs)
            | ({"continue_final_message": True} if _continues_answer(body) else {})
        ),
    }


def _continues_answer(body: PromptBody) -> bool:
    """Return whether the conversation ends with text of the assistant, which the answer is to continue."""
    if not body.messages:
        return False
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    return isinstance(last.content, str) or all(block.type == "text" for block in last.content)


def _tool(tool: ToolBody, path: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"`{path}.type` is {quote(tool.type)}; Paddock has no tools of its own. Send tools of type `custom`."
        raise UnsupportedParameter(message, param=f"{path}.type")
    if tool.input_schema is None:
        raise InvalidRequest(f"`{path}.input_schema` is missing. Send a JSON Schema.", param=f"{path}.input_schema")
    schema = schema_json(tool.input_schema, f"{path}.input_schema")
    return Tool(tool.name, tool.description, schema, strict=bool(tool.strict))


def _forced_names(body: PromptBody, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return ()
    names = tuple(tool.name for tool in tools)
    if choice.type == "any":
        if not names:
            raise InvalidRequest("`tool_choice` is `any` and there are no `tools`. Send some.", param="tool_choice")
        return names
    if choice.type != "tool":
        message = f"`tool_choice.type` is {quote(choice.type)}. Send `auto`, `any`, `tool` or `none`."
        raise InvalidRequest(message, param="tool_choice.type")
    if choice.name not in names:
        message = f"`tool_choice.name` is {quote(choice.name)}, which is none of `tools`. Send one of them."
        raise InvalidRequest(message, param="tool_choice.name")
    return (choice.name,)


def _thinking(body: PromptBody) -> Thinking:
    """Return the settings of thinking. As in OpenAI's dialect, `chat_template_kwargs` overrides other switches."""
    kwargs, asked = body.chat_template_kwargs or {}, body.thinking
    enabled = enabled_by_kwargs(kwargs)
    if enabled is None and asked is not None:
        enabled = is_on(asked)
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is None and isinstance(within := kwargs.get("reasoning_effort"), str):
        effort = within
    if enabled is False or effort == "none":
        return Thinking(enabled=enabled is True)
    budget = UNBOUNDED if asked is None or asked.budget_tokens is None else asked.budget_tokens
    return Thinking(enabled=enabled, effort=effort, budget=budget, message=body.reasoning_budget_message)


def _form(body: PromptBody) -> Constraint | None:
    config = body.output_config
    forms: list[tuple[str, FormatBody]] = []
    if config is not None and config.format is not None:
        forms.append(("output_config.format", config.format))
    if body.output_format is not None:
        forms.append(("output_format", body.output_format))
    if not forms:
        return None
    if len(forms) > 1:
        message = "`output_config.format` and `output_format` both set the answer's form. Send one of them."
        raise InvalidRequest(message, param="output_format")
    path, form = forms[0]
    if form.type != "json_schema" or form.schema_ is None:
        raise InvalidRequest(f"`{path}` is not a JSON schema. Send `type: json_schema` and a `schema`.", param=path)
    return schema_constraint(form.schema_, f"{path}.schema")
