"""Downloads that admins order of several machines on one Redis: who downloads, what is told, who removes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.registry.libraries import ANSWER_S
from tests.integration.planner.test_machines import KEY, Fleet, fleet, host_of, kill_all, server
from tests.integration.supervisor.conftest import Program, wait_until
from tests.integration.supervisor.test_library_orders import REPOSITORIES, Admin, error_of
from tests.support.hub_server import Hub
from workers.protocol import keys
from workers.protocol.residency import LIBRARY_LIFE_S

__all__ = ["fleet", "server"]

LARGE, SMALL = "owner/model-GGUF:Q4_K_M", "owner/model-GGUF:Q8_0"
PAUSE = 15 << 20

pytestmark = pytest.mark.timeout(300)  # several machines start one after the other


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(REPOSITORIES) as served:
        yield served


def start(fleet: Fleet, hub: Hub, **environment: str) -> tuple[Admin, Program, Program]:
    """Start two machines and a gateway, and listen as its admin."""
    fleet.environment = {**hub.environment, **environment}
    first, second = fleet.add("a"), fleet.add("a")
    gateway, url = fleet.gateway()
    admin = Admin(gateway, KEY, url)
    wait_until(lambda: len(fleet.fields(keys.LIBRARY)) == 2, fleet.text)
    wait_until(lambda: admin.send("GET", "/models")[0] == 200, gateway.text)
    admin.listen()
    return admin, first, second


def files(machine: Program) -> set[str]:
    return {path.name for path in (machine.state / "hub").rglob("*.gguf")}


def wait_for(admin: Admin, machine: Program, model: str, event: str) -> dict[str, Any]:
    """Wait until a machine's event is told, and return the last one of its kind."""

    def told() -> list[dict[str, Any]]:
        return [each for each in admin.told(model, event) if each["machine"] == host_of(machine)]

    wait_until(lambda: bool(told()), lambda: f"{admin.events}\n{admin.up.text()}\n{machine.text()}")
    return told()[-1]


def downloading(admin: Admin) -> dict[str, list[str]]:
    """Return the models that `GET /models` says are being downloaded, with the machines that do it."""
    cards = admin.send("GET", "/models")[1]["data"]
    return {card["id"]: card["machines"] for card in cards if card["status"]["value"] == "downloading"}


def test_an_order_is_carried_out_by_the_machine_that_it_names(fleet: Fleet, hub: Hub) -> None:
    admin, first, second = start(fleet, hub)
    both = ", ".join(sorted([host_of(first), host_of(second)]))
    for method, path in (("POST", "/models"), ("DELETE", f"/models?model={LARGE}")):
        status, message = error_of(admin.send(method, path, {"model": LARGE} if method == "POST" else None))
        assert (status, both in message) == (400, True), message
    hub.pause_after = PAUSE
    assert admin.send("POST", "/models", {"model": LARGE, "machine": host_of(second)}) == (200, {"success": True})
    wait_for(admin, second, LARGE, "download_progress")
    assert downloading(admin) == {LARGE: [host_of(second)]}
    assert not [card for card in admin.send("GET", "/v1/models")[1]["data"] if card["id"] == LARGE]
    (card,) = [card for card in admin.send("GET", "/models")[1]["data"] if card["id"] == LARGE]
    ((url, progress),) = card["status"]["progress"].items()
    assert url.endswith("m-Q4_K_M.gguf")
    assert 0 < progress["done"] < progress["total"]

    # The other machine has nothing to stop or to remove, and downloads by itself.
    path = f"/models?model={LARGE}&machine={host_of(first)}"
    assert error_of(admin.send("DELETE", path)) == (404, f"{host_of(first)} has downloaded no '{LARGE}'.")
    assert admin.send("POST", "/models", {"model": SMALL, "machine": host_of(first)})[0] == 200
    wait_for(admin, first, SMALL, "download_finished")
    assert (files(first), files(second)) == ({"m-Q8_0.gguf"}, set())
    hub.pause_after = 0
    assert admin.send("DELETE", f"/models?model={LARGE}&machine={host_of(second)}") == (200, {"success": True})
    wait_for(admin, second, LARGE, "model_remove")
    assert downloading(admin) == {}


