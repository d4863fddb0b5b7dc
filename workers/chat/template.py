"""The model's own chat template: messages and tools in, the prompt's text out.

Templates come from model files, so they run in Jinja's immutable sandbox. What they may rely on (`trim_blocks`,
`raise_exception`, `strftime_now`, `tojson`, the names of the variables) follows "Writing a chat template" of the
Hugging Face transformers documentation, which is what authors test against.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.requests import Message, Tool

MAX_RENDERED_CHARS = 32 << 20

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What a model without a template of its own gets."""

_RENDER_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
    MemoryError,
)
"""Whatever an expression in a template can raise: a template is a program of someone else's."""


class TemplateUnusable(ValueError):
    """The template in the model file is not one that Jinja can compile."""


class ChatTemplate:
    """One model's template, compiled once. Stateless and safe to render from several threads."""

    def __init__(self, source: str | None, *, bos_text: str = "", eos_text: str = "") -> None:
        """`source` is None or empty when the model has no template. Raises TemplateUnusable."""
        self._source = source or CHATML
        self._takes_tools = "tools" in self._source
        self._takes_developers = "developer" in self._source
        try:
            self._template = _compile(self._source)
        except TemplateError as error:
            raise TemplateUnusable(f"the model's chat template does not compile: {error}") from error
        self._fixed = {"add_generation_prompt": True, "bos_token": bos_text, "eos_token": eos_text}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """The prompt's text, up to where the assistant begins to speak. Raises CallFailed."""
        if tools and not self._takes_tools:
            message = "this model's chat template has no place for `tools`; leave them out or use another model"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "tools"))
        values = {
            "messages": [self._message(message) for message in messages],
            "tools": [_tool(tool) for tool in tools] or None,
            **self._fixed,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(values):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise TemplateError(f"the prompt grew past {MAX_RENDERED_CHARS} characters; send a shorter one")
                parts.append(part)
        except _RENDER_ERRORS as error:
            reason = str(error) or type(error).__name__
            message = f"the model's chat template cannot render these messages: {reason}"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages")) from error
        return "".join(parts)

    def _message(self, message: Message) -> dict[str, Any]:
        """OpenAI's form. `content` is always text, because many templates add it to other text unasked."""
        role = "system" if message.role == "developer" and not self._takes_developers else message.role
        form: dict[str, Any] = {"role": role, "content": message.content or ""}
        if message.name is not None:
            form["name"] = message.name
        if message.tool_call_id is not None:
            form["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            form["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call.arguments)},
                }
                for call in message.tool_calls
            ]
        return form


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _arguments(text: str) -> Any:
    """Templates expect an object; text that is none is passed on as the model once wrote it."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which the model was not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)
