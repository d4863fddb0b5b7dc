"""Asks a real llama-server for completions from the demo model and writes down what it says.

    python -m tests.support.llama_server_golden --server BINARY

`tests/integration/engine/test_llama_server_golden.py` holds our engine to the file that this makes. Run it again when
the pinned llama.cpp or the demo model changes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
GOLDEN = ROOT / "tests" / "integration" / "engine" / "golden" / "llama_server.json"
N_CTX = 512
N_PREDICT = 32
START_S = 30.0

PROMPTS = {
    "story": "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
    "sum": "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n<|im_start|>assistant\n",
    "again": "The fox and the owl. The fox and the owl. The fox",
}

WILD: dict[str, Any] = {"temperature": 1.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
"""Hot and unfiltered: small differences in how a token is drawn show at once."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "defaults": ("story", {}),
    "defaults, another seed": ("story", {"seed": 4294967294}),
    "greedy": ("story", {"temperature": 0.0}),
    "greedy, ignore_eos": ("sum", {"temperature": 0.0, "ignore_eos": True}),
    "temperature": ("again", {"temperature": 1.5, "ignore_eos": True}),
    "wild": ("again", WILD),
    "wild, another seed": ("again", {**WILD, "seed": 1}),
    "dynatemp": ("again", {**WILD, "temperature": 1.0, "dynatemp_range": 0.9, "dynatemp_exponent": 1.5}),
    "dynatemp at temperature 0": ("again", {**WILD, "temperature": 0.0, "dynatemp_range": 2.0}),
    "top_k": ("again", {**WILD, "top_k": 5}),
    "top_p": ("again", {**WILD, "top_p": 0.9}),
    "min_p": ("again", {**WILD, "min_p": 0.02}),
    "min_keep": ("again", {**WILD, "min_p": 0.5, "top_p": 0.1, "min_keep": 4}),
    "typical_p": ("again", {**WILD, "typical_p": 0.5}),
    "top_n_sigma": ("again", {**WILD, "top_n_sigma": 2.0}),
    "xtc": ("again", {**WILD, "temperature": 0.8, "xtc_probability": 0.7, "xtc_threshold": 0.05}),
    "xtc at temperature 0": ("again", {"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.02}),
    "repeat_penalty": ("again", {"temperature": 0.0, "repeat_penalty": 1.3, "ignore_eos": True}),
    "repeat_penalty, few": ("again", {"temperature": 0.0, "repeat_penalty": 2.0, "repeat_last_n": 8}),
    "presence and frequency": ("again", {"presence_penalty": 0.7, "frequency_penalty": 0.4, "ignore_eos": True}),
    "dry": ("again", {"temperature": 0.0, "dry_multiplier": 1.5, "dry_allowed_length": 1, "ignore_eos": True}),
    "dry, its settings": (
        "again",
        {
            "dry_multiplier": 0.8,
            "dry_base": 1.3,
            "dry_penalty_last_n": 12,
            "dry_sequence_breakers": [".", " the"],
            "ignore_eos": True,
        },
    ),
    "mirostat 1": ("again", {**WILD, "mirostat": 1, "mirostat_tau": 3.0, "mirostat_eta": 0.3}),
    "mirostat 2": ("again", {**WILD, "mirostat": 2, "mirostat_tau": 6.0, "mirostat_eta": 0.3}),
    "mirostat at temperature 0": ("again", {"mirostat": 2, "temperature": 0.0}),
    "adaptive_p": ("again", {"samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.3, "adaptive_decay": 0.7}),
    "infill": ("again", {"samplers": ["top_k", "infill"], "top_k": 20}),
    "order": ("again", {**WILD, "samplers": ["temperature", "top_p", "top_k"], "top_p": 0.8, "top_k": 9}),
    "order, by letters": ("again", {"temperature": 2.0, "samplers": "tmxpyksde", "typical_p": 0.9}),
    "penalties last": (
        "again",
        {"temperature": 0.0, "repeat_penalty": 1.5, "samplers": ["top_k", "penalties", "temperature"]},
    ),
    "no temperature": ("again", {"temperature": 0.0, "samplers": ["min_p"], "min_p": 0.001, "seed": 9}),
    "no samplers": ("again", {"samplers": []}),
    "logit_bias": ("story", {"temperature": 0.0, "logit_bias": [[" Once", False], ["fox", -5.0], [" the", 2.5]]}),
    "logit_bias, twice": ("story", {"temperature": 0.0, "logit_bias": [[37, 2.0], [37, 3.0], [670, False]]}),
    "n_probs": ("story", {"n_probs": 5}),
    "n_probs, greedy": ("story", {"temperature": 0.0, "n_probs": 3}),
    "n_probs after sampling": ("again", {**WILD, "top_k": 12, "n_probs": 5, "post_sampling_probs": True}),
    "n_probs after sampling, greedy": ("story", {"temperature": 0.0, "n_probs": 3, "post_sampling_probs": True}),
    "n_probs after mirostat": ("again", {"mirostat": 2, "temperature": 1.5, "n_probs": 4, "post_sampling_probs": True}),
    "n_probs after xtc": (
        "again",
        {**WILD, "top_k": 20, "xtc_probability": 1.0, "xtc_threshold": 0.05, "n_probs": 4, "post_sampling_probs": True},
    ),
}  # fmt: skip


@contextmanager
def llama_server(binary: Path) -> Iterator[str]:
    """-> its address. One slot, one thread, no other call beside ours."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(binary), "-m", str(MODEL), "--host", "127.0.0.1", "--port", str(port)),
        *("-c", str(N_CTX), "-np", "1", "-t", "1", "-tb", "1", "--no-warmup", "--cache-ram", "0"),
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdout=said, stderr=said, env=environment) as one:
        try:
            address = f"http://127.0.0.1:{port}"
            _await(address, one)
            yield address
        finally:
            one.terminate()


def _await(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server did not start within {START_S:g} s")


def _ask(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def record(address: str) -> dict[str, Any]:
    prompts = {
        name: _ask(address, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        for name, text in PROMPTS.items()
    }
    cases = []
    for name, (prompt, asked) in CASES.items():
        settings = {"seed": 42, **asked}
        fixed = {"prompt": prompts[prompt], "n_predict": N_PREDICT, "cache_prompt": False, "return_tokens": True}
        answer = _ask(address, "/completion", {**settings, **fixed})
        case = {"name": name, "prompt": prompt, "settings": settings, "text": answer["content"]}
        probs = [_probs(one) for one in answer.get("completion_probabilities", ())]
        cases.append({**case, "tokens": answer["tokens"], **({"probs": probs} if probs else {})})
    return {"n_predict": N_PREDICT, "prompts": prompts, "cases": cases}


def _probs(one: dict[str, Any]) -> list[Any]:
    """[token, its (log) probability, [[other token, ...], ...]]"""
    value, top = ("prob", "top_probs") if "prob" in one else ("logprob", "top_logprobs")
    return [one["id"], round(one[value], 6), [[other["id"], round(other[value], 6)] for other in one[top]]]


def same_answers(cases: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of cases whose settings made no difference."""
    first: dict[tuple[str, str], str] = {}
    pairs = []
    for case in cases:
        if "n_probs" not in case["settings"]:
            other = first.setdefault((case["prompt"], case["text"]), case["name"])
            if other != case["name"]:
                pairs.append((other, case["name"]))
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", type=Path, required=True, help="llama-server, built from the pinned llama.cpp")
    with llama_server(parser.parse_args().server) as address:
        document = record(address)
    for pair in same_answers(document["cases"]):
        print("the same answer:", *pair, sep="\n  ")
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in document.pop("cases"))
    GOLDEN.write_text(json.dumps(document)[:-1] + ', "cases": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
