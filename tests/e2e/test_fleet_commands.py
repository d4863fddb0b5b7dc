"""`paddock status`, `ps`, `top`, `stop`, `restart`, `run` and `logs`: what a person sees of a fleet that runs."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.client import Client
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.program import Program
from tests.support.stack import DEMO_MODEL, Stack
from workers.protocol.exits import Exit
from workers.protocol.residency import ModelState, Why

CATALOG = """
models:
  - {name: small, path: small.gguf, workers: 1}
  - {name: large, path: large.gguf, residency: {}}
  - {name: sleepy, path: sleepy.gguf, residency: {ttl_s: 60, idle: sleep}}
aliases: {gpt-4: small}
"""
WHY = "no machine has the memory"
PATIENCE_S = 10.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        catalog = running.folder / "catalog.yaml"
        catalog.write_text(CATALOG)
        running.worker(DEMO_MODEL, "small", worker_id="small-w", slots=2)
        running.gateway(catalog=catalog)
        states = {
            "large": ModelState(status="unloaded", why=Why.of(WHY), is_hopeless=True),
            "sleepy": ModelState(status="sleeping", why=Why.of("its weights are in memory")),
        }
        with FakeSupervisor(running.redis.url, states):
            yield running


@pytest.fixture
def paddock(stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capfd, environment(stack))


def environment(stack: Stack) -> dict[str, str]:
    port = stack.gateways[0].url.rpartition(":")[2]
    return {"PADDOCK_STATE_DIR": str(stack.folder / "state"), "PADDOCK_PORT": port, "PADDOCK_API_KEY": stack.key}


@pytest.fixture
def caller(stack: Stack) -> Iterator[None]:
    """A call that runs while the test looks."""
    over = threading.Event()

    def call() -> None:
        with Client(stack.gateways[0].url, stack.key) as client:
            while not over.is_set():
                client.chat.completions.create(
                    [{"role": "user", "content": "Once"}], model="small", max_tokens=300, ignore_eos=True
                )

    thread = threading.Thread(target=call)
    thread.start()
    yield
    over.set()
    thread.join()


def until(paddock: Program, line: str, part: str) -> str:
    """What a command prints, once it has this."""
    ends = time.monotonic() + PATIENCE_S
    while part not in (out := paddock.ok(line).out):
        assert time.monotonic() < ends, out
        time.sleep(0.2)
    return out


def test_status_is_one_screen(paddock: Program) -> None:
    out = until(paddock, "status", "on demand")
    head, models, workers = out.strip().split("\n\n")
    assert "1 gateway, Redis answers, 0 of 2 slots in use" in head
    assert [line.split() for line in models.splitlines()] == [
        ["MODEL", "STATE", "WORKERS", "SLOTS", "WAITING", "ALSO"],
        ["large", "on", "demand"],
        ["sleepy", "sleeping"],
        ["small", "loaded", "1", "0", "of", "2", "gpt-4"],
    ]
    assert workers.splitlines()[1].split()[:5] == ["small-w", "small", "serving", "0", "of"]


def test_status_for_scripts_has_what_the_route_answers(paddock: Program) -> None:
    found = json.loads(paddock.ok("status --json").out)
    assert found["models"]["small"]["num_workers"] == 1
    assert found["workers"]["small-w"]["slots"] == 2


def test_ps_lists_what_takes_memory(paddock: Program) -> None:
    until(paddock, "ps", "sleeping")
    assert [row[0] for row in paddock.ok("ps").rows] == ["MODEL", "sleepy", "small"]


@pytest.mark.usefixtures("caller")
def test_top_shows_the_calls_that_run(stack: Stack) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "gateway.cli", "top", "--every", "0.3"],
            os.environ | environment(stack),
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    shown = read_until(terminal, b"req-")
    assert b"TEAM" in shown
    os.write(terminal, b"q")
    read_until(terminal, b"\x1b[?1049l")
    assert os.waitpid(pid, 0)[1] == 0


def read_until(terminal: int, part: bytes) -> bytes:
    """What comes on a terminal up to this."""
    shown, ends = b"", time.monotonic() + 20
    while part not in shown:
        assert time.monotonic() < ends, shown[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536)
    return shown


def test_top_needs_a_terminal(paddock: Program) -> None:
    assert "paddock status --json" in paddock.refused("top", Exit.USAGE)


def test_a_fleet_of_an_unknown_address(paddock: Program) -> None:
    assert "start a gateway with `paddock up`" in paddock.refused("status --url http://127.0.0.1:9", Exit.NO_GATEWAY)


def test_run_answers_a_prompt(paddock: Program) -> None:
    assert paddock.ok("run small 'Tell me.' --max-tokens 3").out.strip()
    assert "name a model" in paddock.refused("run", Exit.USAGE)
    assert "no model is called smal" in paddock.refused("run smal hi", Exit.CRASHED)


def test_stop_unloads(paddock: Program) -> None:
    assert "when its calls have ended" in paddock.ok("stop large").out


def test_restart_says_what_it_does(paddock: Program, stack: Stack) -> None:
    (stack.folder / "spare").mkdir()  # for its log
    worker = stack.fake_worker("spare", worker_id="spare/0")
    stack.wait_until_listed(stack.gateways[0], "spare")
    told = paddock.ok("restart spare/0 --dry-run").out
    assert "spare/0 has no calls, and ends at once." in told
    assert "No other worker of spare takes calls" in told
    assert worker.popen.poll() is None
    assert paddock.ok("restart spare/0").out == told
    assert worker.popen.wait(PATIENCE_S) == Exit.DRAINED
    assert "No worker 'nobody' is registered" in paddock.refused("restart nobody", Exit.REFUSED)


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(tmp_path))
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def written(file: Path, second: int, message: str, level: str = "INFO") -> None:
    line = {"time": f"2026-01-01 10:00:{second:02},000", "level": level, "logger": "x", "message": message}
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def test_logs_are_merged_by_time(logs: Path, paddock: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_STATE_DIR", str(logs.parent))
    written(logs / "gateway.log", 1, "first")
    written(logs / "worker-0.log", 2, "second \x1b[31m", "ERROR")
    with (logs / "worker-0.log").open("a") as opened:
        opened.write("a line of llama.cpp\n")
    written(logs / "gateway.log", 3, "third")
    assert paddock.ok("logs").out.splitlines() == [
        "2026-01-01 10:00:01 gateway | INFO first",
        "2026-01-01 10:00:02 worker-0 | ERROR second \N{REPLACEMENT CHARACTER}[31m",
        "2026-01-01 10:00:02 worker-0 | a line of llama.cpp",
        "2026-01-01 10:00:03 gateway | INFO third",
    ]
    assert paddock.ok("logs gateway -n 1").out == "2026-01-01 10:00:03 gateway | INFO third\n"
    assert len(paddock.ok("logs --level warning").out.splitlines()) == 1
    assert "did you mean gateway" in paddock.refused("logs gatway", Exit.USAGE)


def test_logs_follow_a_file_that_is_replaced(logs: Path, stack: Stack) -> None:
    written(logs / "gateway.log", 1, "first")
    environment = {"PADDOCK_STATE_DIR": str(logs.parent)}
    process = stack.spawn("logs", [sys.executable, "-m", "gateway.cli", "logs", "-f"], environment)
    wait_for(process.log, "first")
    written(logs / "gateway.log", 2, "second")
    wait_for(process.log, "second")
    (logs / "gateway.log").rename(logs / "gateway.log.1")
    written(logs / "gateway.log", 3, "third")
    wait_for(process.log, "third")
    assert process.text().count("first") == 1
    process.kill()


def wait_for(file: Path, part: str) -> None:
    found = threading.Event()
    ends = time.monotonic() + PATIENCE_S
    while part not in file.read_text():
        assert time.monotonic() < ends
        found.wait(0.05)
