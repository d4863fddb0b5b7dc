"""A caller's long run of like characters, which ends llama.cpp's tokenizer: the worker lives and others stream on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.access.records import digest
from tests.security.victim import feel
from tests.support.small_models import write_small_model
from tests.support.stack import Process, Stack
from workers.llama.vocab_file import VocabFile

ATTACKER, VICTIM = "pk-attacker-0123456789abcdef", "pk-victim-0123456789abcdef"
RUN = "=" * 100_000
LONGEST_GAP_S = 3.0
"""A step takes milliseconds; a worker that starts again takes longer than this, and its streams break."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a pre-tokenizer that llama.cpp runs by std::regex."""
    return write_small_model(tmp_path_factory.mktemp("model"), "attention", pre="deepseek-v3")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[Process, Process]]:
    """A worker and its gateway."""
    records = [{"name": team, "team": team, "sha256": digest(key)} for team, key in (("a", ATTACKER), ("b", VICTIM))]
    with Stack() as stack:
        worker = stack.worker(model, "regex", slots=4, ctx=16384)
        yield worker, stack.gateway(api_keys=json.dumps(records))


async def test_runs_of_like_characters_harm_nobody(served: tuple[Process, Process], model: Path) -> None:
    worker, gateway = served
    over = asyncio.Event()
    victim = asyncio.create_task(feel(gateway.url, VICTIM, "regex", over.is_set))
    async with aiohttp.ClientSession(gateway.url, headers={"Authorization": f"Bearer {ATTACKER}"}) as session:

        async def ask(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(path, json={"model": "regex", **body}) as answer:
                return answer.status, await answer.json()

        status, told = await ask("/tokenize", {"content": RUN})
        assert status == 200
        with VocabFile.load(model) as file:
            one, two = (file.vocab.tokenize("=" * n, add_special=False, parse_special=True) for n in (1000, 2000))
        assert two == one * 2, "a run's tokens repeat, so the long one's are known"
        assert told["tokens"] == one * 100
        message = {"role": "user", "content": RUN}
        status, told = await ask("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        words = {"role": "user", "content": "ordinary words " * 60_000}
        status, told = await ask("/v1/chat/completions", {"messages": [words], "max_tokens": 1})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert "counting stopped at that number" in told["error"]["message"], "it was tokenised before it was refused"
        status, told = await ask("/v1/messages/count_tokens", {"messages": [message]})
        assert status == 200
        assert told["input_tokens"] > len(one) * 100
        status, told = await ask("/tokenize", {"content": "=" * 900_000})
        assert status == 400
        assert "fewer like characters" in told["error"]["message"]
    over.set()
    felt = await victim
    assert worker.popen.poll() is None, worker.text()[-2000:]
    assert felt.num_streams
    assert not felt.errors
    assert felt.longest_gap_s < LONGEST_GAP_S


async def test_callers_who_leave_are_not_worked_for(served: tuple[Process, Process]) -> None:
    """Forty questions that take seconds each, whose caller leaves at once, don't keep its team's next one waiting."""
    _, gateway = served
    slow = {"model": "regex", "content": "word\u0301 " * 90_000}
    headers = {"Authorization": f"Bearer {ATTACKER}"}
    async with aiohttp.ClientSession(gateway.url, headers=headers) as session:

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await session.post("/tokenize", json=slow)

        alone_s = await _timed(session, slow)
        await asyncio.gather(*(leave() for _ in range(40)))
        waited_s = await _timed(session, {"model": "regex", "content": "quick " * 1000})
    assert waited_s < 2 + 3 * alone_s, f"one alone took {alone_s:.2f} s"


async def _timed(session: aiohttp.ClientSession, body: dict[str, Any]) -> float:
    began = asyncio.get_running_loop().time()
    async with session.post("/tokenize", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return asyncio.get_running_loop().time() - began
