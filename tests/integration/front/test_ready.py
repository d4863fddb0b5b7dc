"""`/ready` waits for the first worker of each model that is meant to have one; two routes can be switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
import redis

from tests.support.stack import Process, Stack
from tests.support.waiting import wait_until
from workers.protocol import keys

CATALOG = """
models:
  - {name: here, path: here.gguf}
  - {name: late, path: late.gguf}
  - {name: asleep, path: asleep.gguf, workers: 0}
"""
SOON_S = 10.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Stack]:
    """One of two workers that are meant to be there."""
    with Stack() as running:
        (running.folder / "catalog.yaml").write_text(CATALOG)
        running.fake_worker("here", worker_id="here-w")
        yield running


@contextmanager
def gateway_of(stack: Stack, **settings: Any) -> Iterator[Process]:
    """A gateway that knows its fleet."""
    process = stack.gateway(wait=False, catalog=stack.folder / "catalog.yaml", **settings)
    try:
        wait_until(lambda: asked(stack, process, "/health").status_code == 200, SOON_S)
        wait_until(lambda: '"here"' in asked(stack, process, "/v1/models").text, SOON_S)
        yield process
    finally:
        stack.gateways.remove(process)
        process.stop()


def asked(stack: Stack, process: Process, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {stack.key}"}
    try:
        return httpx2.request("GET" if body is None else "POST", process.url + path, json=body, headers=headers)
    except httpx2.TransportError:
        return httpx2.Response(599)


def test_ready_means_that_every_model_that_is_meant_to_serve_answers(fleet: Stack) -> None:
    with gateway_of(fleet) as gateway:
        refused = asked(fleet, gateway, "/ready")
        assert refused.status_code == 503
        message = refused.json()["error"]["message"]
        assert "no worker of `late` was seen yet" in message
        assert "asleep" not in message
        worker = fleet.fake_worker("late", worker_id="late-w", wait=False)
        wait_until(lambda: asked(fleet, gateway, "/ready").status_code == 200, SOON_S)
        for model in ("here", "late"):
            assert asked(fleet, gateway, f"/props?model={model}").status_code == 200
            assert asked(fleet, gateway, "/tokenize", {"model": model, "content": "a b"}).status_code == 200
        assert asked(fleet, gateway, "/ready").json()["without_workers"] == ["asleep"]
        worker.kill()
        wait_until(
            lambda: asked(fleet, gateway, "/ready").json().get("without_workers") == ["asleep", "late"], 3 * SOON_S
        )
        assert asked(fleet, gateway, "/ready").status_code == 200, "calls are held until it is back"


def test_a_model_that_does_not_come_keeps_a_gateway_out_of_service_for_a_while_only(fleet: Stack) -> None:
    with gateway_of(fleet, ready_wait_s=1.5) as gateway:
        wait_until(lambda: asked(fleet, gateway, "/ready").status_code == 200, SOON_S)
        assert asked(fleet, gateway, "/ready").json()["without_workers"] == ["asleep", "late"]


def test_a_model_that_an_admin_has_unloaded_is_not_waited_for(fleet: Stack) -> None:
    with gateway_of(fleet) as gateway, redis.Redis(unix_socket_path=str(fleet.redis.socket)) as client:
        assert asked(fleet, gateway, "/ready").status_code == 503
        client.set(keys.unloaded("late"), 1)
        try:
            wait_until(lambda: asked(fleet, gateway, "/ready").status_code == 200, SOON_S)
        finally:
            client.delete(keys.unloaded("late"))
        wait_until(lambda: asked(fleet, gateway, "/ready").status_code == 503, SOON_S)


def test_slots_and_metrics_can_be_switched_off_as_llama_servers_can(fleet: Stack) -> None:
    with gateway_of(fleet, slots_endpoint=False, metrics_endpoint=False) as gateway:
        for path in ("/slots?model=here", "/metrics", "/metrics/targets"):
            answer = asked(fleet, gateway, path)
            assert answer.status_code == 501
            error = answer.json()["error"]
            assert error.keys() == {"code", "message", "type"}
            assert (error["code"], error["type"]) == (501, "not_supported_error")
        assert httpx2.get(f"{gateway.url}/slots").status_code == 401
        props = asked(fleet, gateway, "/props?model=here").json()
        assert (props["endpoint_slots"], props["endpoint_metrics"]) == (False, False)
    with gateway_of(fleet) as gateway:
        props = asked(fleet, gateway, "/props?model=here").json()
        assert (props["endpoint_slots"], props["endpoint_metrics"]) == (True, True)
        assert asked(fleet, gateway, "/metrics").status_code == 200
