"""Makes the input of a chat template from a request: messages, tools, and the variables that every template gets.

A `Conversation` is also what is sent to the process that renders templates (`workers.chat.render_process`). This module
also finds the marks around a model's thoughts, by searching the text of the model's template.

Source of the variables' names and defaults: tools/server/server-common.cpp, common/chat.cpp and `caps_apply_*` in
common/jinja/caps.cpp of llama.cpp. `thinking` and `thinking_effort` are names that templates of Granite, DeepSeek and
Kimi K3 have for `enable_thinking` and `reasoning_effort`; llama.cpp does not set them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw

from workers.chat.tools.family import ThoughtMarks
from workers.models.spec import RESERVED, ChatDefaults
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import UNBOUNDED, GenerateRequest, Message, Thinking, Tool, decode_object

NOT_FOUND = ("<|inner_prefix|>",)
"""Marks of templates (Apertus's) for which llama-server switches thinking off, since it can't find their thoughts."""

THINK = ThoughtMarks("<think>", "</think>")

THOUGHTS = (
    ThoughtMarks("<|channel>thought\n", "<channel|>", anywhere=True),  # Gemma 4
    ThoughtMarks("[THINK]", "[/THINK]", anywhere=True),  # Mistral
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),  # Command-R
    ThoughtMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),  # Apertus
    ThoughtMarks("<thinking>", "</thinking>"),  # Apriel
    THINK,
)


def thought_of(template: str) -> ThoughtMarks | None:
    """Return the marks around a model's thoughts, found in its template; None if the template shows no thoughts."""
    return next((thought for thought in THOUGHTS if thought.close in template), None)


HARMONY = "<|channel|>analysis<|message|>"

SPOKEN_TURNS: Mapping[str, ThoughtMarks] = MappingProxyType(
    {
        HARMONY[: len("<|channel|>")]: ThoughtMarks(HARMONY, "<|end|><|start|>assistant<|channel|>final<|message|>"),
        "<|channel>": ThoughtMarks("<|channel>thought\n", "<channel|>"),
        "<atem:function_calls>": ThoughtMarks(" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
    }
)
"""Text by which a template is known -> the marks around the thought of an assistant's turn. llama-server writes them
itself, because such a template does not show that thought."""


def turn_marks_of(template: str) -> ThoughtMarks | None:
    """Return the marks around the thought of an assistant's turn that an answer continues; None: it has no thought."""
    if any(mark in template for mark in NOT_FOUND):
        return None
    return spoken_turn_of(template) or thought_of(template)


def spoken_turn_of(template: str) -> ThoughtMarks | None:
    return next((marks for mark, marks in SPOKEN_TURNS.items() if mark in template), None)


def is_deepseek_v4(template: str) -> bool:
    """Return whether a template is DeepSeek V4's, by llama-server's test: unlike V3.2's, it has no `function_calls`."""
    return "dsml_token" in template and "function_calls" not in template


EFFORT_NAMES = ("reasoning_effort", "reasoning_strength", "thinking_effort")

ANSWER_SCHEMA = "answer_schema"
"""Key of the answer's JSON Schema, as text, in `Conversation.values`. As in llama-server, only DeepSeek V4's template
gets it (as `response_format`): that model was trained to read it."""

PRESERVED: Mapping[str, bool] = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Variables, with values, that tell templates to show the thoughts of earlier turns; the list is llama.cpp's."""


def variables(values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
    """Return a conversation's variables: `values` and llama-server's defaults, each under every name that templates
    have for it. By default thinking is on (off if `source` has a NOT_FOUND mark), and earlier thoughts are shown.

    A name that `values` has keeps its value. `thinking` is set only if a caller or the catalog switches thinking:
    llama-server does not set it, and some templates use it for more than a switch. `source`: the template's text."""
    preserve = values.get("preserve_reasoning", True) is True
    given: dict[str, Any] = {name: value if preserve else not value for name, value in PRESERVED.items()}
    given["enable_thinking"] = not any(mark in source for mark in NOT_FOUND)
    if "enable_thinking" in values:
        given["thinking"] = values["enable_thinking"]
    if isinstance(effort := values.get("reasoning_effort"), str):
        given |= dict.fromkeys(EFFORT_NAMES, effort)
    given |= values
    schema = given.pop(ANSWER_SCHEMA, None)
    if schema is not None and is_deepseek_v4(source):
        given.setdefault("response_format", json.loads(schema))
    return given


UNSET = ChatDefaults()


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    values: dict[str, Any] = {}
    """More variables for the template, under the names that it reads."""
    given: str = ""
    """The caller's variables, as `GenerateRequest.template_values` has them: they take precedence over `values`. Only
    the process that renders decodes them."""
    template: str = ""
    """Name of one of the model's templates; empty: the one that fits the conversation."""
    continued: bool = False
    """Whether the answer continues the last message, which is the assistant's."""

    def read(self) -> Conversation:
        """Return the conversation with `given` decoded into `values`. Raises CallFailed if that is no JSON object.

        Decoding holds up all other threads of the process: 30 ms for 2 MB of names."""
        if not self.given:
            return self
        try:
            values = decode_object(self.given)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _unreadable(error) from None
        for name in _OWN:
            values.pop(name, None)
        return msgspec.structs.replace(self, values=self.values | values, given="")


MAX_SWITCH_BYTES = 4096
"""Maximum bytes, as JSON, of a variable that the worker itself reads; none is longer than the name of a template."""

_READ = (*sorted(RESERVED), "enable_thinking", "add_generation_prompt", "continue_final_message", "chat_template")
_Told = msgspec.defstruct("_Told", [(name, Raw, Raw()) for name in _READ], frozen=True)
"""The variables of a caller that the worker itself reads. All others are skipped without being decoded."""

_OWN = ("chat_template", "continue_final_message", ANSWER_SCHEMA)
"""Variables that the worker reads or sets itself: the template gets no caller's value for them."""

_decode_told = msgspec.json.Decoder(_Told).decode


def _told(request: GenerateRequest) -> dict[str, Any]:
    """Return the variables of `_Told` that a request sets. Raises CallFailed for one that it may not set, or not so
    long. Skips the others at a millisecond per MB."""
    if not request.template_values:
        return {}
    try:
        told = msgspec.structs.asdict(_decode_told(request.template_values))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(error) from None
    values = {}
    for name, raw in told.items():
        num_bytes = len(memoryview(raw))
        if not num_bytes:
            continue  # it is not set
        if name in RESERVED:
            raise _refused(f"`chat_template_kwargs` may not set {name!r}; leave it out")
        if num_bytes > MAX_SWITCH_BYTES:
            raise _refused(f"`{name}` has more than {MAX_SWITCH_BYTES >> 10} KiB; send a shorter value")
        values[name] = msgspec.json.decode(raw)
    return values


def _unreadable(error: Exception) -> CallFailed:
    return _refused(f"`chat_template_kwargs` can't be read: {error}")


def conversation_of(request: GenerateRequest, defaults: ChatDefaults = UNSET) -> Conversation:
    """Return a request's conversation. The request's variables take precedence over `defaults`, the catalog's, and
    these over the variables that templates always get (`variables`).

    Raises CallFailed: INVALID_REQUEST for `template_values` that callers may not set, or that contradict each other."""
    told = _told(request)
    template = told.get("chat_template") or ""
    if not isinstance(template, str):
        raise _refused("`chat_template` must be the name of one of the model's templates")
    continued = _is_continued(request.messages, told)
    return Conversation(
        messages=request.messages,
        tools=request.tools,
        values=_variables(defaults) | _form_values(request) | _thinking_values(request.thinking),
        given=request.template_values,
        template=template,
        continued=continued,
    )


def _is_continued(messages: tuple[Message, ...], values: Mapping[str, Any]) -> bool:
    """Return whether the answer continues the last message. By default, as in llama-server, it does so if that message
    is an assistant's without tool calls. `values`: the caller's. Raises CallFailed."""
    asked = values.get("continue_final_message")
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
    """Return the variable with the answer's schema (`ANSWER_SCHEMA`); empty if the request has no JSON Schema."""
    form = request.constraint
    return {ANSWER_SCHEMA: form.text} if form is not None and form.kind == "json_schema" else {}


def is_thinking_off(request: GenerateRequest, defaults: ChatDefaults = UNSET) -> bool:
    """Return whether the request, or by default the catalog, asks for an answer without a thought."""
    values = _variables(defaults) | _thinking_values(request.thinking) | _told(request)
    return values.get("enable_thinking") is False


def bounded(thinking: Thinking, defaults: ChatDefaults) -> Thinking:
    """Return a caller's `thinking`, with the catalog's budget and message if the caller gives none."""
    budget = defaults.thinking_budget if thinking.budget == UNBOUNDED else thinking.budget
    return msgspec.structs.replace(
        thinking, budget=budget, message=thinking.message or defaults.thinking_budget_message
    )


def _variables(defaults: ChatDefaults) -> dict[str, Any]:
    """Return the catalog's variables for templates; `chat_template_kwargs` takes precedence over `thinking_mode`."""
    mode = defaults.thinking_mode
    switched = {} if mode == "auto" else {"enable_thinking": mode == "on"}
    return switched | plain_names(defaults.chat_template_kwargs)


def plain_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `chat_template_kwargs` with the names that this module uses for thinking: `thinking` becomes
    `enable_thinking`, and a `reasoning_effort` of "none" becomes `enable_thinking` false, as in a request."""
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
