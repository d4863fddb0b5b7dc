"""`paddock up` as a new user meets it: the demo model, and the printed snippets pasted as they are."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from gateway.commands.target import address_file
from tests.support.stack import ROOT, free_port
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat, decode_heartbeat
from workers.supervisor.redis_process import private_url

READY_S = 60.0
BACK_S = 5.0 + 10.0
"""Five seconds are promised; the rest is for tests that run beside it and start processes of their own."""
MODEL = "paddock-demo"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What it prints until it is ready; at the end it is asked to stop, and leaves nothing."""
    state = tmp_path_factory.mktemp("state")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    command = [sys.executable, "-m", "gateway.cli", "up", "--port", str(free_port()), "--state-dir", str(state)]
    log = state / "terminal"
    with log.open("wb") as terminal:
        up = subprocess.Popen(command, cwd=ROOT, env=clean, stdout=terminal, stderr=terminal, start_new_session=True)
    deadline = time.monotonic() + READY_S
    while "Ctrl-C" not in log.read_text() and up.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    family = psutil.Process(up.pid).children(recursive=True) if up.poll() is None else []
    yield log.read_text()
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0, log.read_text()
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert not list((state / "run").glob("*.sock"))
    assert not address_file(state).exists()


def test_two_workers_redis_and_a_gateway(printed: str) -> None:
    for part in ("redis ready", "worker-0 ready", "worker-1 ready", "gateway ready"):
        assert part in printed


def test_the_key_lies_in_a_file_of_its_owner(printed: str) -> None:
    found = re.search(r"API key +(\S+) \(kept in (.*)\)", printed)
    assert found is not None
    path = Path(found[2])
    assert path.read_text().strip() == found[1]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_curl_snippet_streams(printed: str) -> None:
    (line,) = re.findall(r"^curl .*$", printed, re.MULTILINE)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"content":') > 10
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_python_snippet_tells_a_story(printed: str) -> None:
    snippet = printed[printed.index("import json") : printed.index("Ctrl-C")]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "fox" in done.stdout


def test_paddock_chat_finds_address_and_key(printed: str) -> None:
    state = re.search(r"kept in (.*)/first-key\)", printed)
    assert state is not None
    command = [sys.executable, "-m", "gateway.cli", "chat", "--state-dir", state[1], "--temperature", "0"]
    done = subprocess.run(command, cwd=ROOT, input="Who are you?", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paddock" in done.stdout


def boots(state: Path) -> dict[str, str]:
    """Worker id -> boot id of the processes that serve now."""
    return {worker: beat.boot for worker, beat in beats(state).items()}


def beats(state: Path) -> dict[str, Heartbeat]:
    """Worker id -> heartbeat of the processes that serve now."""
    url = private_url(state, (state / "gateway-secret").read_text().strip())
    with redis.Redis.from_url(url) as client:
        workers = client.smembers(keys.workers(MODEL))
        assert isinstance(workers, set)
        records = [client.hget(keys.worker(MODEL, worker.decode()), "beat") for worker in workers]
    found = [decode_heartbeat(record) for record in records if isinstance(record, bytes)]
    return {beat.worker: beat for beat in found}


def test_a_killed_worker_is_back_within_seconds_and_nobody_is_turned_away(printed: str) -> None:
    key_file = re.search(r"kept in (.*)\)", printed)
    assert key_file is not None
    state = Path(key_file[1]).parent
    before = boots(state)
    assert len(before) == 2
    victim = sorted(before)[0]
    port = urlsplit(beats(state)[victim].address).port
    (process,) = [p for p in psutil.process_iter() if p.name().startswith("worker-") and _listens(p, port)]
    process.kill()
    killed = time.monotonic()
    (line,) = re.findall(r"^curl .*$", printed, re.MULTILINE)
    while boots(state).get(victim, before[victim]) == before[victim]:
        assert time.monotonic() - killed < BACK_S
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
        assert done.stdout.rstrip().endswith("data: [DONE]")
        assert '"error"' not in done.stdout


def _listens(process: psutil.Process, port: int | None) -> bool:
    return any(one.laddr and one.laddr.port == port for one in process.net_connections(kind="inet"))
