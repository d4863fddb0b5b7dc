"""`paddock supervisor` alone against a given Redis: models of a catalog, a dead worker told to the fleet at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import redis

from tests.integration.supervisor.conftest import Programs, wait_until
from tests.support.redis_server import RedisServer
from workers.commands.command import INTERRUPTED
from workers.protocol import keys
from workers.protocol.exits import Exit
from workers.protocol.heartbeat import BEAT, Heartbeat, decode_heartbeat


def beats(server: RedisServer, model: str) -> dict[str, Heartbeat]:
    """Worker id -> heartbeat of those that are registered now."""
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        found = {}
        for name in client.scan_iter(match=keys.model_prefix(model).replace("{", "\\{") + "worker:*"):
            if not name.endswith(b":heads") and isinstance(record := client.hget(name, BEAT), bytes):
                beat = decode_heartbeat(record)
                found[beat.worker] = beat
        return found


def test_a_catalog_of_two_models_and_a_worker_that_is_killed(
    programs: Programs, model: Path, server: RedisServer
) -> None:
    catalog = programs.folder / "catalog.yaml"
    entry = f"path: '{model}', slots: 1, ctx: 64, llama: {{n_threads: 1}}"
    catalog.write_text(f"models: [{{name: one, {entry}}}, {{name: two, {entry}}}]\n")
    station = programs.start(
        "supervisor",
        "--catalog",
        str(catalog),
        PADDOCK_REDIS_URL=server.url_of("supervisor"),
        PADDOCK_WORKER_REDIS_URL=server.url_of("worker"),
        PADDOCK_WORKER_SECRET="shared",
    )
    wait_until(lambda: bool(beats(server, "one") and beats(server, "two")), station.text)
    assert "PADDOCK_REDIS_URL" not in psutil.Process(station.worker_pid("worker-0")).environ(), (
        "who looks sees no secret"
    )
    with redis.Redis.from_url(server.url) as client:
        users = Counter(one["user"] for one in client.client_list())
    assert users["paddock-worker"] >= 2, "each worker has the login of workers"
    (one,) = beats(server, "one").values()

    with redis.Redis(unix_socket_path=str(server.socket)) as client, client.pubsub() as news:
        news.subscribe(keys.FLEET_CHANNEL)
        assert news.get_message(timeout=5.0) is not None
        killed_at = time.monotonic()
        os.kill(station.worker_pid("worker-0"), signal.SIGKILL)
        wait_until(lambda: not beats(server, "one"), lambda: "the record of the dead worker is still there")
        assert time.monotonic() - killed_at < keys.HEARTBEAT_TTL_S / 2
        assert news.get_message(timeout=5.0) is not None

    wait_until(lambda: bool(beats(server, "one")), station.text)
    (back,) = beats(server, "one").values()
    assert (back.worker, back.boot != one.boot) == (one.worker, True)
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))
    assert list((station.state / "run").iterdir()) == []


def test_workers_of_a_model_that_is_not_wanted_go_and_come_back(
    programs: Programs, model: Path, server: RedisServer
) -> None:
    catalog = programs.folder / "catalog.yaml"
    entry = f"path: '{model}', slots: 1, ctx: 64, llama: {{n_threads: 1}}"
    catalog.write_text(f"models: [{{name: one, {entry}}}, {{name: two, {entry}}}]\n")
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.set(keys.unloaded("two"), 1)  # of another life: a supervisor begins with all of its models
        station = programs.start(
            "supervisor", "--catalog", str(catalog), PADDOCK_REDIS_URL=server.url, PADDOCK_WORKER_SECRET="shared"
        )
        wait_until(lambda: bool(beats(server, "one") and beats(server, "two")), station.text)
        assert client.exists(keys.supervised("one"), keys.supervised("two")) == 2
        (before,) = beats(server, "one").values()
        client.set(keys.unloaded("one"), 1)
        wait_until(lambda: not beats(server, "one"), lambda: "the worker is still registered")
        wait_until(lambda: not station.worker_pid("worker-0"), lambda: "the worker still runs")
        assert beats(server, "two")
        assert "died" not in station.text()

        client.delete(keys.unloaded("one"))
        wait_until(lambda: bool(beats(server, "one")), station.text)
        (back,) = beats(server, "one").values()
        assert (back.worker, back.boot != before.boot) == (before.worker, True)
        client.set(keys.unloaded("two"), 1)
        wait_until(lambda: not beats(server, "two"), lambda: "the worker is still registered")
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))


def test_what_it_needs_is_said(programs: Programs, model: Path) -> None:
    station = programs.start("supervisor", "--model", str(model))
    assert station.wait() == Exit.USAGE
    assert station.text().startswith("paddock: redis_url is unset: a supervisor needs it; give --redis-url")


@pytest.mark.parametrize("command", ["supervisor", "up"])
def test_ctrl_c_during_a_download_is_quiet(programs: Programs, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        environment = {
            "PADDOCK_PORT": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "PADDOCK_REDIS_URL": "unix:///nowhere.sock",
            "PADDOCK_WORKER_SECRET": "s",
        }
        program = programs.start(command, "--hf", "owner/tale-GGUF", **environment)
        with silent.accept()[0]:
            program.family()
            os.killpg(program.popen.pid, signal.SIGINT)  # as a terminal does
            assert program.wait() == INTERRUPTED
    assert program.text() == "paddock: stopped\n"
    wait_until(lambda: not program.survivors(), lambda: str(program.survivors()))
    assert list((program.state / "run").iterdir()) == []


def test_a_model_that_no_worker_can_serve_ends_it(programs: Programs, model: Path, server: RedisServer) -> None:
    cut = programs.folder / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    station = programs.start(
        "supervisor", "--model", str(cut), "--workers", "1", PADDOCK_REDIS_URL=server.url, PADDOCK_WORKER_SECRET="s"
    )
    assert station.wait() == Exit.BAD_MODEL, station.text()
    assert "worker-0 can't serve cut (exit code 65): " in station.text()
