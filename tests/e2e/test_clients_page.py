"""docs/clients.md as readers meet it: each example is pasted as it stands, with an address and a key of one's own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.media_files import sound_file
from tests.support.projectors import SAMPLE_RATE, sound
from tests.support.stack import ROOT, Stack

# Most of its minute is the SDKs' imports, once per example.
pytestmark = pytest.mark.long

PAGE = ROOT / "docs" / "clients.md"
ADDRESS, KEY = "http://127.0.0.1:8080", "<the printed key>"

STORY = r"[Ff]ox[^{]*\."
CALL = r"get_weather \{'city': 'Paris'\}\n.*(sunny|21)"
CHUNK = r'data: \{"id":"chatcmpl-[^\n]+"content":"'

SENSIBLE: dict[str, tuple[str, ...]] = {
    "Chat": (r'"content":"[^"]*Paddock', CHUNK + r'(.|\n)+"completion_tokens":\d+(.|\n)+data: \[DONE\]'),
    "Completions": (r'"object":"text_completion".*"text":"[^"]{20}',),
    "Responses": (r'"object":"response".*"output_text".*Paddock',),
    "Embeddings": (r'"object":"embedding".*"embedding":\[-?\d',),
    "Anthropic's messages": (r'"type":"message".*"text":"[^"]*Paddock',),
    "llama-server's routes": (
        r'"content":"[^"]{20}.*"timings":',
        r'"tokens":\[\{"id":\d+,"piece":"I',
        r'"default_generation_settings":.*"chat_template":',
    ),
    "What is there": (r'"object":"list".*"id":"paddock-demo"',),
    "An answer": ("Paddock",),
    "A stream": (STORY,),
    "Tools": (CALL,),
    "A parsed answer": (r"name='Anna' age=31",),
    "A conversation that Paddock keeps": (r"Paddock.*\n.*9", STORY + r"(.|\n)*\n \d+ tokens"),
    "What is said in a sound": (r"[^\s]", r"[^\s]"),
    "Vectors": (r"^-?[01]\.\d+",),
    "A message": (r"^\d+ tokens\n.*Paddock",),
    "A streamed message": (STORY,),
    "Tool use": (CALL,),
    "ChatOpenAI": (rf"Paddock(.|\n)*{STORY}\s*\n .*'name': 'get_weather', 'args': \{{'city': 'Paris'\}}(.|\n)*\n\d+$",),
    "requests": (STORY,),
    "gateway.client": (r"Paddock[^\n]*\n .{20}",),
    "llama.vim": (r'^\{"content":"[^"]*","timings/prompt_n":\d+,"tokens_cached":\d+,"truncated":false\}',),
}
"""Heading -> what the examples under it print, in order."""

NEEDS = {"ChatOpenAI": "langchain_openai"}
"""Heading -> a package that is no dependency of ours."""


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
RUN = {"name": "run", "description": "Runs a command", "parameters": {**SCHEMA, "additionalProperties": False}}
BRIEF = "Be brief."
QUESTION = "Who are you?"

ASSISTANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Claude Code": (
        "/v1/messages?beta=true",
        "event: message_stop",
        {
            "system": [
                {"type": "text", "text": "You help."},
                {"type": "text", "text": BRIEF, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "system", "content": "There are no agents."},
            ],
            "tools": [{"name": "run", "description": "Runs a command", "input_schema": SCHEMA}],
            "metadata": {"user_id": '{"session_id": "1"}'},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        },
    ),
    "Codex": (
        "/v1/responses",
        "event: response.completed",
        {
            "input": [
                {
                    "type": "message",
                    "id": f"msg_{role}",
                    "role": role,
                    "content": [{"type": "input_text", "text": text}],
                }
                for role, text in (("developer", BRIEF), ("user", QUESTION))
            ],
            "tools": [{"type": "function", "strict": False, **RUN}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "session",
            "client_metadata": {"session_id": "session"},
        },
    ),
    "opencode": (
        "/v1/chat/completions",
        "data: [DONE]",
        {
            "messages": [{"role": "system", "content": BRIEF}, {"role": "user", "content": QUESTION}],
            "tools": [{"type": "function", "function": RUN}],
            "tool_choice": "auto",
            "max_tokens": 8192,
            "stream_options": {"include_usage": True},
        },
    ),
}
"""Name -> path, last event and body, in the form of what versions 2.1.197, 0.169.0 and 1.18.33 of them sent us."""


@dataclass(frozen=True, slots=True)
class Example:
    heading: str
    number: int
    """Among those under its heading."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.heading} {self.number + 1}"


def examples() -> list[Example]:
    found: list[Example] = []
    for section in re.split(r"^#{2,3} ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
        found += [Example(heading, number, language, text) for number, (language, text) in enumerate(blocks)]
    return found


def test_each_example_has_something_to_print() -> None:
    counted: dict[str, int] = {}
    for example in examples():
        counted[example.heading] = counted.get(example.heading, 0) + 1
    assert counted == {heading: len(patterns) for heading, patterns in SENSIBLE.items()}


@pytest.mark.parametrize("example", examples(), ids=str)
def test_it_prints_something_sensible(example: Example, kinds_stack: Stack, tmp_path: Path) -> None:
    package = NEEDS.get(example.heading)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert ADDRESS in example.text
    text = example.text.replace(ADDRESS, kinds_stack.gateways[0].url).replace(KEY, kinds_stack.key)
    file = tmp_path / "example"
    file.write_text(text)
    (tmp_path / "speech.wav").write_bytes(sound_file(sound(1), SAMPLE_RATE))
    command = [sys.executable, "-P", str(file)] if example.language == "python" else ["sh", str(file)]
    environment = {**os.environ, "KEY": kinds_stack.key, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(SENSIBLE[example.heading][example.number], done.stdout), done.stdout
    assert not done.stderr


@pytest.mark.parametrize("name", ASSISTANTS)
def test_what_an_assistant_sends_is_answered(name: str, kinds_stack: Stack) -> None:
    path, last_event, body = ASSISTANTS[name]
    answer = requests.post(
        kinds_stack.gateways[0].url + path,
        json={"model": DEMO_ALIAS, "stream": True, **body},
        headers={"Authorization": f"Bearer {kinds_stack.key}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert last_event in answer.text


@pytest.mark.parametrize("section", ["Claude Code", "Codex", "opencode", "aider", "Continue", "llama.vscode"])
def test_settings_name_the_address_and_a_key(section: str) -> None:
    text = PAGE.read_text().partition(f"### {section}\n")[2].partition("\n### ")[0]
    assert ADDRESS in text
    assert KEY in text or "PADDOCK_KEY" in text
