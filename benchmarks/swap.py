"""Seconds from a call for a model that is not loaded to its first token, against llama.cpp's own load of the same file.

    python -m benchmarks.swap [--rounds N] [FILE.gguf ...]

Two models of the same file share a machine that holds one (`models_max: 1`); a gateway, a supervisor and Redis run
beside. A *cold* call finds nothing loaded; a *swap* has another model leave first. *Bare* is a process with llama.cpp's
library in memory that loads the model, makes a context of as many cells and computes as many tokens as the call's
prompt has, measured within the process. Each round measures all three, one after the other; ratios are of the medians.
The page cache is warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from benchmarks.synthetic_model import synthetic_model
from benchmarks.table import Row, print_rows
from tests.support.stack import DEMO_MODEL, Process, Stack

BAR = 1.3
SLOTS, CTX = 4, 512
QUIET_S = 4.3
"""Seconds after a model's last call, within which it does not leave for one that left lately (docs/models.md)."""
NAMES = ("one", "other")
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BARE = """
import ctypes, sys, time
from llama_cpp import llama_cpp as c
quiet = c.llama_log_callback(lambda *_: None)
c.llama_log_set(quiet, None)
began = time.perf_counter()
c.llama_backend_init()
model = c.llama_model_load_from_file(sys.argv[1].encode(), c.llama_model_default_params())
params = c.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.kv_unified = int(sys.argv[2]), int(sys.argv[3]), True
params.n_threads = params.n_threads_batch = 1
context = c.llama_init_from_model(model, params)
num_tokens = int(sys.argv[4])
tokens = (c.llama_token * num_tokens)(*[1] * num_tokens)
assert c.llama_decode(context, c.llama_batch_get_one(tokens, num_tokens)) == 0
c.llama_get_logits(context)
print(time.perf_counter() - began)
"""


def bare_s(path: Path, num_tokens: int) -> float:
    """Return the seconds that llama.cpp takes to load the file, to make a context, and to compute a prompt."""
    command = [sys.executable, "-c", BARE, str(path), str(SLOTS * CTX), str(SLOTS), str(num_tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@contextmanager
def machine(path: Path) -> Iterator[tuple[Stack, Process]]:
    """Run a gateway and a supervisor whose machine holds one of two models of this file."""
    file = {"path": str(path.absolute()), "llama": {"n_threads": 1}}
    entry = {**file, "slots": SLOTS, "ctx": CTX, "kv_tokens": SLOTS * CTX}
    models = [{"name": name, **entry, "residency": {"min_resident_s": 0}} for name in NAMES]
    with Stack(measured=True) as stack:
        catalog = stack.folder / "catalog.json"
        catalog.write_text(json.dumps({"models": models, "models_max": 1}))
        command = [sys.executable, "-m", "gateway.cli", "supervisor", "--catalog", str(catalog)]
        stack.spawn("supervisor", command, {"PADDOCK_LOG_LEVEL": "warning"}, "supervisor")
        yield stack, stack.gateway(catalog=catalog, start_timeout_s=120)


class Caller:
    """Calls the models of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Process) -> None:
        self._session, self._url = session, gateway.url

    async def first_token_s(self, model: str) -> float:
        """Return the seconds until the first token of a streamed answer."""
        body = {**BODY, "model": model, "stream": True}
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if b'"finish_reason"' in line or b'"content"' in line:
                    return time.perf_counter() - began
        raise RuntimeError(f"{model}: no token")

    async def num_prompt_tokens(self, model: str) -> int:
        """Return the number of tokens of the prompt that `first_token_s` sends."""
        async with self._session.post(f"{self._url}/v1/chat/completions", json={**BODY, "model": model}) as response:
            response.raise_for_status()
            return int((await response.json())["usage"]["prompt_tokens"])

    async def unload(self, model: str) -> None:
        """Have the model leave, and wait until it has."""
        async with self._session.post(f"{self._url}/models/unload", json={"model": model}) as response:
            response.raise_for_status()
        while True:
            async with self._session.get(f"{self._url}/v1/models/{model}") as response:
                if (await response.json())["status"]["value"] == "unloaded":
                    break
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)


async def times_of(path: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind, one per round."""
    found: dict[str, list[float]] = {"bare": [], "cold": [], "swap": []}
    with machine(path) as (stack, gateway):
        headers = {"Authorization": f"Bearer {stack.key}"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(300)) as session:
            caller = Caller(session, gateway)
            for name in NAMES:  # predicts their memory, and warms the page cache
                await caller.first_token_s(name)
                await asyncio.sleep(QUIET_S)
            loaded, absent = NAMES[1], NAMES[0]
            num_tokens = await caller.num_prompt_tokens(loaded)
            await asyncio.sleep(QUIET_S)
            for _ in range(rounds):
                found["bare"].append(bare_s(path, num_tokens))
                found["swap"].append(await caller.first_token_s(absent))
                loaded, absent = absent, loaded
                await asyncio.sleep(QUIET_S)
                found["bare"].append(bare_s(path, num_tokens))
                await caller.unload(loaded)
                found["cold"].append(await caller.first_token_s(loaded))
                await asyncio.sleep(QUIET_S)
    return found


def rows_of(path: Path, times: dict[str, list[float]]) -> list[Row]:
    bare = statistics.median(times["bare"])
    rows = []
    for kind in ("cold", "swap"):
        took = statistics.median(times[kind])
        figure = f"{took * 1e3:,.0f} ms against {bare * 1e3:,.0f} ms bare, {(took - bare) * 1e3:+,.0f} ms"
        what = f"{path.stem} ({path.stat().st_size / 1e6:,.0f} MB), {kind}"
        bar = kind == "swap"
        rows.append(
            Row(what, figure, f"{took / bare:.2f} x", f"< {BAR} x" if bar else "", not bar or took < BAR * bare)
        )
    return rows


def measure(rounds: int, files: tuple[Path, ...] = ()) -> list[Row]:
    return [
        row
        for path in files or (DEMO_MODEL, synthetic_model())
        for row in rows_of(path, asyncio.run(times_of(path, rounds)))
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_rows("loading on demand", measure(arguments.rounds, tuple(arguments.files)))
