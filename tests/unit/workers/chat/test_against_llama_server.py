"""Prompts beside those of the real llama-server: every template of llama.cpp's folder, by its /apply-template.

What differs is meant to, and listed here and in docs/chat-templates.md with its reason; what is listed and does not
differ any more fails too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.api.openai.requests import read_chat
from tests.support.llama_source import files_of, skip_without_sources
from tests.support.real_server import asked, built_server, real_server
from tests.support.stack import ROOT, SHARED_MODELS
from tests.unit.workers.chat.conversations import GROUPS, Body
from workers.chat.conversation import Conversation, conversation_of
from workers.chat.named_templates import OF_LLAMA_SERVER
from workers.chat.template import ChatTemplate
from workers.protocol.events import CallFailed
from workers.protocol.requests import Message

FILES = {path.stem: path for path in files_of("models/templates", "*.jinja")}
MODEL = SHARED_MODELS / "stories260K.gguf"
BOS, EOS = "<s>", "</s>"

EVERY, WITHOUT_ENDS = "a finished answer", ("tencent-Hy3",)
"""A group in which every template differs, but for those whose turns have no end."""

DIFFERENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "what it shows no place for is put into words: tools, calls and results in the family's own form. "
    "llama-server leaves them out": {
        **dict.fromkeys(
            ("tools", "calls", "two calls", "words and a call", "prefill with tools", "prefill after a result"),
            (
                "HuggingFaceTB-SmolLM3-3B",
                "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
                "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                "deepseek-ai-DeepSeek-V3.1",
                "fireworks-ai-llama-3-firefunction-v2",
                "google-gemma-2-2b-it",
                "llama-cpp-rwkv-world",
                "microsoft-Phi-3.5-mini-instruct",
            ),
        ),
    },
    "it shows tools and no calls: these are written in the family's own form. llama-server leaves them out": {
        **dict.fromkeys(
            ("calls", "two calls", "words and a call", "prefill after a result"),
            ("LFM2-8B-A1B", "LFM2.5-Instruct", "ibm-granite-granite-3.3-2B-Instruct"),
        ),
    },
    "it takes one call in a message: several become messages of one call each. llama-server drops all "
    "but the first, or refuses": {
        "two calls": (
            "GigaChat3-10B-A1.8B",
            "GigaChat3.1-10B-A1.8B",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "openai-gpt-oss-120b",
        ),
    },
    "what is said beside a call is kept. llama-server drops it, or the call": {
        "words and a call": ("google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "llama-cpp-deepseek-r1"),
    },
    "around a thought stands the whitespace that the template itself writes. llama-server has its own": {
        **dict.fromkeys(
            ("prefill", "prefill, thinking switched", "prefill with tools", "prefill after a result"),
            (
                "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
                "NVIDIA-Nemotron-Nano-v2",
                "StepFun3.5-Flash",
                "poolside-Laguna-XS-2.1",
                "poolside-Laguna-XS.2",
            ),
        ),
        "prefill of a thought": ("NVIDIA-Nemotron-Nano-v2", "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    },
    "the models do not think: an answer goes on without a thought. llama-server writes an empty one": {
        **dict.fromkeys(
            (
                "prefill",
                "prefill, thinking switched",
                "prefill with tools",
                "prefill after a result",
                "prefill of a thought",
            ),
            ("Kimi-K2-Instruct", "LFM2-8B-A1B", "moonshotai-Kimi-K2"),
        ),
    },
    "an answer goes on in the form in which the template writes turns. llama-server leaves a mark out, "
    "or has one twice": {
        **dict.fromkeys(
            ("prefill", "prefill, thinking switched", "prefill with tools"),
            (
                "Apriel-1.6-15b-Thinker-fixed",
                "llama-cpp-rwkv-world",
                "unsloth-Apriel-1.5",
                "unsloth-mistral-Devstral-Small-2507",
                "upstage-Solar-Open-100B",
            ),
        ),
        "prefill after a result": (
            "Apriel-1.6-15b-Thinker-fixed",
            "deepseek-ai-DeepSeek-V3.2",
            "llama-cpp-rwkv-world",
            "unsloth-Apriel-1.5",
            "unsloth-mistral-Devstral-Small-2507",
            "upstage-Solar-Open-100B",
        ),
        "prefill of a thought": (
            "llama-cpp-rwkv-world",
            "unsloth-Apriel-1.5",
            "unsloth-mistral-Devstral-Small-2507",
            "upstage-Solar-Open-100B",
        ),
    },
    "with thinking off, a thought that is closed is not closed once more. llama-server does": {
        "prefill, thinking switched": ("GLM-4.7-Flash", "Spark2.5", "poolside-Laguna-S-2.1"),
    },
    "`reasoning_effort` and thinking switched off reach it, under its own names (`thinking_effort`, "
    "`thinking`). llama-server does not know these": {
        **dict.fromkeys(("thinking switched", "effort", "tools", "calls", "prefill, thinking switched"), ("Kimi-K3",)),
    },
    "an answer beside a thought is kept. llama-server loses it": {
        **dict.fromkeys(("turns", "thinking switched"), ("unsloth-mistral-Devstral-Small-2507",)),
    },
    "it has no place for a thought that is to be gone on from: refused. llama-server drops the thought": {
        "prefill of a thought": (
            "Apertus-8B-Instruct",
            "CohereForAI-c4ai-command-r-plus-tool_use",
            "GigaChat3-10B-A1.8B",
            "GigaChat3.1-10B-A1.8B",
            "MiMo-VL",
            "MiniMax-M1",
            "Mistral-Small-3.2-24B-Instruct-2506",
            "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
            "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            "Qwen-Qwen2.5-7B-Instruct",
            "Qwen3-Coder",
            "fireworks-ai-llama-3-firefunction-v2",
            "google-gemma-2-2b-it",
            "ibm-granite-granite-4.0",
            "ibm-granite-granite-4.1",
            "meetkai-functionary-medium-v3.1",
            "meetkai-functionary-medium-v3.2",
            "meta-llama-Llama-3.1-8B-Instruct",
            "meta-llama-Llama-3.2-3B-Instruct",
            "meta-llama-Llama-3.3-70B-Instruct",
            "microsoft-Phi-3.5-mini-instruct",
            "mistralai-Mistral-Nemo-Instruct-2407",
        ),
    },
    "it takes text parts: they come as one text, joined by line ends. llama-server hands over the parts, "
    "which most such templates write without anything between": {
        "parts": (
            "Apriel-1.6-15b-Thinker-fixed",
            "Cohere2MoE",
            "GLM-4.6",
            "GLM-4.7-Flash",
            "Kimi-K2-Instruct",
            "Kimi-K2-Thinking",
            "Kimi-K3",
            "MiniMax-M1",
            "MiniMax-M2",
            "MiniMax-M3",
            "Mistral-Small-3.2-24B-Instruct-2506",
            "Qwen3.5-4B",
            "Reka-Edge",
            "Spark2.5",
            "StepFun3.5-Flash",
            "google-gemma-4-31B-it",
            "google-gemma-4-31B-it-interleaved",
            "moonshotai-Kimi-K2",
            "muse-glimmer",
            "tencent-Hy3",
            "unsloth-Apriel-1.5",
            "unsloth-mistral-Devstral-Small-2507",
        ),
    },
}
"""Reason, as docs/chat-templates.md gives it -> groups -> templates."""


def listed(name: str) -> set[str]:
    """Return the groups in which a template's prompts are listed to differ."""
    groups = {group for places in DIFFERENCES.values() for group, names in places.items() if name in names}
    return groups if name in WITHOUT_ENDS else groups | {EVERY}


