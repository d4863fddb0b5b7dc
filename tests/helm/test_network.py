"""Who reaches whom: the policies let through what the parts need, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from tests.support.chart import Object, Rendered, example, render

NAMESPACE = "llm"
NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Party:
    """A pod somewhere, or an address outside."""

    labels: tuple[tuple[str, str], ...] = ()
    namespace: str = NAMESPACE
    address: str = ""


def party(found: Rendered, component: str, model: str = "") -> Party:
    labels = next(
        told["labels"]
        for told, _ in found.pods()
        if told["labels"]["app.kubernetes.io/component"] == component
        and model in ("", told["labels"].get("paddock/model"))
    )
    return Party(tuple(labels.items()))


OUTSIDE = Party(address="93.184.216.34", namespace="")
METADATA = Party(address="169.254.169.254", namespace="")
STRANGER = Party((("app", "x"),))
ELSEWHERE = Party((("app", "x"),), namespace="other")
PROMETHEUS = Party((("app.kubernetes.io/name", "prometheus"),), namespace="monitoring")
GRAFANA = Party((("app.kubernetes.io/name", "grafana"),), namespace="monitoring")
INGRESS = Party((("app", "nginx"),), namespace="ingress-nginx")


def chosen(selector: Object, labels: dict[str, str]) -> bool:
    assert not set(selector) - {"matchLabels"}
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def is_peer(peer: Object, who: Party) -> bool:
    if block := peer.get("ipBlock"):
        if not who.address:
            return False
        address = ip_address(who.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(part) for part in block.get("except", ())
        )
    if who.address:
        return False
    if "namespaceSelector" in peer:
        if not chosen(peer["namespaceSelector"], {NAME: who.namespace}):
            return False
    elif who.namespace != NAMESPACE:
        return False
    return chosen(peer.get("podSelector", {}), dict(who.labels))


def one_way(found: Rendered, kind: str, this: Party, other: Party, port: int, protocol: str) -> bool:
    """Whether `this` may take (Ingress) or make (Egress) the connection, as Kubernetes' documentation has it."""
    rules_of, peers_of = ("ingress", "from") if kind == "Ingress" else ("egress", "to")
    policies = [
        item["spec"]
        for item in found.of("NetworkPolicy")
        if this.namespace == NAMESPACE
        and not this.address
        and chosen(item["spec"]["podSelector"], dict(this.labels))
        and kind in item["spec"]["policyTypes"]
    ]
    if not policies:
        return True
    for rule in (rule for policy in policies for rule in policy.get(rules_of, ())):
        ports = rule.get("ports")
        if ports and not any(each["port"] == port and each["protocol"] == protocol for each in ports):
            continue
        if peers_of not in rule or any(is_peer(peer, other) for peer in rule[peers_of]):
            return True
    return False


def reaches(found: Rendered, source: Party, target: Party, port: int, protocol: str = "TCP") -> bool:
    return one_way(found, "Egress", source, target, port, protocol) and one_way(
        found, "Ingress", target, source, port, protocol
    )


def ports(found: Rendered) -> dict[str, int]:
    return {
        told["labels"]["app.kubernetes.io/component"]: pod["containers"][0]["ports"][0]["containerPort"]
        for told, pod in found.pods()
        if "ports" in pod["containers"][0]
    }


def test_what_the_parts_need_passes_and_nothing_else() -> None:
    found = render({})
    gateway, worker, redis, test = (party(found, name) for name in ("gateway", "worker", "redis", "test"))
    at = ports(found)
    wanted = {
        (gateway, worker, at["worker"]),
        (gateway, redis, at["redis"]),
        (worker, redis, at["redis"]),
        (test, gateway, at["gateway"]),
        (worker, OUTSIDE, 443),
        (PROMETHEUS, worker, at["worker"]),
        *((who, gateway, at["gateway"]) for who in (STRANGER, ELSEWHERE, PROMETHEUS, GRAFANA, INGRESS, OUTSIDE)),
    }
    parties = (gateway, worker, redis, test, OUTSIDE, METADATA, STRANGER, ELSEWHERE, PROMETHEUS, GRAFANA, INGRESS)
    own = {gateway, worker, redis, test}
    passing = {
        (source, target, port)
        for source in parties
        for target in parties
        for port in (*at.values(), 443, 80, 22)
        if source != target and own & {source, target} and reaches(found, source, target, port)
    }
    # An address of the cloud's own data is nobody's business.
    assert (METADATA, gateway, at["gateway"]) in passing
    assert passing - {(METADATA, gateway, at["gateway"])} == wanted


