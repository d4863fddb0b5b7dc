"""What users of the command `llm` do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from steps import CHAT, KEY, PERSON, URL, WEATHER, WHO, run

FOLDER = Path.home() / "llm"
FOLDER.mkdir()
SETTINGS = f"api_base: {URL}/v1\n  api_key_name: paddock\n"
(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: paddock\n  model_name: {CHAT}\n  supports_tools: true\n  supports_schema: true\n  {SETTINGS}"
    f"- model_id: plain\n  model_name: {CHAT}\n  completion: true\n  {SETTINGS}"
)


def llm(*arguments):
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    environment = {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(done.stderr)


def chat():
    llm("keys", "set", "paddock", "--value", KEY)
    llm("-m", "paddock", WHO)
    llm("-m", "paddock", "--continue", "What is 4 + 5?")


def whole():
    llm("-m", "paddock", "--no-stream", "-s", "Be brief.", "-o", "temperature", "0.5", "-o", "max_tokens", "40", WHO)


def settings():
    options = {"top_p": "0.9", "frequency_penalty": "0.1", "seed": "3", "stop": "END", "logit_bias": '{"50": -1}'}
    llm("-m", "paddock", *(part for name, value in options.items() for part in ("-o", name, value)), WHO)
    llm("-m", "paddock", "-o", "json_object", "1", PERSON)


def schema():
    llm("-m", "paddock", "--schema", "name, age int", PERSON)


def tools():
    code = 'def get_weather(city: str) -> str:\n    "Current weather of a city"\n    return "sunny"\n'
    llm("-m", "paddock", "--functions", code, "-o", "temperature", "0", WEATHER)


def completion():
    llm("-m", "plain", "-o", "max_tokens", "16", "In a small town")


run(chat, whole, settings, schema, tools, completion)
