"""What becomes of conversations whose worker drains: true workers, with a disk tier that they share and without."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.stack import DEMO_MODEL, Process, Stack

OPENING = "Once upon a time Tom and Anna lived in a little house at the edge of a big forest with their cat. " * 8
BLOCK_TOKENS = 64
SIZES = {"slots": 2, "ctx": 512, "kv_tokens": 1024}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd-drained-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    """Two workers of each model, of which only those of "shared" have a folder for prompts."""
    with Stack() as running:
        for name in ("a", "b"):
            for model in ("shared", "alone"):
                kept = {"cache_dir": folder / "cache"} if model == "shared" else {}
                options: dict[str, Any] = {"worker_id": f"{model}-{name}", "wait": False, **SIZES, **kept}
                running.worker(DEMO_MODEL, model, **options)
        running.gateway(wait=False)
        for process in running.workers:
            model, _, _ = process.name.partition("-")
            process.url = running.wait_for_worker(model, process.name, process).address
        running.wait_until_ready(running.gateways[0])
        yield running


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=60) as client:
        yield client


def complete(http: httpx2.Client, model: str, prompt: str, slot: int = -1) -> Any:
    body = {"model": model, "prompt": prompt, "n_predict": 16, "temperature": 0, "id_slot": slot}
    return http.post("/completion", json=body).raise_for_status().json()


def worker(stack: Stack, name: str) -> Process:
    return next(process for process in stack.workers if process.name == name)


def disk_counts(process: Process) -> str:
    """Return the worker's metrics of its disk tier, and its log."""
    page = httpx2.get(f"{process.url}/metrics").raise_for_status().text
    return "\n".join([*(line for line in page.splitlines() if line.startswith("paddock_cache_")), process.text()])


def files_known(process: Process) -> float:
    """Of the disk tier, as the worker counts them."""
    lines = [line for line in disk_counts(process).splitlines() if line.startswith("paddock_cache_disk_files")]
    return float(lines[0].rsplit(" ", 1)[1])


def num_computed(answer: Any) -> int:
    """Return the tokens of a prompt and its answer, whose newest token never was computed."""
    return int(answer["tokens_evaluated"] + answer["tokens_predicted"]) - 1


@contextmanager
def running_on(http: httpx2.Client, model: str) -> Iterator[None]:
    """A long call on the first worker, which its caller leaves in the end."""
    asked = {"model": model, "prompt": "A", "n_predict": 100_000, "ignore_eos": True, "context_shift": True}
    with http.stream("POST", "/completion", json={**asked, "id_slot": 1, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines)
        yield
        assert '"stop":false' in next(lines), "it was still running"


def next_turn_elsewhere(stack: Stack, http: httpx2.Client, model: str) -> tuple[Any, Any, str]:
    """A turn on the first worker, which then drains and ends, and what the other one says to the next turn."""
    first = complete(http, model, OPENING, slot=0)
    assert first["id_slot"] == 0
    with running_on(http, model):
        drained, stays = worker(stack, f"{model}-a"), worker(stack, f"{model}-b")
        drained.signal(signal.SIGTERM)
        if model == "shared":
            # The drained worker writes in pieces between its steps; others look when they are told of each.
            num_blocks = num_computed(first) // BLOCK_TOKENS
            deadline = time.monotonic() + 10
            while files_known(stays) < num_blocks:
                assert time.monotonic() < deadline, stays.text()
                time.sleep(0.05)
            assert drained.popen.poll() is None, "it is found before the worker has ended"
    assert drained.popen.wait(30) == 0
    conversation = OPENING + first["content"] + " Then one day"
    return first, complete(http, model, conversation), conversation


def test_a_conversation_goes_on_where_the_folder_is_shared_and_is_computed_anew_where_not(
    stack: Stack, http: httpx2.Client
) -> None:
    first, shared, conversation = next_turn_elsewhere(stack, http, "shared")
    assert num_computed(first) > 3 * BLOCK_TOKENS
    # Whole blocks of everything that had been computed, the answer included.
    expected = num_computed(first) // BLOCK_TOKENS * BLOCK_TOKENS
    assert shared["timings"]["cache_n"] == expected, disk_counts(worker(stack, "shared-b"))
    assert shared["timings"]["prompt_n"] < shared["tokens_evaluated"] / 2

    _, alone, same = next_turn_elsewhere(stack, http, "alone")
    assert same == conversation
    assert alone["timings"]["cache_n"] == 0
    assert alone["content"] == shared["content"]
