"""What a request with 100 tools and 200 messages costs before its first token: the gateway, then template and tokens.

    python -m benchmarks.large_request

One caller asks a fake worker for one token, again and again. Gateway CPU is its process's own user and system time,
divided by the requests; a chat of one line is measured beside it. The gateway has core 0 for itself; load, worker and
Redis share core 1. What a true worker then does is measured here, without its queue and its engine: the template of
Qwen3, rendered in the process that renders, and Qwen2's vocabulary of 151,936 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kv_cost import toy
from benchmarks.reference import sdist_source
from benchmarks.table import Row, print_rows
from gateway.api.openai.requests import read_chat
from tests.support.stack import Process, Stack
from workers.chat.conversation import conversation_of
from workers.chat.renderer import Renderer
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

TOOLS, MESSAGES = 100, 200
BAR_MS = 10.0
SEED = 4
SENTENCE = "the a file of path value returns list name error when user search to in result and for which number"
WORDS = SENTENCE.split()
TYPES = ("string", "integer", "number", "boolean")

Body = dict[str, Any]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def schema(rng: random.Random, depth: int = 2) -> Body:
    """Four plain properties, an enumeration, a list and, to that depth, an object."""
    properties: Body = {
        f"{kind}_{number}": {"type": kind, "description": words(rng, 8)} for number, kind in enumerate(TYPES)
    }
    properties["mode"] = {"type": "string", "enum": ["read", "write", "append"], "description": words(rng, 5)}
    properties["paths"] = {"type": "array", "items": {"type": "string"}}
    if depth > 1:
        properties["options"] = schema(rng, depth - 1)
    return {"type": "object", "properties": properties, "required": ["string_0", "mode"]}


def chat() -> Body:
    """50 turns of four: a question, a call, its result, an answer."""
    rng = random.Random(SEED)
    messages: list[Body] = []
    for turn in range(MESSAGES // 4):
        call = {"name": f"tool_{turn}", "arguments": json.dumps({"string_0": words(rng, 10), "mode": "read"})}
        calls = [{"id": f"call_{turn:09}", "type": "function", "function": call}]
        messages += [
            {"role": "user", "content": words(rng, 40)},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{turn:09}", "content": words(rng, 200)},
            {"role": "assistant", "content": words(rng, 80)},
        ]
    functions = [
        {"name": f"tool_{number}", "description": words(rng, 20), "parameters": schema(rng)} for number in range(TOOLS)
    ]
    messages[-1] = {"role": "user", "content": words(rng, 40)}
    return {"messages": messages, "tools": [{"type": "function", "function": one} for one in functions]}


def anthropic(asked: Body) -> Body:
    """The same as Anthropic's dialect has it."""
    messages: list[Body] = []
    for message in asked["messages"]:
        if message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            messages.append({"role": "user", "content": [block]})
        elif calls := message.get("tool_calls"):
            blocks = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in calls
            ]
            messages.append({"role": "assistant", "content": blocks})
        else:
            messages.append(message)
    functions = [tool["function"] for tool in asked["tools"]]
    tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
    return {"messages": messages, "tools": tools}


def responses(asked: Body) -> Body:
    """The same as items of a response."""
    items: list[Body] = []
    for message in asked["messages"]:
        if message["role"] == "tool":
            place = {"type": "function_call_output", "call_id": message["tool_call_id"]}
            items.append({**place, "output": message["content"]})
        elif calls := message.get("tool_calls"):
            items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
        else:
            items.append(message)
    return {"input": items, "tools": [{"type": "function", **tool["function"]} for tool in asked["tools"]]}


def load(gateway: Process, key: str, path: str, body: Path, requests: int) -> float:
    """Milliseconds of the gateway's CPU per request. Raises RuntimeError where one failed."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", key]
    command += ["--callers", "1", "--requests", str(requests), "--path", path, "--body", str(body)]
    done = subprocess.run([*command, "--watch", str(gateway.pid)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{path}: load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    result = json.loads(done.stdout)
    return float(result["watched_cpu_s"]) / requests * 1e3


def gateway_rows(asked: Body, requests: int) -> list[Row]:
    short: Body = {"messages": [{"role": "user", "content": "Tell me about it."}]}
    one = {"model": "fake", "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    bodies = {
        "chat of one line": ("/v1/chat/completions", {**short, **one, **usage, "max_tokens": 1}),
        "chat": ("/v1/chat/completions", {**asked, **one, **usage, "max_tokens": 1}),
        "messages (Anthropic)": ("/v1/messages", {**anthropic(asked), **one, "max_tokens": 1}),
        "responses": ("/v1/responses", {**responses(asked), **one, "store": False, "max_output_tokens": 1}),
    }
    rows = []
    with Stack(measured=True, cores={"gateway": "0", "fake": "1", "redis": "1"}) as stack:
        stack.fake_worker("fake", "--step-ms", "1", "--ctx", "1000000")
        gateway = stack.gateway(log_level="info")
        for name, (path, document) in bodies.items():
            body = stack.folder / "body.json"
            body.write_text(json.dumps(document))
            load(gateway, stack.key, path, body, 10)
            cost_ms = load(gateway, stack.key, path, body, requests)
            size = f"{body.stat().st_size / 1024:,.0f} KiB"
            bounded = document.keys() >= {"tools"}
            bar = f"<= {BAR_MS:g} ms" if bounded else ""
            rows.append(Row(f"gateway, {name}", f"{cost_ms:.2f} ms of CPU", size, bar, not bar or cost_ms <= BAR_MS))
    return rows


def worker_rows(asked: Body, repeats: int) -> list[Row]:
    """Medians of the time that each takes by the clock."""
    request = read_chat(json.dumps({"model": "fake", **asked}).encode()).requests[0]
    template = sdist_source() / "vendor/llama.cpp/models/templates/Qwen-Qwen3-0.6B.jinja"
    with Model.load(toy(), LlamaSettings()) as model, Renderer({"default": template.read_text()}) as renderer:
        conversation = conversation_of(request)
        text = renderer.render(conversation)
        tokens = model.tokenize(text, add_special=True, parse_special=True)
        rendered = median_ms(lambda: renderer.render(conversation), repeats)
        tokenised = median_ms(lambda: model.tokenize(text, add_special=True, parse_special=True), repeats)
    return [
        Row("worker, its template", f"{rendered:.1f} ms", f"{len(text):,} characters", "", True),
        Row("worker, tokens of that", f"{tokenised:.1f} ms", f"{len(tokens):,} tokens", "", True),
    ]


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def measure(requests: int) -> list[Row]:
    asked = chat()
    return [*gateway_rows(asked, requests), *worker_rows(asked, max(3, requests // 10))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    print_rows(f"a request with {TOOLS} tools and {MESSAGES} messages", measure(parser.parse_args().requests))
