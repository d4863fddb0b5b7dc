"""Models that a real supervisor loads on demand: gateways' demand is written to Redis by the test."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import redis

from tests.integration.supervisor.conftest import Catalog, Program, Programs, unreadable, wait_until
from tests.integration.supervisor.test_catalog_changes import boots, station_of
from tests.integration.supervisor.test_station import beats
from tests.support.clocks import Clock, under
from tests.support.redis_server import RedisServer
from workers.protocol import keys, residency
from workers.protocol.residency import GatewayDemand, ModelDemand, ModelState

LAZY = {"min": 0, "min_resident_s": 0}


class Crowd:
    """A gateway's callers, as supervisors hear of them."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.models: dict[str, ModelDemand] = {}

    def tell(self) -> None:
        told = GatewayDemand(at=time.time(), models=self.models)
        self._client.hset(keys.DEMAND, "gateway", residency.encode(told))

    def wait_for(self, *models: str) -> None:
        self.models = {model: ModelDemand(num_waiting=1, oldest_at=time.time()) for model in models}
        self.tell()

    def use(self, model: str, num_running: int = 0) -> None:
        self.models = {model: ModelDemand(num_running=num_running, used_at=time.time())}
        self.tell()


def states(client: redis.Redis) -> dict[str, ModelState]:
    found: dict[str, ModelState] = {}
    for value in client.hgetall(keys.RESIDENCY).values():
        found |= residency.decode_models(value).models
    return found


def is_loaded(server: RedisServer, crowd: Crowd, *models: str) -> bool:
    """Return whether just these models have workers; tell the demand again, as a gateway does."""
    crowd.tell()
    return all(bool(beats(server, name)) == (name in models) for name in ("a", "b", "c"))


def kill_worker(station: Program, crowd: Crowd, name: str = "worker-0") -> None:
    """Kill a worker as soon as it runs."""
    pids: list[int] = []

    def is_there() -> bool:
        crowd.tell()
        pids.append(station.worker_pid(name))
        return pids[-1] != 0

    wait_until(is_there, station.text)
    os.kill(pids[-1], signal.SIGKILL)


def start(programs: Programs, server: RedisServer, catalog: Catalog, **more: object) -> Program:
    entries = [catalog.entry(name, residency=LAZY) for name in ("a", "b", "c")]
    catalog.write(*entries, **more)
    return station_of(programs, server, catalog)


def test_the_first_call_loads_and_the_least_used_leaves(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog, models_max=2), Crowd(client)
    wait_until(lambda: {state.status for state in states(client).values()} == {"unloaded"}, station.text)
    assert not boots(server, "a", "b", "c")
    for name, loaded in (("a", "a"), ("b", "ab"), ("c", "bc"), ("a", "ac")):
        crowd.wait_for(name)
        wait_until(lambda loaded=loaded: is_loaded(server, crowd, *loaded), station.text)  # type: ignore[misc]
        crowd.use(name)
        time.sleep(0.3)
    wait_until(lambda: states(client)["a"].status == "loaded", lambda: str(states(client)))
    assert states(client)["b"].status == "unloaded"
    assert "died" not in station.text()
    assert station.stop(signal.SIGTERM) == 0, station.text()
    wait_until(lambda: not station.survivors(), lambda: str(station.survivors()))
    assert list((station.state / "run").iterdir()) == []


