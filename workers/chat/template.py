"""Renders a conversation with a chat template, which gives the prompt's text.

A template is a program by somebody else. This module runs it in Jinja's sandbox, within the calling process; workers
use this module only in a process that can be stopped (`workers.chat.renderer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, meta

from workers.chat.abilities import Abilities, Form, find_abilities
from workers.chat.conversation import Conversation, is_deepseek_v4, variables
from workers.chat.environment import new_environment, to_json
from workers.chat.fitting import fit, forms, repair_roles, tool_form
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import Message, Tool

MAX_RENDERED_CHARS = 32 << 20

DEFAULT = "default"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template for models without one of their own."""

_CUT = "\ue0f1paddock\ue0f2"
"""Marks the end of the message that the answer continues: text that is rendered after the mark is dropped."""

_RENDER_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    MemoryError,
)
"""All errors that an expression in a template can raise."""


class TemplateUnusable(ValueError):
    """Jinja can't compile the template, or rendering the shortest conversation does not end."""


class _Refused(Exception):
    """The template could not render the messages; the message of this error is the reason."""


class ChatTemplate:
    """One template, compiled once. Safe to render from several threads."""

    def __init__(
        self, source: str | None, *, bos_text: str = "", eos_text: str = "", abilities: Abilities | None = None
    ) -> None:
        """`source`: the template's text; None or empty for CHATML. `abilities`: what the template can show; None: find
        that out now, by rendering.

        Raises TemplateUnusable."""
        self.source = source or CHATML
        environment = new_environment()
        try:
            tree = environment.parse(self.source)
            self._reads = meta.find_undeclared_variables(tree)
            code = environment.compile(tree)
        except _RENDER_ERRORS as error:  # constants are computed while compiling
            raise TemplateUnusable(f"the chat template does not compile: {_reason(error)}") from error
        self._template: Template = Template.from_code(environment, code, environment.make_globals(None))
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        self.abilities = abilities or find_abilities(self._tried, self.source)

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text, up to where the assistant's answer begins or goes on. Raises CallFailed."""
        conversation = conversation.read()
        values = variables(conversation.values, self.source)
        try:
            if conversation.continued:
                return self._continued(conversation.messages, conversation.tools, values)
            return self._render_fitted(conversation.messages, conversation.tools, values)
        except _Refused as refused:
            message = f"the model's chat template cannot render these messages: {refused}"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages")) from None

    def _continued(self, messages: Sequence[Message], tools: Sequence[Tool], values: Mapping[str, Any]) -> str:
        """Return the prompt of all messages but the last, followed by the last message as llama-server writes it. So
        a thinking model goes on after its thought, and the tokens that are cached from the earlier prompt are reused.

        Raises _Refused; CallFailed if the template can't show the message that is to be continued."""
        earlier, last = messages[:-1], messages[-1]
        marks = self.abilities.thought_open, self.abilities.thought_close
        try:
            before = self._render_fitted(earlier, tools, {**values, "add_generation_prompt": False})
            opened = self._render_fitted(earlier, tools, {**values, "add_generation_prompt": True})
        except _Refused:  # some templates want a conversation to end with the user
            before, opened = "", None
        begun = opened[_num_common(before, opened) :] if opened is not None else ""
        if opened is not None and marks[0]:
            return before + _turn(begun, last, marks, bare=is_deepseek_v4(self.source))
        closed = {**values, "add_generation_prompt": False, "continue_final_message": True}
        own = _cut(self._render_fitted((*earlier, _with_cut(last)), tools, closed))
        turn = own[len(before) :] if own.startswith(before) else ""
        return own if turn and (not begun or turn[0] == begun[0]) else before + begun + (last.content or "")

    def _render_fitted(self, messages: Sequence[Message], tools: Sequence[Tool], values: Mapping[str, Any]) -> str:
        """Render messages fitted to the template; if it refuses them, try again with repaired roles (`repair_roles`).
        Raises the _Refused of the first try."""
        fitted = fit(messages, tools, self.abilities, self.source)
        try:
            return self._rendered(fitted, tools, values)
        except _Refused as refused:
            again = repair_roles(fitted)
            if again == fitted:
                raise
            try:
                return self._rendered(again, tools, values)
            except _Refused:
                raise refused from None

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool], values: Mapping[str, Any]) -> str:
        shown = [tool_form(tool) for tool in tools] if self.abilities.tools else []
        none: list[Form] | None = [] if self.abilities.tool_list else None
        return self._run(forms(messages, self.abilities, self.source), shown or none, values)

    def _run(self, messages: Sequence[Form], tools: Sequence[Form] | None, values: Mapping[str, Any]) -> str:
        """Return the template's output. Raises _Refused."""
        variables = {
            "documents": None,
            "add_generation_prompt": True,
            **self._tokens,
            **self._extras(tools),
            **values,
            "messages": messages,
            "tools": tools,
        }
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise _Refused(f"the prompt grew past {MAX_RENDERED_CHARS} characters; send a shorter one")
                parts.append(part)
        except _RENDER_ERRORS as error:
            raise _Refused(_reason(error)) from None
        return "".join(parts)

    def _extras(self, tools: Sequence[Form] | None) -> dict[str, Any]:
        """Return the variables that this template reads and that only some families need, with llama.cpp's values."""
        extras: dict[str, Any] = {}
        if "functions" in self._reads:
            extras["functions"] = to_json(tools, indent=4) if tools else ""
        if self._reads & {"date_string", "datetime"}:
            now = datetime.now().astimezone()
            extras |= {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        return extras

    def _tried(self, messages: Sequence[Form], tools: Sequence[Form] | None, values: Mapping[str, Any]) -> str | None:
        try:
            return self._run(messages, tools, values)
        except _Refused:
            return None


class TemplateSet:
    """A model's templates, by name."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        bos_text: str = "",
        eos_text: str = "",
        abilities: Mapping[str, Abilities] | None = None,
    ) -> None:
        """Compile the templates. Raises TemplateUnusable for the first template that does not compile."""
        known = abilities or {}
        self._templates = {
            name: ChatTemplate(source, bos_text=bos_text, eos_text=eos_text, abilities=known.get(name))
            for name, source in sources.items()
        }

    @property
    def abilities(self) -> dict[str, Abilities]:
        return {name: template.abilities for name, template in self._templates.items()}

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text, rendered with the conversation's template. Raises CallFailed."""
        conversation = conversation.read()
        return self._templates[chosen(self._templates, conversation)].render(conversation)


def chosen(names: Iterable[str], conversation: Conversation) -> str:
    """Return the name of the template for a conversation: the one that the conversation names. If it names none:
    `tool_use` for a conversation with tools, or `rag` for one with documents, if the model has a template of that name;
    otherwise the default. These names are those of Hugging Face transformers.

    Raises CallFailed: INVALID_REQUEST if the model has no template of the name."""
    known = set(names)
    if conversation.template:
        if conversation.template not in known:
            message = f"this model has no chat template named {conversation.template[:100]!r}; use one of: "
            message += ", ".join(sorted(known))
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "chat_template_kwargs"))
        return conversation.template
    if conversation.tools and "tool_use" in known:
        return "tool_use"
    return "rag" if conversation.values.get("documents") and "rag" in known else DEFAULT


def _num_common(one: str, other: str) -> int:
    """Return how many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (left, right) in pairs if left != right), min(len(one), len(other)))


def _turn(begun: str, last: Message, marks: tuple[str, str], *, bare: bool) -> str:
    """Return the assistant's turn so far, with its thought. `begun`: the text with which the template begins a
    turn. `marks`: the marks around the thought. `bare`: whether a turn without a thought has only the closing mark."""
    opening, closing = marks
    head = begun.partition(opening.strip())[0].partition(closing.strip())[0]
    thought = head + ("" if bare and not last.reasoning else opening) + (last.reasoning or "")
    return thought if last.reasoning and not last.content else thought + closing + (last.content or "")


def _with_cut(message: Message) -> Message:
    if message.reasoning and not message.content:
        return Message(message.role, reasoning=message.reasoning + _CUT, name=message.name)
    return Message(message.role, (message.content or "") + _CUT, message.reasoning, message.name)


def _cut(text: str) -> str:
    """Return the text before `_CUT`. Raises CallFailed if the template left out the message to be continued."""
    end = text.rfind(_CUT)
    if end < 0:
        message = "this model's chat template shows no place to go on from; leave out the last, the assistant's message"
        raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "messages"))
    return text[:end]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
