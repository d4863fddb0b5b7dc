"""From outside callers reach all that is theirs, and nothing that is for probes and operators."""

from __future__ import annotations

import pytest

from gateway.api.routes import ROUTES
from tests.support.chart import Object, Rendered, container, render

HOST = "llm.example.com"
INSIDE = {"/metrics", "/metrics/targets", "/ready", "/health/drain", "/"}
ADMIN = ("/admin/", "/key/", "/team/", "/user/", "/spend/")


def ingress() -> Rendered:
    return render({"ingress": {"enabled": True, "hosts": [HOST], "className": "nginx"}})


def route() -> Rendered:
    return render({"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": [HOST]}})


def of_ingress() -> list[tuple[str, str]]:
    (rule,) = ingress().one("Ingress")["spec"]["rules"]
    return [(path["pathType"], path["path"]) for path in rule["http"]["paths"]]


def of_route() -> list[tuple[str, str]]:
    rules = route().one("HTTPRoute")["spec"]["rules"]
    return [
        (match["path"]["type"].removeprefix("Path"), match["path"]["value"])
        for rule in rules
        for match in rule["matches"]
    ]


def reached(paths: list[tuple[str, str]], asked: str) -> bool:
    """A prefix is one of whole parts: `/models` is not one of `/models-x`."""
    return any(asked == path or (kind == "Prefix" and asked.startswith(f"{path}/")) for kind, path in paths)


@pytest.mark.parametrize("paths", [of_ingress, of_route])
def test_callers_reach_what_is_theirs(paths: object) -> None:
    assert callable(paths)
    found = paths()
    for row in ROUTES:
        asked = row.path.replace("{model:path}", "org/m").replace("{response_id}", "r").replace("{id_slot}", "0")
        assert reached(found, asked) == (row.path not in INSIDE and not row.path.startswith(ADMIN)), row.path
    assert not reached(found, "/")


def test_admins_do_from_outside_only_where_the_values_say_so() -> None:
    values = {"ingress": {"enabled": True, "hosts": [HOST]}, "accounts": {"exposed": True}}
    (rule,) = render(values).one("Ingress")["spec"]["rules"]
    found = [(path["pathType"], path["path"]) for path in rule["http"]["paths"]]
    for row in ROUTES:
        assert reached(found, row.path) == (row.path not in INSIDE), row.path


def test_both_ways_are_the_same() -> None:
    assert sorted(of_ingress()) == sorted(of_route())


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_no_stream_is_cut_off_or_held_back_on_the_way() -> None:
    annotations: Object = ingress().one("Ingress")["metadata"]["annotations"]
    nginx = {name.partition("/")[2]: value for name, value in annotations.items()}
    assert nginx["proxy-buffering"] == "off"
    longest = 3600
    assert int(nginx["proxy-read-timeout"]) > longest
    assert int(nginx["proxy-send-timeout"]) > longest
    assert int(nginx["proxy-body-size"]) >= 8 << 20
    for rule in route().one("HTTPRoute")["spec"]["rules"]:
        assert seconds(rule["timeouts"]["request"]) > longest
        assert len(rule["matches"]) <= 8


def test_they_follow_the_gateways_bounds() -> None:
    settings = {"request_timeout_s": 7200, "max_body_bytes": 41943040}
    found = render({"gateway": {"settings": settings}, "ingress": {"enabled": True, "hosts": [HOST]}})
    annotations = found.one("Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "7230"
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == "41943040"
    media = render({"gateway": {"settings": {"max_media_body_mib": 48}}, "ingress": {"enabled": True, "hosts": [HOST]}})
    annotations = media.one("Ingress")["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-body-size"] == str(48 << 20)


def test_ones_own_annotations_win() -> None:
    own = {"nginx.ingress.kubernetes.io/proxy-read-timeout": "5", "a/b": "c"}
    values = {"ingress": {"enabled": True, "hosts": [HOST], "annotations": own}}
    assert own.items() <= render(values).one("Ingress")["metadata"]["annotations"].items()
    bare = render({"ingress": {"enabled": True, "hosts": [HOST], "streaming": False}})
    assert "annotations" not in bare.one("Ingress")["metadata"]


def test_they_lead_to_the_service() -> None:
    found = ingress()
    service = found.one("Service", "gateway")
    names = {port["name"] for port in service["spec"]["ports"]}
    for path in found.one("Ingress")["spec"]["rules"][0]["http"]["paths"]:
        assert path["backend"]["service"]["name"] == service["metadata"]["name"]
        assert path["backend"]["service"]["port"]["name"] in names
    for rule in route().one("HTTPRoute")["spec"]["rules"]:
        (backend,) = rule["backendRefs"]
        assert (backend["name"], backend["port"]) == (service["metadata"]["name"], service["spec"]["ports"][0]["port"])
    (gateway,) = [pod for told, pod in found.pods() if told["labels"]["app.kubernetes.io/component"] == "gateway"]
    assert service["spec"]["ports"][0]["targetPort"] == container(gateway)["ports"][0]["name"]