def test_a_model_with_calls_does_not_leave_for_another(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """What gateways tell counts here, since a heartbeat may not have the call yet."""
    station, crowd = start(programs, server, catalog, models_max=1), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    crowd.models = {
        "a": ModelDemand(num_running=1, used_at=time.time()),
        "b": ModelDemand(num_waiting=1, oldest_at=time.time()),
    }
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert is_loaded(server, crowd, "a"), station.text()
        time.sleep(0.05)

    def waits() -> bool:
        crowd.tell()
        return bool(states(client)["b"].why)

    wait_until(waits, station.text)  # once its memory is predicted
    crowd.wait_for("b")
    wait_until(lambda: is_loaded(server, crowd, "b"), station.text)


def test_a_worker_is_reserved_for_whoever_waits_long_and_released_again(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """It is told by a signal, says so in its heartbeat, and goes on; it stops when its calls have ended."""
    station, crowd = start(programs, server, catalog, models_max=1), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    first = boots(server, "a")

    def is_told(reserved: bool) -> bool:
        crowd.tell()
        return all((beat.reserved, beat.draining) == (reserved, reserved) for beat in beats(server, "a").values())

    busy = {"a": ModelDemand(num_running=1, used_at=time.time())}
    crowd.models = {**busy, "b": ModelDemand(num_waiting=1, oldest_at=time.time() - 60)}
    wait_until(lambda: is_told(True), station.text)
    assert states(client)["a"].status == "loaded"
    crowd.models = busy
    wait_until(lambda: is_told(False), station.text)
    assert boots(server, "a") == first
    crowd.models = {**busy, "b": ModelDemand(num_waiting=1, oldest_at=time.time() - 60)}
    wait_until(lambda: is_told(True), station.text)
    crowd.models = {"b": ModelDemand(num_waiting=1, oldest_at=time.time() - 60)}
    wait_until(lambda: is_loaded(server, crowd, "b"), station.text)
    assert "died" not in station.text()


def test_what_fails_to_load_is_told_and_tried_again(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    bad = catalog.entry("b", residency=LAZY, llama={"n_threads": 1, "override_kv": {"no.such.key": 1}})
    catalog.write(catalog.entry("a", residency=LAZY), bad)
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    crowd.wait_for("a", "b")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    wait_until(lambda: states(client)["b"].status == "failed", lambda: str(states(client)))
    assert "no.such.key" in states(client)["b"].why.whole
    catalog.write(catalog.entry("a", residency=LAZY), catalog.entry("b", residency=LAZY))
    wait_until(lambda: is_loaded(server, crowd, "a", "b"), station.text)


def test_a_worker_serves_on_where_its_new_settings_can_not_be_loaded(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    catalog.write(catalog.entry("a", residency=LAZY))
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    first = boots(server, "a")
    crowd.use("a")
    catalog.write(catalog.entry("a", residency=LAZY, llama={"n_threads": 1, "override_kv": {"no.such.key": 1}}))
    wait_until(lambda: "no.such.key" in states(client)["a"].why.whole, lambda: str(states(client)))
    crowd.use("a")
    time.sleep(2.0)
    assert states(client)["a"].status == "loaded"
    assert boots(server, "a") == first
    catalog.write(catalog.entry("a", residency=LAZY, slots=2))
    wait_until(lambda: [beat.slots for beat in beats(server, "a").values()] == [2], station.text)
    wait_until(lambda: states(client)["a"].status == "loaded" and not states(client)["a"].why, station.text)


@pytest.mark.long
def test_a_worker_whose_process_can_not_be_started_is_a_failure(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """Its disk takes no files, say: callers were told that the model loads, until their patience was over."""
    station, crowd = start(programs, server, catalog), Crowd(client)
    wait_until(lambda: len(states(client)) == 3, station.text)
    with unreadable(station.state / "run"):
        crowd.wait_for("a")

        def has_failed() -> bool:
            crowd.tell()
            return states(client)["a"].status == "failed"

        wait_until(has_failed, lambda: str(states(client)) + station.text())
        assert "can't be started" in states(client)["a"].why.whole
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)


def test_a_worker_that_is_killed_while_it_serves_comes_back(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    first = boots(server, "a")
    crowd.use("a")
    wait_until(lambda: states(client)["a"].status == "loaded", station.text)
    kill_worker(station, crowd)
    wait_until(lambda: boots(server, "a").keys() == first.keys() and boots(server, "a") != first, station.text)


def test_a_file_that_is_cut_under_its_worker_costs_that_worker_only(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis, model: Path
) -> None:
    """Its worker is not started with a file that its memory was not predicted for; the model comes back with it."""
    file = programs.folder / "own.gguf"
    shutil.copyfile(model, file)
    catalog.write(catalog.entry("a", residency=LAZY, path=str(file)), catalog.entry("b", residency=LAZY))
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    crowd.wait_for("a", "b")
    wait_until(lambda: is_loaded(server, crowd, "a", "b"), station.text)
    wait_until(lambda: states(client)["a"].status == "loaded", station.text)
    others = boots(server, "b")
    os.truncate(file, 4096)
    kill_worker(station, crowd)
    wait_until(lambda: states(client)["a"].status == "failed", lambda: str(states(client)))
    assert "truncated" in states(client)["a"].why.whole
    assert str(programs.folder) not in states(client)["a"].why.whole
    shutil.copyfile(model, file)
    wait_until(lambda: is_loaded(server, crowd, "a", "b"), station.text)
    assert boots(server, "b") == others


def test_min_ttl_and_admins(programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis) -> None:
    catalog.write(
        catalog.entry("a", residency={"min": 1}),
        catalog.entry("b", residency={**LAZY, "ttl_s": 1.0}),
        catalog.entry("c", residency={**LAZY, "autoload": False}),
    )
    station, crowd = station_of(programs, server, catalog), Crowd(client)
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    told = states(client)
    assert [model for model, state in told.items() if state.is_closed] == ["c"], "nobody has called it"
    assert told["c"].why.whole == "c is not loaded by calls (autoload: false); POST /models/load does"
    crowd.wait_for("b", "c")
    wait_until(lambda: is_loaded(server, crowd, "a", "b"), station.text)
    wait_until(lambda: states(client)["c"].is_hopeless, lambda: str(states(client)))
    crowd.models = {}
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    client.hset(keys.ASKED, "c", str(time.time()))
    wait_until(lambda: is_loaded(server, crowd, "a", "c"), station.text)
    assert not states(client)["c"].is_closed
    wait_until(lambda: not client.hexists(keys.ASKED, "c"), lambda: "the wish is still there")
    client.set(keys.unloaded("a"), 1)
    wait_until(lambda: is_loaded(server, crowd, "c"), station.text)
    client.delete(keys.unloaded("a"))
    wait_until(lambda: is_loaded(server, crowd, "a", "c"), station.text)


def test_a_redis_that_goes_away_changes_nothing(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    station, crowd = start(programs, server, catalog), Crowd(client)
    crowd.wait_for("a")
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    first = boots(server, "a")
    server.restart()  # it comes up empty
    wait_until(lambda: is_loaded(server, crowd, "a"), station.text)
    assert boots(server, "a") == first
    crowd.wait_for("b")
    wait_until(lambda: is_loaded(server, crowd, "a", "b"), station.text)


def test_a_clock_that_is_set_back_by_a_day_stops_no_reports(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """Nothing was told for that day, so that gateways forgot the machine's models within seconds."""
    clock = Clock(programs.folder, "supervisor")
    with under(clock.of_python()):
        station = start(programs, server, catalog)
    wait_until(lambda: len(states(client)) == 3, station.text)
    clock.set(-86_400)
    client.delete(*map(keys.supervised, "abc"))
    wait_until(lambda: all(client.exists(keys.supervised(name)) for name in "abc"), station.text)

    def told_at() -> float:
        (told,) = client.hgetall(keys.RESIDENCY).values()
        return residency.decode_models(told).at

    wait_until(lambda: told_at() < time.time() - 80_000, station.text)
    last = told_at()
    wait_until(lambda: told_at() > last, station.text)
    assert station.stop(signal.SIGTERM) == 0, station.text()


def test_without_redis_it_waits_quietly_and_ends_when_asked(
    programs: Programs, server: RedisServer, catalog: Catalog, client: redis.Redis
) -> None:
    """It looked again at once, for ever, and grew; the signal to end was lost in the Redis client."""
    station = start(programs, server, catalog)
    wait_until(lambda: len(states(client)) == 3, station.text)
    server.kill()
    time.sleep(1.0)
    process = psutil.Process(station.popen.pid)
    before, memory = sum(process.cpu_times()[:2]), process.memory_info().rss
    time.sleep(3.0)
    assert sum(process.cpu_times()[:2]) - before < 1.0
    assert process.memory_info().rss - memory < 16 << 20
    assert station.stop(signal.SIGTERM) == 0, station.text()
