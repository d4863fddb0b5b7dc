"""Values that can't be meant are refused before anything reaches a cluster, in words that name the value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, Refused, container, render

MODEL = {"name": "m", "hf": "org/m"}


def of_model(**more: Any) -> dict[str, Any]:
    return {"models": [{**MODEL, **more}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown value": ({"gateways": {}}, "additional properties 'gateways' not allowed"),
    "unknown field": ({"gateway": {"replica": 3}}, "at '/gateway': additional properties 'replica' not allowed"),
    "unknown setting": (
        {"gateway": {"settings": {"drain": 3}}},
        "at '/gateway/settings': additional properties 'drain' not allowed",
    ),
    "a setting of the chart's": (
        {"gateway": {"settings": {"redis_url": "redis://x"}}},
        "at '/gateway/settings': additional properties 'redis_url'",
    ),
    "a socket that no Service leads to": (
        {"gateway": {"settings": {"uds": "/run/p.sock"}}},
        "gateway.settings.uds: the Service and the probes ask a port",
    ),
    "the port of callers as that of admins": (
        {"gateway": {"settings": {"admin_port": 8080}}},
        "gateway.settings.admin_port: 8080 is the port of all callers",
    ),
    "admins' routes outside, and at a port of their own": (
        {"gateway": {"settings": {"admin_port": 8083}}, "accounts": {"exposed": True}},
        "accounts.exposed: what is for admins is at gateway.settings.admin_port only",
    ),
    "a worker's setting out of bounds": (
        {"workers": {"settings": {"max_adapters": 0}}},
        "at '/workers/settings/max_adapters': minimum: got 0, want 1",
    ),
    "no model": ({"models": []}, "at '/models': minItems"),
    "models taken away": (
        {"models": None},
        "models: null leaves nothing to serve; name at least one model, such as `{name: gemma-3-1b, ",
    ),
    "off, and installed all the same": (
        {"enabled": False},
        "enabled: false leaves nothing out unless the umbrella chart's dependency has it as its condition",
    ),
    "an object that is none": ({"extraObjects": [3]}, "at '/extraObjects/0': got number, want "),
    "a model without a name": ({"models": [{"hf": "org/m"}]}, "at '/models/0': missing property 'name'"),
    "unknown field of a model": (of_model(slotz=3), "at '/models/0': additional properties 'slotz' not allowed"),
    "llama.cpp's settings": (of_model(llama={"n_batch": 3}), "at '/models/0/llama/n_batch': minimum: got 3, want 32"),
    "sampling": (
        of_model(sampling={"temperature": 101}),
        "at '/models/0/sampling/temperature': maximum: got 101, want 100",
    ),
    "not a repository": ({"models": [{"name": "m", "hf": "m"}]}, "at '/models/0/hf': 'm' does not match pattern"),
    "an unpinned image": ({"redis": {"image": "redis:latest"}}, "at '/redis/image': 'redis:latest' does not match"),
    "an untagged image": ({"redis": {"image": "redis"}}, "at '/redis/image': 'redis' does not match"),
    "a quantity": (
        {"modelCache": {"size": "100 GB"}},
        "at '/modelCache/size': '100 GB' does not match pattern",
    ),
    "a kind": (of_model(kind="DaemonSet"), "at '/models/0/kind': value must be one of"),
    "too many GPUs": (of_model(gpus=17), "at '/models/0/gpus': maximum: got 17, want 16"),
    "a password that breaks the URL": ({"secrets": {"redisPassword": "a@b"}}, "at '/secrets/redisPassword'"),
    "two sources": (of_model(path="m.gguf"), "models[0] (m): give exactly one source: hf (REPO[:QUANT][@REVISION])"),
    "no source": ({"models": [{"name": "m"}]}, "models[0] (m): give exactly one source"),
    "a file on an empty volume": (
        {"models": [{"name": "m", "path": "m.gguf"}]},
        "models[0] (m): path: an empty volume holds no file; set modelCache.type to claim or existing",
    ),
    "a draft model that nothing fetches": (
        {"models": [{"name": "m", "path": "/models/m.gguf", "speculation": {"draft": {"hf": "org/small"}}}]},
        "models[0] (m): speculation.draft.hf: it is fetched with a model of hf only; name its file by path",
    ),
    "no claim's name": (
        of_model(promptCache={"type": "existing"}),
        "models[0] (m): promptCache: name its claim in existingClaim",
    ),
    "one name twice": ({"models": [MODEL, MODEL]}, "models[1] (m): the name is used twice; rename one of the two"),
    "min above max": (of_model(autoscaling={"min": 5}), "models[0] (m): autoscaling: min is above max"),
    "to zero without KEDA": (
        of_model(autoscaling={"type": "hpa", "min": 0}),
        "models[0] (m): autoscaling: only keda scales to zero; set min to 1, or type to keda",
    ),
    "a name that no label can have": (
        {"models": [{"name": "org/m", "hf": "org/m", "autoscaling": {"type": "hpa"}}]},
        "models[0] (org/m): autoscaling: hpa selects the metric by the model's name",
    ),
    "KEDA without a Prometheus": (
        of_model(autoscaling={"type": "keda"}),
        "models[0] (m): autoscaling: keda.prometheusAddress is empty",
    ),
    "no way to roll": (
        of_model(rollout={"maxSurge": 0, "maxUnavailable": 0}),
        "models[0] (m): rollout: maxSurge and maxUnavailable can't both be 0",
    ),
    "no Redis": ({"redis": {"bundled": False}}, "redis: not bundled, and no other is named"),
    "a route on nothing": ({"httpRoute": {"enabled": True}}, "httpRoute: name the Gateway that it hangs on"),
    "an ingress without a host": ({"ingress": {"enabled": True}}, "ingress: name at least one host in hosts"),
    "patience beyond a call's life": (
        {"gateway": {"settings": {"request_timeout_s": 300}}},
        "gateway.settings: start_timeout_s is longer than request_timeout_s",
    ),
    "an alias that leads nowhere": (
        {"aliases": {"fast": "nobody"}},
        "aliases.fast: no model is named nobody; use one of: gemma-3-1b",
    ),
    "a target that is not there": (
        {"aliases": {"fast": {"targets": ["gemma-3-1b", {"model": "nobody"}]}}},
        "aliases.fast: no model is named nobody",
    ),
    "a default that is not there": (
        {"default": {"chat": "gemma-3-1b", "embed": "nobody"}},
        "default.embed: no model or alias is named nobody",
    ),
    "a stand-in that is not there": (
        {"aliases": {"fast": {"targets": ["gemma-3-1b"], "fallbacks": ["slow"]}}},
        "aliases.fast: fallbacks: no model or alias is named slow",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    values, said = REFUSED[name]
    with pytest.raises(Refused, match=re.escape(said)):
        render(values)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(Refused) as refused:
        render({"models": [{"name": "m"}, {"name": "m", "hf": "org/m"}], "redis": {"bundled": False}})
    told = str(refused.value)
    assert "models[0]" in told
    assert "models[1]" in told
    assert "redis: " in told


def paths(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


OWN = yaml.safe_load((CHART / "values.yaml").read_text())
TAKEN_AWAY = sorted(paths(OWN))


@pytest.mark.parametrize("path", TAKEN_AWAY, ids=".".join)
def test_a_value_that_is_taken_away_is_named(path: tuple[str, ...]) -> None:
    """`null` takes the chart's own value away: nothing is the matter, or the words are no trace of a template."""
    values: Any = None
    for name in reversed(path):
        values = {name: values}
    try:
        rendered = render(values)
    except Refused as refused:
        told = str(refused)
        *above, name = path
        place = "".join(f"/{one}" for one in above)
        assert f"at '{place}': missing property '{name}'" in told or f"\n{name}: " in told
        assert "nil pointer" not in told
    else:
        assert "<nil>" not in str(rendered.objects)


@pytest.mark.parametrize(
    "path", ["workers.promptCache.size", "redis.persistence.enabled", "gateway.settleS", "image.worker"]
)
def test_a_scalar_that_templates_need_is_named(path: str) -> None:
    above, _, name = path.rpartition(".")
    values: Any = None
    for step in reversed(path.split(".")):
        values = {step: values}
    with pytest.raises(Refused, match=re.escape(f"at '/{above.replace('.', '/')}': missing property '{name}'")):
        render(values)


def test_null_takes_a_limit_or_a_setting_away() -> None:
    values: dict[str, Any] = {"workers": {"resources": {"limits": {"memory": None}}}}
    found = render(values | {"gateway": {"settings": {"redis_wait_s": None}}})
    worker = container(found.one("Deployment", "worker")["spec"]["template"]["spec"])
    assert "memory" not in (worker["resources"].get("limits") or {})


@pytest.mark.parametrize("name", [name for name, value in OWN["workers"].items() if isinstance(value, dict)])
def test_null_in_a_models_entry_is_named(name: str) -> None:
    with pytest.raises(Refused, match=re.escape(f"at '/models/0/{name}': got null, want object")):
        render(of_model(**{name: None}))