def test_everybody_but_redis_asks_for_names() -> None:
    found = render({})
    dns = Party((("k8s-app", "kube-dns"),), namespace="kube-system")
    for name in ("gateway", "worker", "test", "redis"):
        for protocol in ("UDP", "TCP"):
            assert reaches(found, party(found, name), dns, 53, protocol) == (name != "redis")


@pytest.mark.parametrize(
    ("address", "passes"),
    [
        ("93.184.216.34", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("100.127.255.254", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("2606:2800:220:1::1", True),
        ("fd00::1", False),
        ("fe80::1", False),
    ],
)
def test_the_hub_is_a_public_address(address: str, passes: bool) -> None:
    found = render({})
    assert reaches(found, party(found, "worker"), Party(address=address, namespace=""), 443) is passes


def test_named_callers_are_the_only_ones() -> None:
    found = example("multi-node")
    gateway = party(found, "gateway")
    assert reaches(found, INGRESS, gateway, 8080)
    assert reaches(found, PROMETHEUS, gateway, 8080)
    assert reaches(found, party(found, "test"), gateway, 8080)
    assert not any(reaches(found, who, gateway, 8080) for who in (STRANGER, ELSEWHERE, GRAFANA, OUTSIDE))


def test_the_port_for_admins_is_reached_by_the_namespace_or_by_those_who_are_named() -> None:
    settings = {"gateway": {"settings": {"admin_port": 8083}}}
    console: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": {NAME: "other"}},
        "podSelector": {"matchLabels": {"app": "x"}},
    }
    for admins, let_in in (([], {STRANGER}), ([console], {ELSEWHERE})):
        found = render({**settings, "networkPolicy": {"admins": admins}})
        gateway = party(found, "gateway")
        everybody = (STRANGER, ELSEWHERE, PROMETHEUS, INGRESS, OUTSIDE)
        assert {who for who in everybody if reaches(found, who, gateway, 8083)} == let_in
        assert all(reaches(found, who, gateway, 8080) for who in everybody)
        assert reaches(found, PROMETHEUS, party(found, "accounts"), 8082)
    found = render({})
    assert not reaches(found, STRANGER, party(found, "gateway"), 8083)


def test_of_a_namespace_that_watches_only_the_scraper_reaches_workers() -> None:
    """Prometheus' own label; whoever else runs beside it has no way to the workers' routes."""
    for found in (render({}), example("multi-node")):
        worker = party(found, "worker")
        assert reaches(found, PROMETHEUS, worker, 8081)
        assert not reaches(found, GRAFANA, worker, 8081)
        assert not reaches(found, Party(PROMETHEUS.labels, namespace="other"), worker, 8081)


def test_a_redis_outside_is_reached_at_its_ports() -> None:
    found = example("external-redis")
    sentinel = Party((("app", "sentinel"),), namespace="redis")
    for name in ("gateway", "worker"):
        assert reaches(found, party(found, name), sentinel, 26379)
        assert not reaches(found, party(found, name), sentinel, 16379)


def test_files_that_are_there_need_no_hub() -> None:
    found = example("external-redis")
    assert not reaches(found, party(found, "worker"), OUTSIDE, 443)


@pytest.mark.parametrize("rules", ["gatewayEgress", "workerEgress"])
def test_more_may_be_allowed(rules: str) -> None:
    collector = Party((("app", "otel"),), namespace="observability")
    rule: dict[str, Any] = {
        "to": [{"namespaceSelector": {"matchLabels": {NAME: "observability"}}}],
        "ports": [{"protocol": "TCP", "port": 4318}],
    }
    found = render({"networkPolicy": {rules: [rule]}})
    who = {name: reaches(found, party(found, name), collector, 4318) for name in ("gateway", "worker")}
    assert who == {"gateway": rules == "gatewayEgress", "worker": rules == "workerEgress"}


def test_the_judge_can_say_no() -> None:
    """Without policies everything passes, so that what is refused above is refused by them."""
    found = render({"networkPolicy": {"enabled": False}})
    assert reaches(found, STRANGER, party(found, "redis"), 6379)
