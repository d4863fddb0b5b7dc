"""A worker that dies of C++: its neighbour streams on, the log names the request, and nothing of memory is left behind.

The abort is a signal from the test in the middle of a step, as ggml's own `abort()` raises it; a model file that makes
ggml do so by itself is in tests/integration/pooled/test_worker.py.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.supervisor.conftest import Program, Programs, wait_until
from tests.support.caller import Caller, calling
from tests.support.small_models import N_CTX, write_small_model
from tests.support.stack import ROOT
from tests.support.waiting import until
from workers.process import black_box
from workers.process.limits import NO_CORE, OOM_ADDED
from workers.protocol.exits import Exit

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

SLOW_PROMPT = "the " * (N_CTX - 64)
LONG = 2500
"""Tokens of an answer that takes seconds."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("attention", "attention-learned"):
        write_small_model(folder, name)
    return folder


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    """Started with core files allowed, as on a developer's machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        held = Programs(Path(folder))
        yield held
        held.close()
    resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@dataclass(frozen=True)
class Machine:
    """A fleet of two models, one worker each: `mortal` in worker-0, `sound` in worker-1."""

    up: Program
    address: str
    key: str

    @property
    def log(self) -> str:
        return (self.up.state / "logs" / "worker-0.log").read_text()

    @property
    def box(self) -> Path:
        return self.up.state / "run" / "worker-0.calls"


def started(programs: Programs, models: Path, *flags: str) -> Machine:
    entry = "slots: 2, workers: 1, llama: {n_threads: 1, n_batch: 4096, n_ubatch: 4096}"
    catalog = programs.folder / "catalog.yaml"
    catalog.write_text(
        f"models:\n- {{name: mortal, path: '{models}/attention-learned.gguf', ctx: {N_CTX}, {entry}}}\n"
        f"- {{name: sound, path: '{models}/attention.gguf', ctx: {N_CTX}, {entry}}}\n"
    )
    up = programs.start("up", "--port", "0", "--catalog", str(catalog), *flags)
    up.until("Ctrl-C stops everything")
    line = next(line for line in up.text().splitlines() if line.startswith("  address"))
    return Machine(up, line.split()[-1].removesuffix("/v1"), (up.state / "first-key").read_text().strip())


@pytest.fixture(scope="module")
def machine(programs: Programs, models: Path) -> Machine:
    return started(programs, models)


async def ask_to_death(caller: Caller, request_id: str) -> None:
    body = {**caller.body(SLOW_PROMPT, max_tokens=4), "model": "mortal"}
    headers = {"X-Request-Id": request_id}
    async with caller.session.post(f"{caller.url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status >= 500


def core_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_CORE)[0]


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def core_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("core*") if path.is_file()}


async def test_an_abort_in_c_ends_one_worker_and_the_log_names_the_request(machine: Machine) -> None:
    up, cores = machine.up, core_files(ROOT)
    victim, neighbour = up.worker_pid("worker-0"), up.worker_pid("worker-1")
    assert core_limit(victim) == NO_CORE
    assert oom_score(victim) >= OOM_ADDED
    assert stat.S_IMODE(machine.box.stat().st_mode) == 0o600
    assert black_box.find(machine.box) == []

    async with (
        calling(machine.address, machine.key, "sound") as caller,
        caller.stream(max_tokens=LONG, ignore_eos=True) as stream,
    ):
        await stream.until_text()
        asked = asyncio.create_task(ask_to_death(caller, "the-fatal-one"))
        await until(lambda: black_box.find(machine.box) != [], 10, up.text())
        os.kill(victim, signal.SIGABRT)
        await until(lambda: "paddock: worker-0 died (SIGABRT)" in up.text(), 10, up.text())
        asked.cancel()
        await asyncio.wait({asked})
        num_before = len(stream.chunks)
        await stream.finish()
    assert len(stream.chunks) > num_before, "the other stream ended too early to show anything"
    assert stream.error is None
    assert stream.usage is not None
    assert stream.usage["completion_tokens"] == LONG
    assert up.worker_pid("worker-1") == neighbour

    said = up.text()
    assert "paddock: worker-0 died (SIGABRT) while running request the-fatal-one (for " in said
    assert "Fatal Python error: Aborted" in machine.log
    assert "the the" not in said + machine.log
    assert core_files(ROOT) == cores
    await until(lambda: up.worker_pid("worker-0") not in (0, victim), 20, up.text())


async def test_what_the_kernel_kills_is_told_as_well(machine: Machine) -> None:
    """As its out-of-memory killer does it: SIGKILL, in the middle of two calls."""
    up = machine.up
    async with (
        calling(machine.address, machine.key, "sound") as caller,
        caller.stream("one", max_tokens=LONG, ignore_eos=True) as one,
        caller.stream("two", max_tokens=LONG, ignore_eos=True) as two,
    ):
        await asyncio.gather(one.until_text(), two.until_text())
        os.kill(up.worker_pid("worker-1"), signal.SIGKILL)
        await asyncio.gather(one.finish(), two.finish())
    assert all(stream.error is not None for stream in (one, two))
    up.until("paddock: worker-1 died (SIGKILL) while running requests ")
    [line] = [line for line in up.text().splitlines() if "died (SIGKILL) while" in line]
    assert all(f"{stream.headers['X-Request-ID']} (for " in line for stream in (one, two))


def test_an_end_in_order_leaves_no_record(machine: Machine) -> None:
    wait_until(lambda: black_box.find(machine.box) == [], machine.up.text)
    os.kill(machine.up.worker_pid("worker-0"), signal.SIGKILL)
    machine.up.until("paddock: worker-0 died (SIGKILL) while running no request")
    assert machine.up.stop(signal.SIGINT) == 0
    assert list((machine.up.state / "run").glob("*.calls")) == []


async def test_a_step_that_takes_too_long_ends_the_worker(programs: Programs, models: Path) -> None:
    """A prompt of 4,000 tokens in one step, which takes longer than this bound allows."""
    machine = started(programs, models, "--step-timeout-s", "0.05", "--core-dumps", "true")
    assert core_limit(machine.up.worker_pid("worker-0")) != NO_CORE
    died = f"paddock: worker-0 died (exit code {int(Exit.HUNG)}) while running request the-slow-one (for "
    async with calling(machine.address, machine.key, "mortal") as caller:
        asked = asyncio.create_task(ask_to_death(caller, "the-slow-one"))
        await until(lambda: died in machine.up.text(), 20, machine.up.text())
        # It had not begun to answer, so the gateway would try it again.
        asked.cancel()
        await asyncio.wait({asked})
    said = "may take 0.05 (step_timeout_s); ending this process, which was running request the-slow-one"
    assert said in machine.log
    assert "in decode" in machine.log
