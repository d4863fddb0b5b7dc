"""A catalog that changes under a running supervisor: only the workers that it concerns start, drain or are replaced."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import httpx2

from tests.integration.supervisor.conftest import Catalog, Program, Programs, wait_until
from tests.integration.supervisor.test_station import beats
from tests.support.redis_server import RedisServer
from tests.support.stack import free_port


def boots(server: RedisServer, *models: str) -> dict[str, str]:
    """Worker id -> boot id."""
    return {worker: beat.boot for model in models for worker, beat in beats(server, model).items()}


def station_of(programs: Programs, server: RedisServer, catalog: Catalog) -> Program:
    return programs.start(
        "supervisor", "--catalog", str(catalog.file), PADDOCK_REDIS_URL=server.url, PADDOCK_WORKER_SECRET="shared"
    )


def test_only_what_has_changed_is_touched(programs: Programs, server: RedisServer, catalog: Catalog) -> None:
    one, two = catalog.entry("one"), catalog.entry("two", workers=2)
    catalog.write(one, two)
    station = station_of(programs, server, catalog)
    wait_until(lambda: len(boots(server, "one", "two")) == 3, station.text)
    first = boots(server, "one", "two")

    catalog.write(one, two, catalog.entry("three"))
    wait_until(lambda: bool(beats(server, "three")), station.text)
    assert boots(server, "one", "two") == first
    added = boots(server, "three")

    least = 2
    catalog.write(one, catalog.entry("two", workers=2, slots=2), catalog.entry("three"))
    deadline = time.monotonic() + 60
    while not all(beat.slots == 2 for beat in beats(server, "two").values()) or len(beats(server, "two")) < 2:
        least = min(least, len(beats(server, "two")))
        assert time.monotonic() < deadline, station.text()
        time.sleep(0.02)
    assert least == 1, "one after the other"
    assert boots(server, "two").keys() == {worker for worker in first if worker in boots(server, "two")}
    assert not set(boots(server, "two").values()) & set(first.values())

    catalog.write(one, catalog.entry("three"))
    wait_until(lambda: not beats(server, "two"), station.text)
    assert boots(server, "one", "three").items() <= {**first, **added}.items()
    assert "died" not in station.text()
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))
    assert list((station.state / "run").iterdir()) == []


def test_what_can_not_be_served_changes_nothing(programs: Programs, server: RedisServer, catalog: Catalog) -> None:
    one = catalog.entry("one")
    catalog.write(one)
    station = station_of(programs, server, catalog)
    wait_until(lambda: bool(beats(server, "one")), station.text)
    first = boots(server, "one")
    for number, (fault, told) in enumerate(
        (
            ([catalog.entry("two", slotz=1)], "did you mean `slots`?"),
            ([catalog.entry("two", path="/nowhere.gguf")], "no file /nowhere.gguf; check the path"),
            ([catalog.entry("one", workers=0)], "each model has `workers: 0`"),
        )
    ):
        catalog.write(*fault)
        station.until("catalog refused", number + 1)
        assert told in station.text()
        assert str(catalog.file) in station.text()
    catalog.file.write_text("models: 2026-13-45")  # a date that is none
    station.until("catalog refused", 4)
    catalog.file.unlink()
    station.until("catalog refused", 5)
    assert boots(server, "one") == first
    catalog.write(one, catalog.entry("two"))
    wait_until(lambda: bool(beats(server, "two")), station.text)
    assert boots(server, "one") == first


def test_settings_that_no_worker_can_run_with_cost_one_worker(
    programs: Programs, server: RedisServer, catalog: Catalog
) -> None:
    """And the next good ones bring it back."""
    catalog.write(catalog.entry("one", workers=2), catalog.entry("two"))
    station = station_of(programs, server, catalog)
    wait_until(lambda: len(boots(server, "one", "two")) == 3, station.text)
    first = boots(server, "one", "two")
    llama = {"n_threads": 1, "override_kv": {"no.such.key": 1}}
    catalog.write(catalog.entry("one", workers=2, llama=llama), catalog.entry("two"))
    station.until("other workers of one stay as they are")
    assert boots(server, "one", "two").items() < first.items()
    assert len(boots(server, "one", "two")) == 2
    catalog.write(catalog.entry("one", workers=2), catalog.entry("two"))
    wait_until(lambda: len(boots(server, "one", "two")) == 3, station.text)
    assert boots(server, "two").items() <= first.items()


def test_up_serves_a_model_that_its_catalog_gets(programs: Programs, catalog: Catalog) -> None:
    """Its gateway and its workers follow the same file; a call under way ends as it would have."""
    one = catalog.entry("one", ctx=2048)
    catalog.write(one, aliases={"house": "one"})
    port = free_port()
    up = programs.start("up", "--catalog", str(catalog.file), "--port", str(port), "--accounts", "false")
    up.until("Ctrl-C stops everything")
    key = (up.state / "first-key").read_text().strip()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    messages = [{"role": "user", "content": "Tell me a story."}]

    def ask(model: str, **more: Any) -> httpx2.Response:
        return httpx2.post(url, headers=headers, json={"model": model, "messages": messages, **more}, timeout=60)

    assert ask("two", max_tokens=2).status_code == 404
    pid = up.worker_pid("worker-0")
    long = {"model": "house", "messages": messages, "stream": True, "ignore_eos": True, "max_tokens": 600}
    with httpx2.stream("POST", url, headers=headers, json=long, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        pinned = {"targets": ["two"], "set": {"max_tokens": 2}, "defaults": {"temperature": 0.0}}
        catalog.write(one, catalog.entry("two"), aliases={"house": pinned})
        wait_until(lambda: ask("two", max_tokens=2).status_code == 200, up.text)
        told = ask("house", max_tokens=50)
        assert told.headers["x-paddock-model"] == "two"
        assert told.json()["usage"]["completion_tokens"] <= 2
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert up.worker_pid("worker-0") == pid
    os.kill(pid, 0)
    assert up.stop() == 0, up.text()


def test_no_call_fails_while_its_workers_are_replaced(programs: Programs, catalog: Catalog) -> None:
    catalog.write(catalog.entry("one", ctx=256, workers=2))
    port = free_port()
    up = programs.start("up", "--catalog", str(catalog.file), "--port", str(port), "--accounts", "false")
    up.until("Ctrl-C stops everything")
    key = (up.state / "first-key").read_text().strip()
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    body = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "ignore_eos": True}
    catalog.write(catalog.entry("one", ctx=256, workers=2, sampling={"temperature": 0.0}))
    answers = set[str]()
    first = {up.worker_pid("worker-0"), up.worker_pid("worker-1")}
    deadline = time.monotonic() + 60
    with httpx2.Client(timeout=60) as client:
        while first & {up.worker_pid("worker-0"), up.worker_pid("worker-1")}:
            answer = client.post(url, headers=headers, json=body)
            assert answer.status_code == 200, answer.text
            assert time.monotonic() < deadline, up.text()
        for _ in range(3):
            answers.add(client.post(url, headers=headers, json=body).json()["choices"][0]["message"]["content"])
    assert len(answers) == 1, "the new temperature holds"
    assert up.stop() == 0, up.text()
