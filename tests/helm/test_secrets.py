"""Keys that the chart makes are made once: an upgrade has those of before, or refuses to begin."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from accounts.protocol.sign_on import read_sign_on
from tests.support.chart import Object, Refused, Rendered, container, render
from workers.protocol.keys import Role, rules_of, user_of

BEFORE = {"api-key": "sk-old", "worker-secret": "between us", "redis-password": "of redis"}
"""What the Secret of a release held before gateways and workers had users of their own in Redis."""
OLD = {
    **BEFORE,
    "gateway-secret": "of gateways",
    "cache-secret": "of files",
    "redis-gateway-password": "of their user",
    "redis-worker-password": "of the workers' user",
    "postgres-password": "of the accounts service's user",
}


class Cluster(BaseHTTPRequestHandler):
    """As much of Kubernetes' API as a lookup of one Secret needs."""

    secret = "/api/v1/namespaces/llm/secrets/p-paddock"
    held: dict[str, str] | None = OLD

    def do_GET(self) -> None:
        path, status = self.path.partition("?")[0], 200
        body: Object
        if path == "/api/v1":
            known = {
                "name": "secrets",
                "singularName": "secret",
                "namespaced": True,
                "kind": "Secret",
                "verbs": ["get"],
            }
            body = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [known]}
        elif path == self.secret and self.held is not None:
            data = {key: base64.b64encode(value.encode()).decode() for key, value in self.held.items()}
            body = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "p-paddock"}, "data": data}
        else:
            status = 404
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        pass


class EarlierCluster(Cluster):
    held = BEFORE


class EmptyCluster(Cluster):
    held = None


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the API of a cluster; its handler is the parameter."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def told(found: Rendered) -> dict[str, str]:
    return dict(found.one("Secret")["stringData"])


def pods(found: Rendered) -> dict[str, Object]:
    """By component."""
    return {told["labels"]["app.kubernetes.io/component"]: pod for told, pod in found.pods()}


def flags(cluster: str, *more: str) -> tuple[str, ...]:
    return ("--dry-run=server", "--kube-apiserver", cluster, *more)


@pytest.mark.parametrize("cluster", [Cluster], indirect=True)
def test_an_upgrade_keeps_the_keys(cluster: str) -> None:
    assert told(render({}, flags=flags(cluster, "--is-upgrade"))) == OLD
    assert told(render({}, flags=flags(cluster))) == OLD, "an install over what an uninstalled release has left"


@pytest.mark.parametrize("cluster", [EarlierCluster], indirect=True)
def test_an_upgrade_makes_what_the_version_before_did_not_know(cluster: str) -> None:
    found = told(render({}, flags=flags(cluster, "--is-upgrade")))
    assert {name: found[name] for name in BEFORE} == BEFORE
    assert found.keys() == OLD.keys()
    assert all(len(found[name]) >= 40 for name in OLD.keys() - BEFORE.keys())


def test_a_worker_is_told_no_secret_of_gateways_and_no_other_login() -> None:
    found = render({"secrets": {"existingSecret": "keys"}})
    told = json.dumps({name: pod for name, pod in pods(found).items() if name == "worker"})
    for key in (
        "gateway-secret",
        "postgres-password",
        "redis-gateway-password",
        "redis-password",
        '"api-key"',
        "api-keys",
    ):
        assert key not in told, key
    assert "redis-worker-password" in told
    assert "redis://paddock-worker:$(REDIS_PASSWORD)@" in told


def test_only_the_accounts_service_is_told_the_databases_password() -> None:
    for name, pod in pods(render({})).items():
        assert ("postgres-password" in json.dumps(pod)) == (name in ("accounts", "postgres")), name
    external = {"postgres": {"bundled": False, "external": {"existingSecret": "db"}}}
    found = render(external)
    assert not found.of("StatefulSet", "postgres")
    for name, pod in pods(found).items():
        assert ("database-url" in json.dumps(pod)) == (name == "accounts"), name
    with pytest.raises(Refused, match=r"postgres\.external\.existingSecret"):
        render({"postgres": {"bundled": False}})


