"""What the pods of the chart are told is what the programs read, and what Kubernetes asks of them is there."""

from __future__ import annotations

import json
import re
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.routes import ROUTES
from gateway.settings import GatewaySettings, known_settings
from tests.support.chart import CHART, EXAMPLES, Object, Rendered, container, example, plain_env, render
from workers import sources
from workers.models.catalog import convert, load
from workers.models.files import plain_name
from workers.models.generation import DefaultSampling, SpeculationSettings
from workers.models.library import wanted
from workers.models.spec import AdapterSpec, LlamaSettings
from workers.protocol.control import DRAIN_PATH
from workers.protocol.framing import HEALTH_PATH
from workers.service.routes.probes import READY_PATH
from workers.settings import SupervisorSettings, WorkerSettings
from workers.worker import spec_of

KNOWN = {
    "redis-password": "secret",
    "redis-gateway-password": "secret",
    "redis-worker-password": "secret",
    "gateway-secret": "of gateways",
    "redis-url": "redis+sentinel://:secret@sentinel-0,sentinel-1/mymaster",
    "worker-secret": "between us",
    "api-key": "sk-first",
    "api-keys": "[]",
    "cache-secret": "sealed",
    "hf-token": "hf_x",
    "metrics-key": "mk-x",
    "metadata.name": "p-worker-x-abc",
    "status.podIP": "10.1.2.3",
}
WITHOUT_SPARE_GPUS = ("values-1-gpu", "values-8-gpu")
WITHOUT_SPARE_GPUS_S = 300.0
"""Longest drain of a worker there: its successor waits for the GPU, and calls wait for the successor."""
FILES = pytest.mark.parametrize("file", [None, *EXAMPLES], ids=lambda file: file.stem[7:] if file else "as-it-is")


def rendered(file: Path | None) -> Rendered:
    return render({}, *([file] if file else []))


def pods_of(found: Rendered, component: str) -> list[Object]:
    label = "app.kubernetes.io/component"
    return [pod for told, pod in found.pods() if told["labels"][label] == component]


def settings_of(
    kind: type[sources.S], of: Object, monkeypatch: pytest.MonkeyPatch, program: str
) -> sources.Reading[sources.S]:
    assert of["command"] == ["paddock", *program.split()]
    for name, value in plain_env(of, KNOWN).items():
        monkeypatch.setenv(name, value)
    return sources.read(kind, [], known=known_settings())