def own_prompt(template: ChatTemplate, body: Body) -> str | None:
    """None: refused."""
    try:
        text = template.render(conversation_of(read_chat(json.dumps(body).encode()).requests[0]))
    except CallFailed:
        return None
    return text.removeprefix(BOS)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FILES) or ["none"])
def test_prompts_are_those_of_the_real_server(name: str) -> None:
    skip_without_sources()
    built_server()
    template = ChatTemplate(FILES[name].read_text(encoding="utf-8"), bos_text=BOS, eos_text=EOS)
    differing = set()
    with real_server(MODEL, "--jinja", "--chat-template-file", str(FILES[name])) as url:
        for group, bodies in GROUPS.items():
            theirs = [(asked(f"{url}/apply-template", body) or {}).get("prompt") for body in bodies]
            if theirs != [own_prompt(template, body) for body in bodies]:
                differing.add(group)
    assert differing == listed(name)


NAMED_ALIKE = sorted(OF_LLAMA_SERVER.keys() - {"yandex"})
"""llama-server drops that one's system messages."""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED_ALIKE)
def test_named_templates_are_those_of_the_real_server(name: str) -> None:
    built_server()
    system, user, answer, more = (
        {"role": role, "content": text}
        for role, text in (("system", " Brief. "), ("user", " Hi! "), ("assistant", " Hello. "), ("user", "More?"))
    )
    template = ChatTemplate(OF_LLAMA_SERVER[name])
    with real_server(MODEL, "--no-jinja", "--chat-template", name) as url:
        for messages in ([user], [system, user], [system, user, answer, more], [user, answer, more]):
            theirs = asked(f"{url}/apply-template", {"messages": messages})
            assert theirs is not None
            conversation = Conversation(messages=tuple(Message(**one) for one in messages))  # type: ignore[arg-type]
            assert template.render(conversation) == theirs["prompt"]


def test_what_differs_is_told_with_its_reason() -> None:
    page = Path(ROOT / "docs" / "chat-templates.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for reason, places in DIFFERENCES.items():
        row = next((row for row in rows if row.endswith(f"| {reason} |")), None)
        assert row is not None, reason
        missing = {name for names in places.values() for name in names if f"`{name}`" not in row}
        assert not missing, (reason, missing)
