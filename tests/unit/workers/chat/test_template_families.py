"""The templates of well-known models, which llama.cpp's sources carry, and the families that they are of: a call of an
earlier turn, as the template writes it, is what the family reads as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.llama_source import files_of, skip_without_sources
from tests.unit.workers.chat.reading import parser_of, read, tool
from workers.chat.answers import FAMILIES, FamilyUnknown, family_of
from workers.chat.conversation import Conversation
from workers.chat.template import ChatTemplate
from workers.chat.tools.family import Ask, Family
from workers.protocol.requests import Message, ToolCall

FILES = {path.stem: path for path in files_of("models/templates", "*.jinja")}

EXPECTED = {
    "Apriel-1.6-15b-Thinker-fixed": "hermes",
    "Bielik-11B-v3.0-Instruct": "hermes",
    "ByteDance-Seed-OSS": "seed-oss",
    "Cohere2MoE": "command-r7b",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command-r",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command-r7b",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "GigaChat3-10B-A1.8B": "gigachat-3.0",
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "HuggingFaceTB-SmolLM3-3B": "json",
    "Kimi-K2-Instruct": "kimi-k2",
    "Kimi-K2-Thinking": "kimi-k2",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "hermes",
    "MiniMax-M2": "minimax-m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "qwen3-coder",
    "Reka-Edge": "hermes",
    "Spark2.5": "glm",
    "StepFun3.5-Flash": "qwen3-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    "deepseek-ai-DeepSeek-V4": "deepseek-v4",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek-v4",
    "fireworks-ai-llama-3-firefunction-v2": "functools",
    "google-gemma-2-2b-it": "gemma",
    "google-gemma-4-31B-it": "gemma4",
    "google-gemma-4-31B-it-interleaved": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm",
    "llama-cpp-deepseek-r1": "deepseek",
    "llama-cpp-rwkv-world": "json",
    "meetkai-functionary-medium-v3.1": "functionary-v3.1",
    "meetkai-functionary-medium-v3.2": "functionary-v3.2",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "microsoft-Phi-3.5-mini-instruct": "json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "moonshotai-Kimi-K2": "kimi-k2",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-S-2.1": "glm",
    "poolside-Laguna-XS-2.1": "glm",
    "poolside-Laguna-XS.2": "glm",
    "unsloth-Apriel-1.5": "hermes",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
}
UNREAD = frozenset(
    {
        *("Apertus-8B-Instruct", "Kimi-K3", "MiniMax-M3", "muse-glimmer", "openbmb-MiniCPM5-1B", "tencent-Hy3"),
        "upstage-Solar-Open-100B",
    }
)
"""Their own forms are not read: they are taken for `json` or `hermes`."""

THOUGHTS = {
    "Qwen-Qwen3-0.6B": "<think>",
    "Qwen-Qwen2.5-7B-Instruct": None,
    "mistralai-Ministral-3-14B-Reasoning-2512": "[THINK]",
    "ByteDance-Seed-OSS": "<seed:think>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|START_THINKING|>",
    "openai-gpt-oss-120b": "<|channel|>analysis<|message|>",
    "google-gemma-4-31B-it": "<|channel>thought\n",
    "meta-llama-Llama-3.1-8B-Instruct": None,
}

SCHEMAS = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}
TOOLS = (tool("get_weather", **{key: {**schema, "description": "Some."} for key, schema in SCHEMAS.items()}),)
ARGUMENTS = {"city": 'São "P" <b>', "days": 3, "tags": ["a", "b"]}
CALL = ToolCall("a1B2c3D4e", "get_weather", json.dumps(ARGUMENTS))


def test_every_template_is_known_here() -> None:
    skip_without_sources()
    assert set(FILES) == set(EXPECTED) | UNREAD


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_family_of_a_template(name: str) -> None:
    skip_without_sources()
    family = family_of(FILES[name].read_text(encoding="utf-8"))
    assert family.name == EXPECTED[name]
    if name in THOUGHTS:
        assert (family.thought and family.thought.open) == THOUGHTS[name]


def begin_of_call(family: Family, told: str, start: int) -> int:
    """Where the mark begins that `start`, the first difference to the prompt without the call, may lie within."""
    marks = (*family.controls, *family.syntax.triggers, *(thought.open for thought in [family.thought] if thought))
    inside = [
        start - length for mark in marks for length in range(1, len(mark)) if told.startswith(mark, start - length)
    ]
    return min(inside, default=start)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_a_template_writes_is_what_its_family_reads(name: str) -> None:
    skip_without_sources()
    source = Path(FILES[name]).read_text(encoding="utf-8")
    template, family = ChatTemplate(source), family_of(source)
    question = Message("user", "Weather?")
    called = (Message("assistant", tool_calls=(CALL,)), Message("tool", "Sunny.", tool_call_id=CALL.id))
    asked, told = (template.render(Conversation(messages=(question, *more), tools=TOOLS)) for more in ((), called))
    differ = (at for at, (a, b) in enumerate(zip(asked, told, strict=False)) if a != b)
    start = begin_of_call(family, told, next(differ, len(asked)))
    ask = Ask(TOOLS, opened=family.opens_thought(told[:start]))
    outcome = read(parser_of(family, ask), [told[start:]])
    assert [(called, json.loads(arguments)) for called, arguments in outcome.calls] == [("get_weather", ARGUMENTS)]


def test_a_name_goes_before_what_the_template_shows() -> None:
    assert family_of("<tool_call>", "mistral").name == "mistral"
    assert family_of("<tool_call></think>", "mistral").thought is not None
    assert family_of("").name == "json"
    with pytest.raises(FamilyUnknown, match="hermes"):
        family_of("", "no-such-family")


def test_names_are_what_a_catalog_takes_and_no_two_are_alike() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert all(
        name.replace("-", "").replace(".", "").isalnum() and name.islower() and len(name) <= 40 for name in names
    )