def test_gateways_and_the_accounts_service_are_told_the_identity_providers() -> None:
    oidc = {"providers": [{"issuer": "https://id.example.com", "client_id": "paddock", "client_secret": "hush"}]}
    found = render({"secrets": {"oidc": oidc}})
    for name, pod in pods(found).items():
        assert ("PADDOCK_OIDC" in json.dumps(pod)) == (name in ("accounts", "gateway")), name
        assert "hush" not in json.dumps(pod), name
    held = next(secret for secret in found.objects if secret["kind"] == "Secret" and "oidc" in secret["stringData"])
    assert read_sign_on(held["stringData"]["oidc"]).providers[0].client_secret == "hush"


def test_without_the_accounts_service_there_is_no_database() -> None:
    found = render({"accounts": {"enabled": False}})
    assert {"accounts", "postgres"}.isdisjoint(pods(found))
    assert "ACCOUNTS" not in json.dumps(pods(found))


def test_the_users_of_redis_are_those_of_the_programs() -> None:
    (command,) = [part for part in container(pods(render({}))["redis"])["command"] if "requirepass" in part]
    roles: tuple[Role, ...] = ("gateway", "worker")
    for role in roles:
        line = f"user {user_of(role)} on >$REDIS_{role.upper()}_PASSWORD {rules_of(role)}"
        assert line in [line.strip() for line in command.splitlines()]
    assert user_of("supervisor") not in command, "the chart has no supervisor"


def test_workers_may_have_a_url_of_their_own_for_an_external_redis() -> None:
    values = {"redis": {"bundled": False, "external": {"existingSecret": "r", "workersOwnUrl": True}}}
    told = {name: json.dumps(pod) for name, pod in pods(render(values)).items()}
    assert "redis-worker-url" in told["worker"]
    assert "redis-worker-url" not in told["gateway"]


@pytest.mark.parametrize("cluster", [Cluster], indirect=True)
def test_a_given_key_wins(cluster: str) -> None:
    values = {"secrets": {"apiKey": "sk-new"}}
    assert told(render(values, flags=flags(cluster, "--is-upgrade"))) == {**OLD, "api-key": "sk-new"}


@pytest.mark.parametrize("cluster", [EmptyCluster], indirect=True)
def test_an_install_makes_them(cluster: str) -> None:
    one, other = (told(render({}, release=name, flags=flags(cluster))) for name in ("p", "q"))
    assert set(one) == set(OLD)
    assert not set(one.values()) & set(other.values())
    assert all(len(value) >= 40 for value in one.values())


@pytest.mark.parametrize("cluster", [EmptyCluster], indirect=True)
def test_an_upgrade_without_them_is_refused(cluster: str) -> None:
    with pytest.raises(Refused, match="can't be read, so an upgrade would make new keys"):
        render({}, flags=flags(cluster, "--is-upgrade"))


def test_so_is_one_that_is_rendered_without_the_cluster() -> None:
    with pytest.raises(Refused, match="--dry-run=server"):
        render({}, flags=("--is-upgrade",))


def test_a_secret_of_ones_own_needs_no_cluster() -> None:
    values = {"secrets": {"existingSecret": "keys"}}
    before, after = render(values), render(values, flags=("--is-upgrade",))
    assert not before.of("Secret")
    assert before.objects == after.objects


def test_all_given_keys_render_the_same_every_time() -> None:
    """For those who render without a cluster and keep values in a vault."""
    given = {"apiKey": "a", "workerSecret": "w", "gatewaySecret": "g", "cacheSecret": "c", "redisPassword": "r"}
    values = {"secrets": {**given, "redisGatewayPassword": "rg", "redisWorkerPassword": "rw", "postgresPassword": "p"}}
    assert told(render(values)) == told(render(values, flags=("--is-upgrade",)))


def test_no_secret_stands_in_a_pod() -> None:
    values = {
        "secrets": {
            "apiKey": "sk-visible",
            "workerSecret": "w-visible",
            "gatewaySecret": "g-visible",
            "redisPassword": "r-visible",
            "redisGatewayPassword": "rg-visible",
            "redisWorkerPassword": "rw-visible",
            "postgresPassword": "p-visible",
            "hfToken": "h-visible",
            "cacheSecret": "c-visible",
            "metricsKey": "m-visible",
        }
    }
    found = render(values)
    assert "visible" not in json.dumps([item for item in found.objects if item["kind"] != "Secret"])
