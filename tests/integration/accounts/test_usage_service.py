"""Usage, prices, budgets and metrics through a real accounts service: its own process, reached as gateways reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accounts.database.database import open_database
from accounts.database.upgrade import upgrade
from accounts.protocol.caller import HEADER, Caller, seal_caller
from accounts.protocol.records import Role
from gateway.commands.config import accounts_groups, metrics_of
from tests.support.redis_server import RedisServer
from tests.support.stack import free_port
from tests.support.usage_rows import record, write
from workers.protocol.exits import Exit

ROOT = Path(__file__).resolve().parents[3]
SECRET = "a gateway secret of this test"
PATIENCE_S = 30.0


@dataclass
class Service:
    url: str

    def ask(
        self, path: str, *, role: Role = "admin", method: str = "GET", body: Any = None, **caller: str
    ) -> tuple[int, bytes, Any]:
        told: dict[str, Any] = {"key": "first", **caller}
        sealed = seal_caller(Caller(role=role, at=time.time(), **told), SECRET)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {HEADER: sealed}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def document(self, path: str, **of: Any) -> Any:
        status, body, _ = self.ask(path, **of)
        assert status in (200, 202), body
        return json.loads(body)


def environment(folder: Path, redis_url: str, **settings: str) -> dict[str, str]:
    named = {"STATE_DIR": str(folder), "REDIS_URL": redis_url, "GATEWAY_SECRET": SECRET, **settings}
    return {**os.environ, **{f"PADDOCK_{name}": value for name, value in named.items()}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, port = tmp_path_factory.mktemp("accounts"), free_port()
    database = open_database("", folder)
    upgrade(database)
    now = time.time()
    write(database, [record(1, ended_at=now - 60, cost_nano=1_500_000_000), record(2, ended_at=now, team="blue")])
    database.close()
    command = [sys.executable, "-m", "accounts.cli"]
    with RedisServer() as server:
        settings = environment(folder, server.url_of("gateway"), ACCOUNTS_LISTEN=f"127.0.0.1:{port}")
        process = subprocess.Popen(command, cwd=ROOT, env=settings)
        try:
            made = Service(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    if made.ask("/admin/prices")[0] == 200:
                        break
                except OSError:
                    assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield made
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE_S)


def test_usage_is_listed_summed_and_exported(service: Service) -> None:
    listed = service.document("/admin/usage?outcome=ok")
    assert [call["request_id"] for call in listed["data"]] == ["req-2", "req-1"]
    summed = service.document(f"/admin/usage/summary?from={time.time() - 7200}&group_by=team")
    assert {row["team"]: row["cost"] for row in summed["data"]} == {"blue": 0.001, "red": 1.5}
    status, body, headers = service.ask("/admin/usage/export?format=csv")
    assert (status, headers["content-type"]) == (200, "text/csv; charset=utf-8")
    assert [line.split(b",")[1] for line in body.splitlines()] == [b"request_id", b"req-1", b"req-2"]
    assert service.ask("/admin/usage/export?format=parquet")[1][:4] == b"PAR1"
    assert [log["request_id"] for log in service.document("/spend/logs")] == ["req-2", "req-1"]


def test_who_may_not_is_refused(service: Service) -> None:
    assert service.ask("/admin/usage?team=blue", role="manager", team="red")[0] == 403
    assert service.ask("/admin/usage", role="metrics")[0] == 403
    assert service.ask("/admin/prices", role="manager", method="POST", body={"model": "*"})[0] == 403
    assert service.ask("/admin/webhooks/test", role="user", method="POST", body={})[0] == 403
    forged = urllib.request.Request(service.url + "/admin/usage", headers={HEADER: "forged"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(forged, timeout=10)


def test_prices_and_budgets(service: Service) -> None:
    price = {"model": "llama", "per_million_prompt": 0.5}
    assert service.document("/admin/prices", method="POST", body=price)["published"]
    assert service.document("/admin/prices")["data"][0]["per_million_prompt"] == 0.5
    team = {"name": "red", "limits": {"budgets": [{"amount": 10, "period": "month"}]}}
    service.ask("/admin/teams", method="POST", body=team)
    (budget,) = service.document("/admin/budgets")["data"]
    assert (budget["name"], budget["spent"], budget["left"]) == ("red", 1.5, 8.5)
    assert service.ask("/admin/webhooks/test", method="POST", body={})[0] == 400, "there is no webhook"


def test_metrics_are_those_that_are_declared_and_ask_for_no_caller(service: Service) -> None:
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    shown = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    declared = metrics_of(accounts_groups())
    unlabelled = {metric.name for metric in declared if not metric.labels}
    assert unlabelled <= shown
    assert {metric.name for metric in declared} >= shown - {"python_info"}
    assert 'paddock_webhook_tries_total{outcome="given_up"} 0.0' in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"WEBHOOK_URL": "https://hooks.example.com/a-secret-path"}, "webhook_secret is empty"),
        ({"WEBHOOK_URL": "gopher://x/a-secret-path", "WEBHOOK_SECRET": "s"}, "webhook_url is no URL"),
        ({"USAGE_KEEP_DAYS": "0"}, "usage_keep_days"),
    ],
)
def test_a_webhook_that_can_t_be_used_ends_the_start(tmp_path: Path, settings: dict[str, str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "accounts.cli"],
        cwd=ROOT,
        env=environment(tmp_path, "redis://127.0.0.1:1", **settings),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == Exit.USAGE
    assert said in done.stderr
    assert "a-secret-path" not in done.stderr