@FILES
def test_a_gateway_reads_what_it_is_told(file: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered(file)
    (pod,) = pods_of(found, "gateway")
    reading = settings_of(GatewaySettings, container(pod), monkeypatch, "gateway")
    assert reading.warnings == ()
    settings = reading.settings
    assert (settings.host, settings.port) == ("0.0.0.0", container(pod)["ports"][0]["containerPort"])
    assert (settings.worker_secret, settings.api_key) == ("between us", "sk-first")
    assert "secret@" in settings.redis_url
    assert settings.catalog == Path("/etc/paddock/catalog.json")
    assert settings.drain_s >= settings.request_timeout_s >= settings.start_timeout_s > settings.queue_timeout_s


@FILES
def test_a_worker_reads_what_it_is_told(file: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rendered(file)
    (gateway,) = pods_of(found, "gateway")
    gateways_redis = plain_env(container(gateway), KNOWN)["PADDOCK_REDIS_URL"]
    models = (
        {
            model["name"]: model
            for model in json.loads(found.one("ConfigMap", "gateway")["data"]["catalog.json"])["models"]
        }
        if len(found.of("ConfigMap", "gateway")) == 1
        else {}
    )
    assert models
    for pod in pods_of(found, "worker"):
        with monkeypatch.context() as patch:
            reading = settings_of(WorkerSettings, container(pod), patch, "worker")
        assert reading.warnings == ()
        settings = reading.settings
        assert settings.worker_address == "http://10.1.2.3:8081"
        assert (settings.worker_host, settings.worker_port) == ("0.0.0.0", container(pod)["ports"][0]["containerPort"])
        assert settings.worker_id == "p-worker-x-abc"
        assert settings.redis_url == gateways_redis.replace("//paddock-gateway:", "//paddock-worker:")
        told = models[settings.alias]
        spec = spec_of(settings)
        assert (spec.slots, spec.ctx) == (told.get("slots", 8), told.get("ctx", 0))
        llama = spec.llama
        assert llama.n_threads > 0, "it would count the cores of its node"
        assert {name: getattr(llama, name) for name in told.get("llama", {})} == told.get("llama", {})


@FILES
def test_what_is_fetched_lies_where_the_worker_looks(file: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in pods_of(rendered(file), "worker"):
        told = plain_env(container(pod), KNOWN)
        for first in pod.get("initContainers", ()):
            with monkeypatch.context() as patch:
                reading = settings_of(SupervisorSettings, first, patch, "models pull")
            assert reading.warnings == ()
            (model,) = wanted(reading.settings).models
            assert model.hf
            assert model.name == told["PADDOCK_ALIAS"]
            assert told["PADDOCK_MODEL"] == f"{reading.settings.models_dir}/{plain_name(model.name)}.gguf"
            mounts = {mount["mountPath"]: mount["name"] for mount in first["volumeMounts"]}
            assert mounts["/models"] == {m["mountPath"]: m["name"] for m in container(pod)["volumeMounts"]}["/models"]


@FILES
def test_the_catalog_is_one(file: Path | None, tmp_path: Path) -> None:
    found = rendered(file)
    told = found.one("ConfigMap", "gateway")["data"]["catalog.json"]
    catalog = tmp_path / "catalog.json"
    catalog.write_text(told)
    names = [model.name for model in load(catalog).models]
    served = [plain_env(container(pod), KNOWN)["PADDOCK_ALIAS"] for pod in pods_of(found, "worker")]
    assert names == served
    assert len(names) == len(found.of("Deployment", "worker")) + len(found.of("StatefulSet", "worker"))


def test_every_field_of_a_catalog_arrives() -> None:
    model: dict[str, Any] = {
        "name": "org/Model:Q4",
        "hf": "org/model-GGUF:Q4_K_M",
        "slots": 3,
        "ctx": 4096,
        "kv_tokens": 9000,
        "gpus": 2,
        "llama": {
            "n_batch": 1024,
            "tensor_split": [3, 1],
            "n_threads": 3,
            "flash_attn": "on",
            "override_kv": {"llama.context_length": 8192, "llama.rope.freq_base": 500000.5, "a.b": True, "a.c": "x"},
            "override_tensor": [{"pattern": "ffn_.*_exps", "buffer": "CPU"}],
            "devices": ["CUDA0", 1],
            "cpus": "0-3,8",
            "control_vectors": [{"path": "/models/calm.gguf", "scale": 0.5}],
            "control_vector_layers": [4, 20],
        },
        "sampling": {"temperature": 0.6, "dry_sequence_breakers": ["\n", '"', "<x>"]},
        "adapters": [
            {"name": "pirate", "path": "/models/pirate.gguf", "pinned": True},
            {"name": "poet", "hf": "org/poet-GGUF"},
        ],
        "speculation": {"draft": {"hf": "org/small-GGUF:Q8_0", "n_max": 8}, "rollback": 4},
        "projector": "/models/eyes.gguf",
        "projector_on_gpu": False,
        "image_min_tokens": 64,
        "image_max_tokens": 512,
        "tool_family": "hermes",
        "chat_template": "{% for m in messages %}\n{{ m.content }} <b>$(POD_IP) $$x$$ $y\n{% endfor %}",
        "thinking": "off",
        "chat_template_kwargs": {"colour": "$(POD_IP) red"},
        "shared_prompts": ['You are the help desk of "Example".\nBe <brief> & kind.\n'],
    }
    given = {
        "models": [model],
        "aliases": {"fast": {"targets": [{"model": "org/Model:Q4", "weight": 2}]}},
        "default": {"chat": "fast", "infill": "org/Model:Q4"},
    }
    found = render({**given, "unknownModel": "default"})
    catalog = convert(json.loads(found.one("ConfigMap", "gateway")["data"]["catalog.json"]), "rendered")
    assert catalog == convert({**given, "unknown_model": "default"}, "given")
    (pod,) = pods_of(found, "worker")
    told = plain_env(container(pod), KNOWN)
    spec = catalog.models[0]
    assert told["PADDOCK_CHAT_TEMPLATE"] == spec.chat_template
    assert (told["PADDOCK_THINKING"], spec.thinking_mode) == ("off", "off")
    assert json.loads(told["PADDOCK_CHAT_TEMPLATE_KWARGS"]) == spec.chat_template_kwargs
    assert json.loads(told["PADDOCK_SHARED_PROMPTS"]) == list(spec.shared_prompts)
    assert msgspec.json.decode(told["PADDOCK_LLAMA"], type=LlamaSettings) == spec.llama
    assert msgspec.json.decode(told["PADDOCK_SAMPLING"], type=DefaultSampling) == spec.sampling
    assert msgspec.json.decode(told["PADDOCK_ADAPTERS"], type=list[AdapterSpec]) == list(spec.adapters)
    assert msgspec.json.decode(told["PADDOCK_SPECULATION"], type=SpeculationSettings) == spec.speculation
    assert (told["PADDOCK_PROJECTOR"], told["PADDOCK_PROJECTOR_ON_GPU"]) == ("/models/eyes.gguf", "false")
    assert (told["PADDOCK_IMAGE_MIN_TOKENS"], told["PADDOCK_IMAGE_MAX_TOKENS"]) == ("64", "512")
    (first,) = pod["initContainers"]
    assert plain_env(first, KNOWN)["PADDOCK_SPECULATION"] == told["PADDOCK_SPECULATION"], "it fetches the draft model"
    assert plain_env(first, KNOWN)["PADDOCK_ADAPTERS"] == told["PADDOCK_ADAPTERS"], "and the adapters"
    assert "PADDOCK_PROJECTOR" not in plain_env(first, KNOWN), "which may be where only the worker looks"
    (blind,) = pods_of(render({"models": [{**model, "projector": "none"}]}), "worker")
    assert plain_env(blind["initContainers"][0], KNOWN)["PADDOCK_PROJECTOR"] == "none", "so none is fetched"
    assert (told["PADDOCK_KV_TOKENS"], told["PADDOCK_TOOL_FAMILY"]) == ("9000", "hermes")
    assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container(pod)["image"].startswith("paddock-worker-cuda:")


@FILES
def test_probes_and_hooks_ask_what_is_there(file: Path | None) -> None:
    found = rendered(file)
    gateways = {row.path for row in ROUTES if row.method == "GET"}
    for component, paths in (("gateway", gateways), ("worker", {HEALTH_PATH, READY_PATH})):
        for pod in pods_of(found, component):
            of = container(pod)
            ports = {port["name"] for port in of["ports"]}
            for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
                asked = of[f"{probe}Probe"]["httpGet"]
                assert asked["path"] in paths
                assert asked["port"] in ports
                assert asked["path"] == path
            hook = of["lifecycle"]["preStop"]["exec"]["command"]
            assert hook[:3] == ["paddock", "drain", component]
    page = (CHART.parent / "docs" / "lifecycle.md").read_text()
    for probe, path in (("startup", "/health"), ("liveness", "/health"), ("readiness", "/ready")):
        assert f"| {probe} | `GET {path}`" in page
    assert ("POST", DRAIN_PATH) in {(row.method, row.path) for row in ROUTES}


@FILES
def test_a_pod_may_take_as_long_to_stop_as_the_longest_call(file: Path | None) -> None:
    found = rendered(file)
    (gateway,) = pods_of(found, "gateway")
    longest = float(plain_env(container(gateway), KNOWN)["PADDOCK_REQUEST_TIMEOUT_S"])
    cut = WITHOUT_SPARE_GPUS_S if file and file.stem in WITHOUT_SPARE_GPUS else longest
    for component in ("gateway", "worker"):
        for pod in pods_of(found, component):
            flags = container(pod)["lifecycle"]["preStop"]["exec"]["command"][3:]
            asked = dict(zip(flags[::2], map(float, flags[1::2]), strict=True))
            own = plain_env(container(pod), KNOWN)[
                "PADDOCK_DRAIN_S" if component == "gateway" else "PADDOCK_WORKER_DRAIN_S"
            ]
            enough = longest if component == "gateway" else min(longest, cut)
            assert asked["--timeout-s"] >= enough + asked.get("--settle-s", 0)
            assert float(own) >= enough, "where the hook fails, SIGTERM must not cut a call off"
            # What is left after the hook: last words, closing connections, cached prompts going to disk for 5 s.
            assert pod["terminationGracePeriodSeconds"] >= asked["--timeout-s"] + 20
    assert longest <= 3600


@pytest.mark.parametrize("name", WITHOUT_SPARE_GPUS)
def test_calls_are_held_for_longer_than_a_worker_drains_and_its_successor_loads(name: str) -> None:
    found = rendered(next(file for file in EXAMPLES if file.stem == name))
    (gateway,) = pods_of(found, "gateway")
    held = float(plain_env(container(gateway), KNOWN)["PADDOCK_START_TIMEOUT_S"])
    for pod in pods_of(found, "worker"):
        assert pod["terminationGracePeriodSeconds"] == WITHOUT_SPARE_GPUS_S + 30
        assert held >= pod["terminationGracePeriodSeconds"] + 500


@pytest.mark.parametrize("drain_s", [0, 29.5])
def test_a_shorter_end_is_taken_at_its_word(drain_s: float) -> None:
    found = render(
        {
            "gateway": {"settings": {"request_timeout_s": 600.5, "start_timeout_s": 60, "drain_s": drain_s}},
            "workers": {"settings": {"worker_drain_s": 90}},
        }
    )
    (gateway,), (worker,) = pods_of(found, "gateway"), pods_of(found, "worker")
    drains = ceil(drain_s)
    assert plain_env(container(gateway), KNOWN)["PADDOCK_DRAIN_S"] == str(drains)
    assert plain_env(container(worker), KNOWN)["PADDOCK_WORKER_DRAIN_S"] == "90"
    hooks = [container(pod)["lifecycle"]["preStop"]["exec"]["command"][3:] for pod in (gateway, worker)]
    assert hooks == [["--settle-s", "10", "--timeout-s", str(10 + drains)], ["--timeout-s", "90"]]
    assert (gateway["terminationGracePeriodSeconds"], worker["terminationGracePeriodSeconds"]) == (40 + drains, 120)


def test_an_end_that_nobody_has_named_is_the_longest_call() -> None:
    found = render({"gateway": {"settings": {"request_timeout_s": 600.5, "start_timeout_s": 60}}})
    (gateway,), (worker,) = pods_of(found, "gateway"), pods_of(found, "worker")
    assert (gateway["terminationGracePeriodSeconds"], worker["terminationGracePeriodSeconds"]) == (641, 631)


def kept(values: dict[str, Any]) -> str | None:
    (gateway,) = pods_of(render(values), "gateway")
    return plain_env(container(gateway), KNOWN).get("PADDOCK_RESPONSES_BYTES_PER_TEAM")


def test_stored_responses_fit_the_bundled_redis() -> None:
    (most,) = re.findall(r"maxmemory (\d+)mb", render({}).one("ConfigMap", "redis")["data"]["redis.conf"])
    assert 20 * 1.2 * int(kept({}) or 0) <= int(most) * 2**20 / 2, "docs/capacity.md, Memory of Redis"
    assert int(kept({}) or 0) < GatewaySettings.model_fields["responses_bytes_per_team"].default


@pytest.mark.parametrize("own", [0, 1 << 30])
def test_an_operators_word_on_stored_responses_counts(own: int) -> None:
    assert kept({"gateway": {"settings": {"responses_bytes_per_team": own}}}) == str(own)


def test_a_redis_of_ones_own_is_as_large_as_its_operator_says() -> None:
    assert kept({"redis": {"bundled": False, "external": {"url": "redis://r:6379/0"}}}) is None


@FILES
def test_every_container_is_shut_in(file: Path | None) -> None:
    for told, pod in rendered(file).pods():
        assert pod["automountServiceAccountToken"] is False, told
        assert pod["enableServiceLinks"] is False, "it would set PADDOCK_PORT"
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= set(each["resources"]["requests"])
            assert "memory" in each["resources"]["limits"]


@FILES
def test_what_is_written_lies_on_a_volume(file: Path | None) -> None:
    found = rendered(file)
    for component in ("gateway", "worker"):
        for pod in pods_of(found, component):
            volumes = {volume["name"] for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: mount for mount in container(pod)["volumeMounts"]}
            claimed = {
                claim["metadata"]["name"]
                for item in found.of("StatefulSet", component)
                for claim in item["spec"].get("volumeClaimTemplates", ())
            }
            assert {mount["name"] for mount in mounts.values()} <= volumes | claimed
            told = plain_env(container(pod), KNOWN)
            assert told["PADDOCK_STATE_DIR"] in mounts
            assert {"/tmp", "/var/lib/paddock"} <= {path for path, mount in mounts.items() if not mount.get("readOnly")}
            if "PADDOCK_CACHE_DIR" in told:
                # A folder within the volume: the volume's own is its group's as well, which workers refuse.
                assert told["PADDOCK_CACHE_DIR"].startswith("/cache/")
                assert "/cache" in mounts


def test_the_gateways_volume_has_room_for_its_journal_of_usage() -> None:
    """A pod that outgrows its volume is evicted, with its calls."""
    for settings, room in ({}, "384Mi"), ({"usage_journal_mib": 1000}, "1128Mi"):
        found = render({"gateway": {"settings": settings}})
        (pod,) = pods_of(found, "gateway")
        (size,) = [one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if one["name"] == "state"]
        assert size == room


@FILES
def test_selectors_find_the_pods_and_nothing_else(file: Path | None) -> None:
    found = rendered(file)
    pods = {told["name"]: told["labels"] for told, _ in found.pods()}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    for item in found.workloads():
        if item["kind"] != "Pod":
            assert chosen(item["spec"]["selector"]["matchLabels"]) == {item["metadata"]["name"]}
    for item in found.of("PodDisruptionBudget"):
        assert chosen(item["spec"]["selector"]["matchLabels"]) == {item["metadata"]["name"]}
    services = {item["metadata"]["name"]: item for item in found.of("Service")}
    for service in services.values():
        (name,) = chosen(service["spec"]["selector"])
        (pod,) = (pod for told, pod in found.pods() if told["name"] == name)
        ports = {port["name"] for port in container(pod)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for item in found.of("StatefulSet"):
        assert item["spec"]["serviceName"] in services
    for item in (*found.of("HorizontalPodAutoscaler"), *found.of("ScaledObject")):
        target = item["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in {
            (each["kind"], each["metadata"]["name"]) for each in found.workloads()
        }


@FILES
def test_what_is_referred_to_is_made_or_is_the_operators(file: Path | None) -> None:
    found = rendered(file)
    made = {(item["kind"], item["metadata"]["name"]): item for item in found.objects}
    text = file.read_text() if file else ""
    for _, pod in found.pods():
        for volume in pod.get("volumes", ()):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in made or f"existingClaim: {claim}" in text
            config = volume.get("configMap", {}).get("name")
            assert config is None or ("ConfigMap", config) in made
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            for entry in each["env"]:
                if "secretKeyRef" in (source := entry.get("valueFrom", {})):
                    name, key = source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]
                    own = made.get(("Secret", name))
                    assert key in own["stringData"] if own else f"existingSecret: {name}" in text


def test_threads_are_those_that_the_container_may_use() -> None:
    cores: tuple[tuple[Any, int], ...] = (("4", 4), (3, 3), ("2500m", 2), ("500m", 1), (0.5, 1))
    models = [
        {"name": f"m{number}", "hf": "org/m", "resources": {"limits": {"cpu": cpu}}}
        for number, (cpu, _) in enumerate(cores)
    ]
    found = pods_of(render({"models": models}), "worker")
    told = [json.loads(plain_env(container(pod), KNOWN)["PADDOCK_LLAMA"])["n_threads"] for pod in found]
    assert told == [threads for _, threads in cores]


def test_cached_prompts_fit_their_volume() -> None:
    sizes = {"20Gi": "18432", "512Mi": "460", "1Ti": "943718"}
    models = [
        {"name": f"m{number}", "hf": "org/m", "promptCache": {"type": "emptyDir", "size": size}}
        for number, size in enumerate(sizes)
    ]
    found = pods_of(render({"models": models}), "worker")
    assert [plain_env(container(pod), KNOWN)["PADDOCK_CACHE_DISK_MIB"] for pod in found] == list(sizes.values())


def test_in_an_ipv6_cluster() -> None:
    found = render({"ipv6": True})
    (gateway,), (worker,) = pods_of(found, "gateway"), pods_of(found, "worker")
    told = plain_env(container(worker), {**KNOWN, "status.podIP": "fd00::7"})
    assert told["PADDOCK_WORKER_ADDRESS"] == "http://[fd00::7]:8081"
    assert told["PADDOCK_WORKER_HOST"] == plain_env(container(gateway), KNOWN)["PADDOCK_HOST"] == "::"


def test_gateways_roll_without_a_gap_and_on_a_new_catalog() -> None:
    before, after = render({}), render({"aliases": {"fast": "gemma-3-1b"}})
    for found in (before, after):
        assert found.one("Deployment", "gateway")["spec"]["strategy"]["rollingUpdate"] == {
            "maxSurge": 1,
            "maxUnavailable": 0,
        }
    templates = [found.one("Deployment", "gateway")["spec"]["template"] for found in (before, after)]
    assert templates[0] != templates[1]
    assert before.one("Deployment", "worker") == after.one("Deployment", "worker")


def test_redis_is_pinned_and_asks_for_its_password() -> None:
    (pod,) = pods_of(render({}), "redis")
    of = container(pod)
    assert of["image"].partition(":")[2][0].isdigit()
    assert "requirepass $REDISCLI_AUTH" in of["command"][-1]
    assert plain_env(of, KNOWN)["REDISCLI_AUTH"] == "secret"
    assert not pods_of(example("external-redis"), "redis")


def test_a_gateway_with_tls_is_probed_and_scraped_with_tls() -> None:
    for settings, probed, scraped in (({}, "HTTP", None), ({"tls_cert": "/tls/tls.crt"}, "HTTPS", "https")):
        found = render({"gateway": {"settings": settings}, "monitoring": {"enabled": True}})
        (pod,) = pods_of(found, "gateway")
        for probe in ("startup", "liveness", "readiness"):
            assert container(pod)[f"{probe}Probe"]["httpGet"]["scheme"] == probed
        (endpoint,) = found.one("PodMonitor", "gateway")["spec"]["podMetricsEndpoints"]
        assert endpoint.get("scheme") == scraped
