"""Several machines on one Redis: real supervisors, each with a state folder, and so a name, and a limit of models.

Gateways' demand is written to Redis by the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import redis

from tests.integration.supervisor.conftest import Program, Programs, wait_until
from tests.integration.supervisor.test_residents import Crowd
from tests.integration.supervisor.test_station import beats
from tests.support.redis_server import RedisServer
from tests.support.stack import DEMO_MODEL, free_port
from workers.planner.lease import LEASE_S
from workers.planner.messages import (
    MachineOrders,
    MachineReport,
    StartOrder,
    decode_catalog,
    decode_orders,
    decode_report,
    encode,
)
from workers.protocol import keys, residency
from workers.protocol.residency import LIFE_S, ModelDemand, ModelState, Why
from workers.residency.picture import CPU, Share
from workers.supervisor.plan import host_id

LAZY = {"min": 0, "min_resident_s": 0}
NAMES = ("a", "b", "c")
KEY = "test-key"

pytestmark = pytest.mark.timeout(300)  # several machines start one after the other, and leases have to end


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class Fleet:
    """Machines on one Redis."""

    def __init__(self, folder: Path, server: RedisServer, client: redis.Redis) -> None:
        self.folder, self.server, self.client = folder, server, client
        self.crowd = Crowd(client)
        self.machines: list[Programs] = []
        self.environment: dict[str, str] = {}
        """Of supervisors that are started from now on, beside what they need."""

    def add(self, *names: str, models_max: int = 0) -> Program:
        """Start a machine with these models, and with a supervisor's rights in Redis."""
        folder = self.folder / f"m{len(self.machines)}"
        folder.mkdir()
        catalog = folder / "catalog.json"
        common = {"path": str(DEMO_MODEL), "slots": 1, "ctx": 64, "llama": {"n_threads": 1}, "residency": LAZY}
        models = [{"name": name, **common} for name in names]
        catalog.write_text(json.dumps({"models": models, "models_max": models_max}))
        programs = Programs(folder)
        self.machines.append(programs)
        return self.restart(len(self.machines) - 1)

    def restart(self, number: int) -> Program:
        programs = self.machines[number]
        return programs.start(
            *("supervisor", "--catalog", str(programs.folder / "catalog.json")),
            PADDOCK_REDIS_URL=self.server.url_of("supervisor"),
            PADDOCK_WORKER_REDIS_URL=self.server.url_of("worker"),
            PADDOCK_WORKER_SECRET="shared",
            **self.environment,
        )

    def gateway(self) -> tuple[Program, str]:
        """Start a gateway for the models of the first machine, with an admin's key; return it and its address."""
        port = free_port()
        programs = self.machines[0]
        gateway = programs.start(
            *("gateway", "--catalog", str(programs.folder / "catalog.json"), "--port", str(port)),
            PADDOCK_REDIS_URL=self.server.url_of("gateway"),
            PADDOCK_WORKER_SECRET="shared",
            PADDOCK_API_KEY=KEY,
            PADDOCK_START_TIMEOUT_S="120",
            PADDOCK_ACCOUNTS="false",
        )
        wait_until(lambda: is_open(port), gateway.text)
        return gateway, f"http://127.0.0.1:{port}"

    def text(self) -> str:
        told = [machine.started[-1].text() for machine in self.machines if machine.started]
        return "\n----\n".join([*told, str(self.client.get(keys.PLANNER)), str(self.client.hgetall(keys.ORDERS))])

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait, while gateways tell their demand again and again."""

        def has_happened() -> bool:
            self.crowd.tell()
            return happened()

        wait_until(has_happened, self.text)

    def reports(self) -> dict[str, MachineReport]:
        return {name: decode_report(told) for name, told in self.fields(keys.MACHINES).items()}

    def planner(self) -> str:
        value = self.client.get(keys.PLANNER)
        return value.decode().partition(" ")[0] if isinstance(value, bytes) else ""

    def workers(self, *names: str) -> list[str]:
        """Return the workers of these models that are registered, as `model@machine`."""
        found = [(model, worker) for model in names or NAMES for worker in beats(self.server, model)]
        return sorted(f"{model}@{worker.rpartition('-')[0]}" for model, worker in found)

    def states(self, model: str) -> dict[str, ModelState]:
        told = self.fields(keys.RESIDENCY)
        return {name: residency.decode_models(value).models[model] for name, value in told.items()}

    def orders(self) -> dict[str, MachineOrders]:
        return {name: decode_orders(told) for name, told in self.fields(keys.ORDERS).items()}

    def fields(self, name: str) -> dict[str, bytes]:
        found: Any = self.client.hgetall(name)
        return {field.decode(): value for field, value in found.items()}


def host_of(program: Program) -> str:
    return host_id(program.state)


@pytest.fixture
def fleet(short_folder: Path, server: RedisServer) -> Iterator[Fleet]:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        made = Fleet(short_folder, server, client)
        yield made
        for programs in made.machines:
            for program in programs.started:
                if program.popen.poll() is None:
                    program.popen.send_signal(signal.SIGCONT)
            programs.close()


def kill_all(program: Program) -> None:
    """Kill a machine's supervisor and workers at the same moment, as if its power were cut."""
    for process in program.family().values():
        if process.is_running():
            process.kill()
    program.popen.wait()