def test_all_machines_carry_out_an_order_for_all(fleet: Fleet, hub: Hub) -> None:
    admin, first, second = start(fleet, hub)
    hosts = sorted([host_of(first), host_of(second)])
    everywhere = {"success": True, "machines": hosts}
    hub.pause_after = PAUSE
    assert admin.send("POST", "/models", {"model": LARGE, "machine": host_of(first)})[0] == 200
    wait_for(admin, first, LARGE, "download_progress")
    status, message = error_of(admin.send("POST", "/models", {"model": LARGE, "machine": "*"}))
    assert status == 400
    assert "being downloaded already" in message
    assert f"It is done on {host_of(second)}" in message, "what has begun goes on"
    wait_until(lambda: downloading(admin) == {LARGE: hosts}, lambda: str(admin.events))
    assert admin.send("DELETE", f"/models?model={LARGE}&machine=*") == (200, everywhere)
    for machine in (first, second):
        wait_for(admin, machine, LARGE, "model_remove")
    hub.pause_after = 0
    assert admin.send("POST", "/models", {"model": LARGE, "machine": "*"}) == (200, everywhere)
    for machine in (first, second):
        wait_for(admin, machine, LARGE, "download_finished")
        assert files(machine) == {"m-Q4_K_M.gguf"}
    assert admin.send("DELETE", f"/models?model={LARGE}&machine={host_of(second)}") == (200, {"success": True})
    told = {"success": True, "machines": [host_of(first)]}
    assert admin.send("DELETE", f"/models?model={LARGE}&machine=*") == (200, told)
    assert (files(first), files(second)) == (set(), set())
    status, message = error_of(admin.send("DELETE", f"/models?model={LARGE}&machine=*"))
    assert (status, all(host in message for host in hosts)) == (404, True), message


def test_a_machine_that_dies_half_way_is_told_and_goes_on_when_it_is_back(fleet: Fleet, hub: Hub) -> None:
    admin, first, second = start(fleet, hub)
    hub.pause_after = PAUSE
    assert admin.send("POST", "/models", {"model": LARGE, "machine": host_of(second)})[0] == 200
    wait_for(admin, second, LARGE, "download_progress")
    kill_all(second)
    died_at = time.monotonic()
    # It is not known yet, so that somebody may order something of it.
    status, message = error_of(admin.send("POST", "/models", {"model": SMALL, "machine": host_of(second)}))
    assert (status, f"supervisor of {host_of(second)} did not answer" in message) == (503, True), message
    assert not fleet.fields(keys.LIBRARY_ORDERS), "it finds no old orders when it is back"
    told = wait_for(admin, second, LARGE, "download_failed")
    assert host_of(second) in told["data"]["reason"]
    assert time.monotonic() - died_at < LIBRARY_LIFE_S + ANSWER_S
    assert downloading(admin) == {}
    # Now there is but one, so that it need not be named.
    hub.pause_after = 0
    assert admin.send("POST", "/models", {"model": LARGE}) == (200, {"success": True})
    wait_for(admin, first, LARGE, "download_finished")
    status, message = error_of(admin.send("POST", "/models", {"model": LARGE, "machine": host_of(second)}))
    assert (status, "takes orders" in message) == (400, True), message

    second = fleet.restart(1)

    def is_taken() -> bool:
        return admin.send("POST", "/models", {"model": LARGE, "machine": host_of(second)})[0] == 200

    before = len(hub.ranges)
    wait_until(is_taken, second.text)
    wait_for(admin, second, LARGE, "download_finished")
    assert len(hub.ranges[before:]) == 1, "it went on where it had died"
    assert files(second) == files(first) == {"m-Q4_K_M.gguf"}


def test_machines_with_one_folder_download_once(fleet: Fleet, hub: Hub, tmp_path: Path) -> None:
    shared = tmp_path / "models"
    admin, first, second = start(fleet, hub, PADDOCK_MODELS_DIR=str(shared))
    assert admin.send("POST", "/models", {"model": LARGE, "machine": "*"})[0] == 200
    for machine in (first, second):
        wait_for(admin, machine, LARGE, "download_finished")
    sent = [request for request in hub.requests if request.startswith("GET") and request.endswith("m-Q4_K_M.gguf")]
    assert len(sent) == 1
    status, answer = admin.send("DELETE", f"/models?model={LARGE}&machine=*")
    assert (status, len(answer["machines"])) == (200, 1), "the other one has found nothing any more"
    assert not [*shared.rglob("*.gguf")]


def test_a_supervisor_that_ends_half_way_says_so_at_once(fleet: Fleet, hub: Hub) -> None:
    admin, _, second = start(fleet, hub)
    hub.pause_after = PAUSE
    assert admin.send("POST", "/models", {"model": LARGE, "machine": host_of(second)})[0] == 200
    wait_for(admin, second, LARGE, "download_progress")
    assert second.stop() == 0
    ended_at = time.monotonic()
    wait_for(admin, second, LARGE, "download_failed")
    assert time.monotonic() - ended_at < LIBRARY_LIFE_S / 2
    assert not second.survivors()
    assert [*(second.state / "hub").rglob("*.part")], "what has come is kept"
