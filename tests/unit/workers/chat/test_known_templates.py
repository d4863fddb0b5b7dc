"""The templates of well-known models, which llama.cpp's sources carry: each renders every kind of conversation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.support.llama_source import files_of, skip_without_sources
from tests.support.tools import tool_of
from workers.chat.conversation import Conversation
from workers.chat.template import ChatTemplate
from workers.protocol.requests import Message, Tool, ToolCall

FILES = {path.stem: path for path in files_of("models/templates", "*.jinja")}

COMMON = (
    *("Qwen-Qwen3-0.6B", "Qwen3-Coder", "meta-llama-Llama-3.1-8B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407"),
    *("google-gemma-2-2b-it", "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "LFM2-8B-A1B"),
    *("deepseek-ai-DeepSeek-V3.1", "microsoft-Phi-3.5-mini-instruct", "Kimi-K2-Instruct", "GLM-4.6"),
    *("meetkai-functionary-medium-v3.2", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"),
)
"""One of each kind; the others take several seconds more."""

TOOLS = (
    tool_of(
        "get_weather",
        "Look up the weather",
        {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}, "required": ["city"]},
    ),
    tool_of("bare"),
)
SYSTEM, QUESTION = Message("system", "Be brief, Sq."), Message("user", "Weather, Uq?")
CALL = ToolCall("call_0123456789ab", "get_weather", '{"city": "Vq"}')
CALLED = (Message("assistant", tool_calls=(CALL,)), Message("tool", "Rq", tool_call_id=CALL.id))
BOTH = (
    Message("assistant", None, "Tq", tool_calls=(CALL, ToolCall("call_2", "bare", ""))),
    *(Message("tool", "Rq", tool_call_id=CALL.id), Message("tool", "Pq", tool_call_id="call_2")),
    *(Message("assistant", "It is Aq."), Message("user", "Thanks, Nq.")),
)

LATE_SYSTEM = frozenset({"mistralai-Mistral-Nemo-Instruct-2407"})
"""They show the system message in the user's last turn only, and after a tool's result there is none."""


def parametrized() -> list[object]:
    names = sorted(FILES) or ["none"]
    return [pytest.param(name, marks=() if name in COMMON else pytest.mark.long) for name in names]


@cache
def template(name: str) -> ChatTemplate:
    source = Path(FILES[name]).read_text(encoding="utf-8")
    return ChatTemplate(source, bos_text="<bos>", eos_text="<eos>")


def render(name: str, *messages: Message, tools: tuple[Tool, ...] = (), continued: bool = False) -> str:
    return template(name).render(Conversation(messages=messages, tools=tools, continued=continued))


def lacking(text: str, *words: str) -> list[str]:
    return [word for word in words if word not in text]


@pytest.mark.parametrize("name", parametrized())
def test_it_shows_whatever_is_said(name: str) -> None:
    skip_without_sources()
    system = () if name in LATE_SYSTEM else ("Sq",)
    assert not lacking(render(name, QUESTION), "Uq")
    assert not lacking(render(name, SYSTEM, QUESTION), "Sq", "Uq")
    assert not lacking(render(name, SYSTEM, QUESTION, tools=TOOLS), "Sq", "Uq", "get_weather", "bare")
    called = render(name, SYSTEM, QUESTION, *CALLED)
    assert not lacking(called, *system, "Uq", "get_weather", "Vq", "Rq")
    offered = render(name, SYSTEM, QUESTION, *CALLED, tools=TOOLS)
    assert not lacking(offered, *system, "Uq", "get_weather", "Vq", "Rq", "bare")
    for tools in ((), TOOLS):
        assert not lacking(render(name, SYSTEM, QUESTION, *BOTH, tools=tools), "Vq", "bare", "Rq", "Pq", "Aq", "Nq")


@pytest.mark.parametrize("name", parametrized())
def test_conversations_out_of_the_ordinary(name: str) -> None:
    skip_without_sources()
    in_a_row = (QUESTION, Message("user", "Again, Mq."), Message("assistant", "Aq"), Message("user", "Nq"))
    assert not lacking(render(name, *in_a_row), "Uq", "Mq", "Aq", "Nq")
    in_the_middle = (QUESTION, Message("assistant", "Aq"), Message("system", "Lq"), Message("user", "Nq"))
    assert not lacking(render(name, *in_the_middle), "Uq", "Aq", "Lq", "Nq")
    begun = render(name, SYSTEM, QUESTION, Message("assistant", "Once upon Aq"), continued=True)
    assert begun.endswith("Once upon Aq")
    render(name, SYSTEM)