def pair(fleet: Fleet, models_max: int = 1) -> tuple[Program, Program]:
    """Start two machines with the same models, each of which has room for `models_max`; the first one plans."""
    first = fleet.add(*NAMES, models_max=models_max)
    fleet.until(lambda: fleet.planner() == host_of(first))
    second = fleet.add(*NAMES, models_max=models_max)
    fleet.until(lambda: len(fleet.reports()) == 2 and len(fleet.states("a")) == 2)
    return first, second


def test_a_model_is_loaded_once_and_a_second_one_where_there_is_room(fleet: Fleet) -> None:
    first, second = pair(fleet)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: bool(fleet.workers("a")))
    fleet.crowd.use("a", num_running=1)
    fleet.crowd.models |= {"b": ModelDemand(num_waiting=1, oldest_at=time.time())}
    fleet.until(lambda: bool(fleet.workers("b")))
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        fleet.crowd.tell()
        assert len(fleet.workers("a")) == len(fleet.workers("b")) == 1, fleet.text()
        time.sleep(0.05)
    places = {worker[:1]: worker[2:] for worker in fleet.workers()}
    assert set(places.values()) == {host_of(first), host_of(second)}
    wait_until(lambda: fleet.states("a")[places["a"]].status == "loaded", lambda: str(fleet.states("a")))
    assert fleet.states("a")[places["b"]].status == "unloaded"
    # A third one finds no place while the others have calls, and each machine tells gateways so.
    fleet.crowd.models |= {
        "b": ModelDemand(num_running=1, used_at=time.time()),
        "c": ModelDemand(num_waiting=1, oldest_at=time.time()),
    }
    fleet.until(lambda: all(state.why for state in fleet.states("c").values()))
    assert not fleet.workers("c")
    for program in (second, first):
        assert program.stop() == 0, program.text()
    assert not fleet.client.hgetall(keys.MACHINES)
    assert not fleet.client.hgetall(keys.RESIDENCY)
    assert not fleet.client.get(keys.PLANNER)


def test_a_planner_that_is_killed_is_replaced_and_a_cold_call_is_served(fleet: Fleet) -> None:
    first, second = pair(fleet)
    before: Any = fleet.client.get(keys.PLANNER_FENCE)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: len(fleet.workers("a")) == 1)
    killed_at = time.monotonic()
    os.kill(first.popen.pid, signal.SIGKILL)
    fleet.until(lambda: fleet.planner() == host_of(second))
    assert time.monotonic() - killed_at < LEASE_S + 10.0
    after: Any = fleet.client.get(keys.PLANNER_FENCE)
    assert int(after) > int(before)
    fleet.crowd.wait_for("b")
    fleet.until(lambda: f"b@{host_of(second)}" in fleet.workers("b"))
    # The machine comes back: another one plans by now, and it takes what that orders.
    first = fleet.restart(0)
    fleet.until(lambda: host_of(first) in fleet.reports())
    assert fleet.planner() == host_of(second)
    fleet.crowd.use("b", num_running=1)
    fleet.crowd.models |= {"c": ModelDemand(num_waiting=1, oldest_at=time.time())}
    fleet.until(lambda: f"c@{host_of(first)}" in fleet.workers("c"))


def test_what_a_vanished_machine_had_is_loaded_elsewhere(fleet: Fleet) -> None:
    first, second = pair(fleet)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: len(fleet.workers("a")) == 1)
    holder = first if host_of(first) in fleet.workers("a")[0] else second
    other = second if holder is first else first
    kill_all(holder)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: f"a@{host_of(other)}" in fleet.workers("a"))
    assert fleet.planner() == host_of(other)


def test_an_old_planner_that_was_stopped_orders_nothing_when_it_wakes(fleet: Fleet) -> None:
    first, second = pair(fleet)
    fleet.until(lambda: bool(fleet.orders()))
    (old,) = {orders.fence for orders in fleet.orders().values()}
    first.send(signal.SIGSTOP)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: f"a@{host_of(second)}" in fleet.workers("a"))
    assert fleet.planner() == host_of(second)
    time.sleep(LIFE_S)
    before = fleet.orders()[host_of(second)]
    first.send(signal.SIGCONT)
    fleet.until(lambda: fleet.reports()[host_of(first)].fence > old)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        fleet.crowd.tell()
        assert fleet.workers("a") == [f"a@{host_of(second)}"], fleet.text()
        orders = fleet.orders()
        assert orders[host_of(first)].fence > old
        assert orders[host_of(second)] == before, "the old one writes none to the new one"
        time.sleep(0.05)
    assert "is loaded" not in first.text()


