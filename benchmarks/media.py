"""Pictures beside streams: what a second turn on a picture costs, and what others' pictures cost those who stream.

    python -m benchmarks media

Paddock (worker, gateway and Redis) and llama-server serve the same text model and the same projector of random weights
on core 0, with one thread for tokens and one for pictures, and are asked by the same load on core 1. Only one of them
runs at a time; rounds alternate.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

from accounts.protocol.records import digest
from benchmarks.engine.bench import on_load_core, toy_model
from benchmarks.engine.calls import Answer
from benchmarks.engine.servers import COMPUTE_CORE, until_healthy
from benchmarks.reference import bench_dir, llama_server
from benchmarks.synthetic_model import N_EMBD
from benchmarks.table import Row
from tests.support.media_files import picture_file
from tests.support.projectors import Sizes, phi4, picture, write_projector
from tests.support.stack import Stack, free_port

SIDE, PATCH = 448, 16
CELLS = (SIDE // PATCH) ** 2
SIZES = Sizes(width=384, n_head=6, n_ff=1536, n_layer=12, patch=PATCH, n_embd=N_EMBD)
SLOTS, CTX = 10, 2048
STREAM_TOKENS, CALM_TOKENS, SKIPPED = 1900, 60, 10
"""Tokens of a stream, those before others ask, and the first ones, which are not looked at."""
STREAMS, RATE_S, EVERY_S = 8, 8.0, 1.0
TURN_BAR = 0.2
KEYS = {"streams": "pk-streams-0123456789", "shows": "pk-shows-0123456789"}
"""Teams: one streams, another shows pictures."""
NUMBERS = itertools.count(1)
"""Each picture and each text is another one."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    session: aiohttp.ClientSession

    async def ask(self, team: str, messages: list[Any], max_tokens: int, answer: Answer) -> str:
        """Return the answer's text, and note when each piece of it came."""
        body = {"model": "bench", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        text = ""
        async with self.session.post(
            f"{self.url}/v1/chat/completions",
            json={**body, "stream": True},
            headers={"Authorization": f"Bearer {KEYS[team]}"},
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices")
                    if choices and (piece := choices[0]["delta"].get("content")):
                        answer.note(time.perf_counter(), 1)
                        text += piece
        return text

    async def ttft_s(self, team: str, messages: list[Any]) -> tuple[float, str]:
        answer = Answer(sent=time.perf_counter())
        text = await self.ask(team, messages, 1, answer)
        return answer.ttft_s, text


def shown() -> dict[str, Any]:
    """Return a message with a new picture."""
    data = picture_file(Image.fromarray(picture(next(NUMBERS), SIDE, SIDE)), "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"role": "user", "content": [said("What is it?"), {"type": "image_url", "image_url": {"url": url}}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def story() -> dict[str, Any]:
    return {"role": "user", "content": f"Tell me story {next(NUMBERS)}."}


def told() -> dict[str, Any]:
    """Return a message with a new text of about as many tokens as a picture has cells."""
    chance = random.Random(next(NUMBERS))
    return {"role": "user", "content": " ".join(str(chance.randrange(10)) for _ in range(CELLS // 2))}


def projector() -> Path:
    """Return the projector in the benchmark folder, written on first use."""
    path = bench_dir() / f"mmproj-{SIZES.width}-{SIZES.n_layer}-{CELLS}.gguf"
    if not path.exists():
        partial_path = path.with_suffix(f".{os.getpid()}.partial")
        write_projector(partial_path, partial(phi4, sizes=SIZES, least=CELLS, most=CELLS))
        partial_path.rename(path)
    return path


@asynccontextmanager
async def paddock(stack: Stack) -> AsyncIterator[Server]:
    more: dict[str, Any] = {"projector": projector(), "slots": SLOTS, "ctx": CTX, "kv_tokens": SLOTS * CTX}
    worker = stack.worker(toy_model().path, "bench", worker_id=f"worker-{free_port()}", **more)
    records = [{"name": name, "team": name, "sha256": digest(key)} for name, key in KEYS.items()]
    gateway = stack.gateway(api_keys=json.dumps(records), log_level="warning")
    async with aiohttp.ClientSession() as session:
        yield Server(gateway.url, session)
    gateway.stop()
    worker.stop()


@asynccontextmanager
async def reference(stack: Stack) -> AsyncIterator[Server]:
    port = free_port()
    flags = ["-m", str(toy_model().path), "--mmproj", str(projector()), "-t", "1", "-tb", "1"]
    flags += ["-c", str(SLOTS * CTX), "-np", str(SLOTS), "--host", "127.0.0.1", "--port", str(port)]
    process = stack.spawn(f"llama-server-{port}", ["taskset", "-c", COMPUTE_CORE, str(llama_server()), *flags])
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        await until_healthy(session, f"{url}/health", process)
        yield Server(url, session)
    process.stop()


@dataclass(frozen=True, slots=True)
class Gaps:
    """The longest gap of a stream, in seconds: alone, and while another team's prompt was read."""

    calm: float
    beside: float
    ttft: float
    """Of the other team's prompt."""


async def gaps(server: Server, message: dict[str, Any]) -> Gaps:
    """Return what a stream felt of another team's message."""
    answer = Answer()
    stream = asyncio.create_task(server.ask("streams", [story()], STREAM_TOKENS, answer))
    await answer.said(CALM_TOKENS)
    calm = max(answer.gaps_s(answer.arrivals[SKIPPED], answer.arrivals[-1]))
    began = time.perf_counter()
    ttft, _ = await server.ttft_s("shows", [message])
    ended = time.perf_counter()
    await answer.said(len(answer.arrivals) + 2)
    stream.cancel()
    await asyncio.wait([stream])
    return Gaps(calm, max(answer.gaps_s(began, ended)), ttft)


async def turns(server: Server) -> tuple[float, float]:
    """Return the TTFT of a first turn with a picture, and that of the second."""
    message = shown()
    first, answer = await server.ttft_s("shows", [message])
    more = [message, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    second, _ = await server.ttft_s("shows", more)
    return first, second


async def rate(server: Server, *, with_pictures: bool) -> float:
    """Return the tokens per second of some streams, with or without a new picture of another team each second."""
    answers = [Answer() for _ in range(STREAMS)]
    tasks = [asyncio.create_task(server.ask("streams", [story()], STREAM_TOKENS, one)) for one in answers]
    for one in answers:
        await one.said(1)
    others: list[asyncio.Task[Any]] = []
    began, before = time.perf_counter(), sum(one.num_tokens for one in answers)
    while (since := time.perf_counter() - began) < RATE_S:
        if with_pictures and len(others) <= since / EVERY_S:
            others.append(asyncio.create_task(server.ttft_s("shows", [shown()])))
        await asyncio.sleep(0.02)
    found = (sum(one.num_tokens for one in answers) - before) / since
    for task in (*tasks, *others):
        task.cancel()
    await asyncio.wait([*tasks, *others])
    return found


def measure(rounds: int) -> list[Row]:
    cores = dict.fromkeys(("worker", "gateway", "redis"), COMPUTE_CORE)
    with Stack(measured=True, cores=cores) as stack, on_load_core():
        return asyncio.run(_measure(stack, rounds))


async def _measure(stack: Stack, rounds: int) -> list[Row]:
    pictures: dict[str, list[Gaps]] = {}
    texts: list[Gaps] = []
    seconds: list[tuple[float, float]] = []
    rates: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds):
        for name, serve in (("llama-server", reference), ("Paddock", paddock)):
            async with serve(stack) as server:
                await server.ttft_s("shows", [shown()])
                pictures.setdefault(name, []).append(await gaps(server, shown()))
                if name == "Paddock":
                    texts.append(await gaps(server, told()))
                    seconds.append(await turns(server))
                for with_pictures in (False, True):
                    found = await rate(server, with_pictures=with_pictures)
                    rates.setdefault((name, with_pictures), []).append(found)
    return [_turn_row(seconds), *_gap_rows(pictures, texts), *_rate_rows(rates)]


def _turn_row(seconds: list[tuple[float, float]]) -> Row:
    first, second = (statistics.median(one[number] for one in seconds) for number in (0, 1))
    ratio = second / first
    figure = f"{second * 1e3:.0f} against {first * 1e3:.0f} ms"
    return Row(
        f"second turn on a picture of {CELLS} cells: TTFT", figure, f"{ratio:.2f} x", "<= 0.2 x", ratio <= TURN_BAR
    )


def _gap_rows(pictures: dict[str, list[Gaps]], texts: list[Gaps]) -> list[Row]:
    def median(values: list[Gaps], name: str) -> float:
        middle: float = statistics.median(getattr(one, name) for one in values)
        return middle

    ours, theirs = pictures["Paddock"], pictures["llama-server"]
    calm, beside, by_text = median(ours, "calm"), median(ours, "beside"), median(texts, "beside")
    most = calm + by_text
    ratio = beside / median(theirs, "beside")
    return [
        Row(
            "longest gap of a stream while another team's picture is encoded and read",
            f"{beside * 1e3:.0f} ms; alone {calm * 1e3:.0f} ms, beside a text of as many tokens {by_text * 1e3:.0f} ms",
            f"{beside / most:.2f} x",
            "<= alone and one step with a text",
            beside <= most,
        ),
        Row(
            "the same, beside llama-server",
            f"{beside * 1e3:.0f} against {median(theirs, 'beside') * 1e3:.0f} ms",
            f"{ratio:.2f} x",
            "<= 1 x",
            ratio <= 1,
        ),
        Row(
            "TTFT of that picture, beside llama-server",
            f"{median(ours, 'ttft') * 1e3:.0f} against {median(theirs, 'ttft') * 1e3:.0f} ms",
            f"{median(ours, 'ttft') / median(theirs, 'ttft'):.2f} x",
            "",
            True,
        ),
    ]


def _rate_rows(rates: dict[tuple[str, bool], list[float]]) -> list[Row]:
    rows = []
    for name in ("Paddock", "llama-server"):
        plain, beside = (statistics.median(rates[name, with_pictures]) for with_pictures in (False, True))
        figure = f"{beside:.0f} against {plain:.0f} tokens/s without pictures"
        rows.append(
            Row(f"{STREAMS} streams, a picture each second, {name}", figure, f"{beside / plain:.2f} x", "", True)
        )
    return rows
