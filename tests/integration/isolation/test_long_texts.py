"""A caller's long run of like characters, which ends llama.cpp's tokenizer or takes long: the worker lives and others
stream on.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from accounts.protocol.records import digest
from tests.security.victim import feel
from tests.support.small_models import write_small_model
from tests.support.stack import Process, Stack
from workers.llama.tokens.vocab import VocabFile

ATTACKER, VICTIM = "pk-attacker-0123456789abcdef", "pk-victim-0123456789abcdef"
RUN = "=" * 100_000
SLOW = ("qwen2", "llama-bpe")
"""Pre-tokenizers to whom such a run is one word, which takes seconds to merge where it is long."""
SLOW_RUNS = ("\u4f60" * 60_000, "!" * 60_000)
LONGEST_GAP_S = 3.0
"""A step takes milliseconds; a worker that starts again takes longer than this, and its streams break."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The attacker."""

    session: aiohttp.ClientSession
    model: str

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        data = io.BytesIO(json.dumps({"model": self.model, **body}, ensure_ascii=False).encode())
        async with self.session.post(path, data=data, headers={"Content-Type": "application/json"}) as answer:
            return answer.status, await answer.json()


def records() -> str:
    """The keys of both teams, as the setting has them."""
    teams = (("a", ATTACKER), ("b", VICTIM))
    return json.dumps([{"name": team, "team": team, "sha256": digest(key)} for team, key in teams])


def tokens_of_a_run(model: Path, character: str, length: int) -> list[int]:
    """Of so many characters; a longer run's tokens are these again and again."""
    with VocabFile.load(model) as file:
        asked = {"add_special": False, "parse_special": True}
        one, two = (list(file.vocab.tokenize(character * n, **asked)) for n in (length, 2 * length))
    assert two == one * 2, "a run's tokens repeat, so the long one's are known"
    return one


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a pre-tokenizer that llama.cpp runs by std::regex."""
    return write_small_model(tmp_path_factory.mktemp("model"), "attention", pre="deepseek-v3")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple[Process, Process]]:
    """A worker and its gateway."""
    with Stack() as stack:
        worker = stack.worker(model, "regex", slots=4, ctx=16384)
        yield worker, stack.gateway(api_keys=records())


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, dict[str, Path]]]:
    """A gateway, and a worker for each of these pre-tokenizers."""
    files = {pre: write_small_model(tmp_path_factory.mktemp(pre), "attention", pre=pre) for pre in SLOW}
    with Stack() as stack:
        for pre, file in files.items():
            stack.worker(file, pre, slots=4, ctx=16384)
        stack.gateway(api_keys=records())
        yield stack, files


@asynccontextmanager
async def beside_a_stream(gateway: Process, worker: Process, model: str) -> AsyncIterator[Asker]:
    """The attacker's requests, and the other team's streams meanwhile: no error, no long gap, and the worker lives."""
    over = asyncio.Event()
    victim = asyncio.create_task(feel(gateway.url, VICTIM, model, over.is_set))
    try:
        async with aiohttp.ClientSession(gateway.url, headers={"Authorization": f"Bearer {ATTACKER}"}) as session:
            yield Asker(session, model)
    finally:
        over.set()
        felt = await victim
    assert worker.popen.poll() is None, worker.text()[-2000:]
    assert felt.num_streams
    assert not felt.errors
    assert felt.longest_gap_s < LONGEST_GAP_S


async def test_runs_of_like_characters_harm_nobody(served: tuple[Process, Process], model: Path) -> None:
    worker, gateway = served
    async with beside_a_stream(gateway, worker, "regex") as asker:
        status, told = await asker.ask("/tokenize", {"content": RUN})
        assert status == 200
        one = tokens_of_a_run(model, "=", 1000)
        assert told["tokens"] == one * 100
        message = {"role": "user", "content": RUN}
        status, told = await asker.ask("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        words = {"role": "user", "content": "ordinary words " * 60_000}
        status, told = await asker.ask("/v1/chat/completions", {"messages": [words], "max_tokens": 1})
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert "counting stopped at that number" in told["error"]["message"], "it was tokenised before it was refused"
        status, told = await asker.ask("/v1/messages/count_tokens", {"messages": [message]})
        assert status == 200
        assert told["input_tokens"] > len(one) * 100
        status, told = await asker.ask("/tokenize", {"content": "=" * 900_000})
        assert status == 400
        assert "fewer like characters" in told["error"]["message"]


@pytest.mark.parametrize("run", SLOW_RUNS, ids=lambda run: ascii(run[0]))
@pytest.mark.parametrize("pre", SLOW)
async def test_runs_that_take_long_harm_nobody(slow: tuple[Stack, dict[str, Path]], pre: str, run: str) -> None:
    stack, files = slow
    one = tokens_of_a_run(files[pre], run[0], len(run) // 100)
    async with beside_a_stream(stack.gateways[0], stack.workers[SLOW.index(pre)], pre) as asker:
        status, told = await asker.ask("/tokenize", {"content": run})
        assert (status, told.get("tokens")) == (200, one * 100)
        message = {"role": "user", "content": run}
        status, told = await asker.ask("/v1/messages/count_tokens", {"messages": [message]})
        assert status == 200, told
        assert told["input_tokens"] > len(one) * 100
        for times in (1, 10):
            message = {"role": "user", "content": run * times}
            status, told = await asker.ask("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
            assert (status, told["error"]["code"]) == (400, "context_length_exceeded"), told


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