def test_a_machine_that_was_away_comes_back_and_surplus_workers_drain(fleet: Fleet) -> None:
    planner = fleet.add("b")
    fleet.until(lambda: fleet.planner() == host_of(planner))
    others = [fleet.add("a"), fleet.add("a")]
    fleet.until(lambda: len(fleet.reports()) == 3)
    fleet.crowd.wait_for("a")
    fleet.until(lambda: len(fleet.workers("a")) == 1)
    away = next(each for each in others if host_of(each) in fleet.workers("a")[0])
    away.send(signal.SIGSTOP)  # its worker goes on: it does not need its supervisor to serve
    fleet.until(lambda: len(fleet.workers("a")) == 2)
    away.send(signal.SIGCONT)
    fleet.crowd.use("a")
    fleet.until(lambda: len(fleet.workers("a")) == 1)
    assert psutil.Process(away.popen.pid).is_running()
    assert "died" not in fleet.text()


def test_a_redis_that_comes_back_empty_is_told_all_again(fleet: Fleet) -> None:
    first, second = pair(fleet)
    fleet.crowd.wait_for("a", "b")
    fleet.until(lambda: len(fleet.workers("a", "b")) == 2)
    before = fleet.workers()
    fleet.crowd.use("a", num_running=1)
    fleet.server.restart()
    fleet.until(lambda: len(fleet.reports()) == 2 and fleet.workers() == before)
    fleet.crowd.wait_for("c")
    fleet.until(lambda: bool(fleet.workers("c")))
    assert len(fleet.workers()) == 2
    assert first.text().count("a is loaded") + second.text().count("a is loaded") == 1


def test_calls_are_answered_though_machines_vanish(fleet: Fleet) -> None:
    """Calls for models that are not loaded, by a real gateway."""
    first, second = pair(fleet, models_max=2)
    gateway, url = fleet.gateway()

    def ask(model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx2.post(f"{url}/v1/chat/completions", headers=headers, json=body, timeout=150).status_code

    assert ask("a") == 200, gateway.text() + fleet.text()
    os.kill(first.popen.pid, signal.SIGKILL)
    assert ask("b") == 200, gateway.text() + fleet.text()
    assert fleet.planner() == host_of(second)
    assert ask("a") == 200, gateway.text() + fleet.text()
    first = fleet.restart(0)
    wait_until(lambda: host_of(first) in fleet.reports(), first.text)
    kill_all(second)
    assert ask("b") == 200, gateway.text() + fleet.text()
    assert fleet.planner() == host_of(first)


def test_a_machine_checks_orders_itself(fleet: Fleet) -> None:
    """The test plans in place of a supervisor."""
    fleet.client.set(keys.PLANNER, "test word")
    machine = fleet.add("a", "b")
    host = host_of(machine)
    wait_until(lambda: host in fleet.reports(), machine.text)
    boot = fleet.reports()[host].boot

    def order(number: int, size: int, *, fence: int = 7, model: str = "a", boot: str = boot) -> None:
        start = StartOrder(
            number=number,
            worker=f"{host}/{fence}.{number}",
            model=model,
            shares=(Share(CPU, size),),
            why=Why.of("of a test"),
        )
        orders = MachineOrders(at=time.time(), fence=fence, planner="test", boot=boot, starts=(start,))
        fleet.client.hset(keys.ORDERS, host, encode(orders))
        fleet.client.publish(keys.machine_channel(host), b"")

    def until_done(number: int, fence: int = 7) -> None:
        wait_until(lambda: (fleet.reports()[host].done, fleet.reports()[host].fence) == (number, fence), machine.text)

    wait_until(lambda: needs_of(fleet, host) == {"a", "b"}, machine.text)
    order(1, 1 << 50)
    until_done(1)
    wait_until(lambda: "a is not loaded: it takes 1,048,576.0 GiB of cpu" in machine.text(), machine.text)
    assert fleet.states("a")[host].status == "unloaded", "calls may still wait for it"
    order(1, 1 << 20)  # it has been dealt with
    order(2, 1 << 20, fence=6)  # of a planner that another one has taken the place of
    order(3, 1 << 20, boot="another")  # for a supervisor that is gone
    time.sleep(1.5)
    assert not fleet.workers()
    order(2, 1 << 20, model="b")
    until_done(2)
    order(1, 1 << 20, fence=8)
    until_done(1, fence=8)
    wait_until(lambda: fleet.workers() == [f"a@{host}", f"b@{host}"], machine.text)
    # Orders that end, and a planner that is gone, cost no worker.
    fleet.client.delete(keys.ORDERS)
    time.sleep(1.0)
    assert len(fleet.workers()) == 2
    fleet.client.delete(keys.PLANNER)
    wait_until(lambda: fleet.planner() == host, fleet.text)
    assert len(fleet.workers()) == 2


def needs_of(fleet: Fleet, host: str) -> set[str]:
    """Return the models whose need a machine has told."""
    told = fleet.fields(keys.MACHINE_MODELS).get(host)
    models = decode_catalog(told).models if told is not None else {}
    return {name for name, model in models.items() if model.need is not None}


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
