"""What Open WebUI sends when its page asks: answers, titles, tags, questions that follow, and vectors of files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from steps import CHAT, EMBEDDER, KEY, URL, WEATHER, WHO, run

PORT = random.randrange(10_000, 30_000)
SETTINGS = {
    "DATA_DIR": str(Path.home() / "data"),
    "WEBUI_SECRET_KEY": "a secret of this run",
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": KEY,
    "ENABLE_OLLAMA_API": "false",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_OPENAI_API_BASE_URL": f"{URL}/v1",
    "RAG_OPENAI_API_KEY": KEY,
    "RAG_EMBEDDING_MODEL": EMBEDDER,
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "SCARF_NO_ANALYTICS": "true",
}
TOKEN = ""
ASKED = [{"role": "user", "content": WHO}]
PAST = [*ASKED, {"role": "assistant", "content": "I am Paddock."}]


def call(path, body=None, timeout=240):
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from error


def signed_up():
    global TOKEN
    for _ in range(600):
        try:
            call("/health", timeout=5)
            break
        except OSError:
            time.sleep(0.5)
    person = {"name": "Anna", "email": "anna@example.com", "password": "a-Password-1"}
    TOKEN = json.loads(call("/api/v1/auths/signup", person))["token"]
    assert CHAT in call("/api/models")


def chat():
    call("/api/chat/completions", {"model": CHAT, "messages": ASKED, "stream": False})
    call("/api/chat/completions", {"model": CHAT, "messages": ASKED, "stream": True})


def chat_as_the_page_asks():
    features = {"image_generation": False, "code_interpreter": False, "web_search": False, "memory": False}
    options = {"stream_options": {"include_usage": True}, "features": features, "variables": {"{{USER_NAME}}": "Anna"}}
    call("/api/chat/completions", {"model": CHAT, "messages": ASKED, "stream": True, "params": {}, **options})


def settings():
    params = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "max_tokens": 60,
        "seed": 3,
        "stop": ["END"],
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repeat_penalty": 1.1,
        "reasoning_effort": "low",
        "logit_bias": "50:-1",
        "function_calling": "native",
        "custom_params": {"repetition_penalty": "1.1"},
    }
    call("/api/chat/completions", {"model": CHAT, "messages": ASKED, "stream": False, "params": params})


def tools():
    function = {"name": "get_weather", "description": "Current weather", "parameters": {"type": "object"}}
    asked = [{"role": "user", "content": WEATHER}]
    body = {"model": CHAT, "messages": asked, "tools": [{"type": "function", "function": function}], "stream": True}
    call("/openai/chat/completions", body)


def tasks():
    for name in ("title", "follow_up", "tags", "queries", "emoji"):
        more = {"prompt": WHO, "type": "web_search", "chat_id": "local:1"}
        call(f"/api/v1/tasks/{name}/completions", {"model": CHAT, "messages": PAST, "stream": False, **more})


def vectors():
    call("/api/v1/retrieval/process/text", {"name": "fox", "content": "A fox has a lamp.", "collection_name": "c"})
    call("/api/v1/retrieval/query/collection", {"collection_names": ["c"], "query": "a fox", "k": 1})
    call("/api/embeddings", {"model": EMBEDDER, "input": ["a fox"]})


def responses():
    call("/openai/responses", {"model": CHAT, "input": WHO, "stream": False})


log = (Path.home() / "log").open("wb")
server = subprocess.Popen(
    [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(PORT)],
    env={**os.environ, **SETTINGS},
    stdout=log,
    stderr=log,
)
try:
    run(signed_up, chat, chat_as_the_page_asks, settings, tools, tasks, vectors, responses)
finally:
    server.terminate()
    server.wait()
