"""Gateway CPU per streamed token of each dialect and of what can be asked for, against plain chat in the same run.

    python -m benchmarks.dialects

64 answers at a time, a step every 20 ms, as `benchmarks.gateway_cpu` has it: the gateway has core 0 for itself; load,
fake workers and Redis share core 1. The workers say text, a thought or the arguments of a call, and their parsers
read it as a true worker's do. CPU time is the gateway's own user and system time while the load runs, divided by the
tokens that reached the callers, requests' setup included: a millisecond more for a request is 3.3 us more for each of
its 300 tokens. Machines change their speed by the minute, so chat is measured anew before every third of the others,
and these are held against it; what one costs more is the median of that over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Row, print_rows
from tests.support.stack import Process, Stack

ANSWERS, STEP_MS, TOKENS = 64, 20, 300
BAR_US = 5.0
PER_CHAT = 3
"""So many of the others are held against one measurement of chat."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES, NATIVE = "/v1/messages", "/v1/responses", "/completion"

ROOM = 4 * TOKENS
"""Characters of an answer that lasts; a fake worker's tokens have four."""

ANSWERS_BY_MODEL = {
    "says": "",
    "thinks": f"<think>{'so then ' * (ROOM // 8)}",
    "calls": f'<tool_call>{{"name": "write_file", "arguments": {{"text": "{"so then " * (ROOM // 8)}',
}
"""Name of a fake worker's model -> what it answers; empty: text."""

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Tell me about it."}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
FUNCTION = {"name": "write_file", "description": "Writes a file", "parameters": PARAMETERS}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]
MESSAGES_TOOLS = [{"name": "write_file", "description": "Writes a file", "input_schema": PARAMETERS}]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask for streamed text. `fields` are laid over the path's own."""

    name: str
    path: str
    model: str = "says"
    n: int = 1
    """Answers to each request."""
    headers: tuple[str, ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()

    def body(self) -> dict[str, Any]:
        return {"model": self.model, "stream": True, **BODIES[self.path], **dict(self.fields)}


WITH_USAGE = {"max_tokens": TOKENS, "stream_options": {"include_usage": True}}

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, **WITH_USAGE},
    COMPLETIONS: {"prompt": "Once upon a time", **WITH_USAGE},
    MESSAGES: {"messages": QUESTION, "max_tokens": TOKENS},
    RESPONSES: {"input": "Tell me about it.", "max_output_tokens": TOKENS, "store": False},
    NATIVE: {"prompt": "Once upon a time", "n_predict": TOKENS},
}

PLAIN = Way("chat", CHAT)

WAYS = (
    Way("chat, `n: 4`", CHAT, n=4, fields=(("n", 4),)),
    Way("chat, a thought", CHAT, "thinks"),
    Way("chat, arguments of a call", CHAT, "calls", fields=(("tools", CHAT_TOOLS),)),
    Way("chat, `logprobs`", CHAT, fields=(("logprobs", True),)),
    Way("chat, `logprobs` with 5 others each", CHAT, fields=(("logprobs", True), ("top_logprobs", 5))),
    Way("chat, `x-resume-grace`", CHAT, headers=("x-resume-grace: 10",)),
    Way("completions", COMPLETIONS),
    Way("messages (Anthropic)", MESSAGES),
    Way("messages, a thought", MESSAGES, "thinks"),
    Way("messages, arguments of a call", MESSAGES, "calls", fields=(("tools", MESSAGES_TOOLS),)),
    Way("responses", RESPONSES),
    Way("responses, stored", RESPONSES, fields=(("store", True),)),
    Way("responses, a thought", RESPONSES, "thinks"),
    Way("responses, arguments of a call", RESPONSES, "calls", fields=(("tools", RESPONSES_TOOLS),)),
    Way("`/completion` (llama-server)", NATIVE),
    Way("`/completion`, `n_probs: 5`", NATIVE, fields=(("n_probs", 5),)),
    Way("`/completion`, `timings_per_token`", NATIVE, fields=(("timings_per_token", True),)),
)


def load(way: Way, gateway: Process, key: str, folder: Path) -> float:
    """One round on core 1: microseconds of the gateway's CPU per token. Raises RuntimeError where a stream failed."""
    body = folder / "body.json"
    body.write_text(json.dumps(way.body()))
    requests = str(ANSWERS // way.n)
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", gateway.url, "--key", key]
    command += ["--callers", requests, "--requests", requests, "--path", way.path, "--body", str(body)]
    for header in way.headers:
        command += ["--header", header]
    done = subprocess.run([*command, "--watch", str(gateway.pid)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{way.name}: load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    result = json.loads(done.stdout)
    if result["tokens"] != ANSWERS * TOKENS:
        raise RuntimeError(f"{way.name}: {result['tokens']} tokens came, and not {ANSWERS * TOKENS}")
    cost: float = result["watched_cpu_us_per_token"]
    return cost


def measure(rounds: int, ways: tuple[Way, ...] = WAYS) -> list[Row]:
    """Chat runs once more before the first round, which does not count."""
    costs: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    with Stack(measured=True, cores={"gateway": "0", "fake": "1", "redis": "1"}) as stack:
        for model, answer in ANSWERS_BY_MODEL.items():
            flags = ["--step-ms", str(STEP_MS), "--tokens", str(TOKENS)]
            flags += ["--answer", answer] if answer else []
            flags += ["--thinks"] if model == "thinks" else []
            stack.fake_worker(model, *flags, worker_id=f"fake-{model}", slots=ANSWERS)
        gateway = stack.gateway(log_level="info")
        load(PLAIN, gateway, stack.key, stack.folder)
        for _ in range(rounds):
            for number, way in enumerate(ways):
                if number % PER_CHAT == 0:
                    plain = load(PLAIN, gateway, stack.key, stack.folder)
                costs[way.name].append((load(way, gateway, stack.key, stack.folder), plain))
    return rows_of(costs)


def rows_of(costs: dict[str, list[tuple[float, float]]]) -> list[Row]:
    """`costs`: microseconds per token of each way, and of plain chat shortly before it, once for each round."""
    plain = sorted(base for figures in costs.values() for _, base in figures)
    told = f"{statistics.median(plain):.1f} us/token"
    rows = [Row(PLAIN.name, told, f"{plain[0]:.1f} to {plain[-1]:.1f}", "", True)]
    for name, figures in costs.items():
        more = statistics.median(figure - base for figure, base in figures)
        told = f"{statistics.median(figure for figure, _ in figures):.1f} us/token"
        rows.append(Row(name, told, f"{more:+.1f} us", f"<= {BAR_US:+g} us", more <= BAR_US))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="those whose names have this in them")
    arguments = parser.parse_args()
    chosen = tuple(way for way in WAYS if arguments.only in way.name)
    print_rows("gateway CPU per streamed token, by dialect", measure(arguments.rounds, chosen))
