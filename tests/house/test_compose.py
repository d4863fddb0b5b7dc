"""docker-compose.yml as it resolves: nothing open, nothing unbounded, and only what the programs know."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from accounts.settings import AccountsSettings
from gateway import __version__, cli
from gateway.settings import GatewaySettings, known_settings
from tests.support.compose import FILE, NEW_ENV, ROOT, Refused, Resolved, new_env, resolved
from tests.support.dockerfile import Dockerfile, read
from workers.models.catalog import load
from workers.protocol.keys import Role, rules_of, user_of
from workers.settings import SupervisorSettings, WorkerSettings
from workers.sources import variable

CATALOG = {"supervisor", "supervisor-cuda", "fetch-catalog"}
OURS = {"accounts", "gateway", "worker", "worker-cuda", "fetch"} | CATALOG
FIELDS = {
    "accounts": frozenset(AccountsSettings.model_fields),
    "gateway": frozenset(GatewaySettings.model_fields),
    "supervisor": frozenset(SupervisorSettings.model_fields),
    "worker": frozenset(WorkerSettings.model_fields),
}
SECRETS = (
    "PADDOCK_API_KEY",
    "PADDOCK_WORKER_SECRET",
    "PADDOCK_GATEWAY_SECRET",
    "PADDOCK_CACHE_SECRET",
    "PADDOCK_METRICS_KEY",
    "REDIS_PASSWORD",
    "REDIS_GATEWAY_PASSWORD",
    "REDIS_SUPERVISOR_PASSWORD",
    "REDIS_WORKER_PASSWORD",
    "POSTGRES_PASSWORD",
    "GRAFANA_PASSWORD",
)
PINNED_IMAGE = r"([a-z/]+:v?\d+\.\d+\.\d+|postgres:\d+\.\d+)(-[a-z]+)?(@sha256:[0-9a-f]{64})?"
"""PostgreSQL's versions have two numbers."""
PUBLISHED = {"gateway": "8080", "prometheus": "9090", "grafana": "3000"}


@pytest.fixture(scope="module")
def project() -> Resolved:
    return resolved(new_env(), ["gpu", "catalog", "catalog-gpu"])


def services(project: Resolved) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = project["services"]
    return found


def image_of(service: dict[str, Any]) -> Dockerfile:
    return read(ROOT / service["build"]["dockerfile"])


def seconds(text: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(count) * units[unit] for count, unit in re.findall(r"([\d.]+)([hms])", text))


def test_who_runs(project: Resolved) -> None:
    others = {"postgres", "redis", "prometheus", "grafana"}
    assert set(services(project)) == OURS | others
    assert set(services(resolved(new_env()))) == (OURS | others) - CATALOG - {"worker-cuda"}
    of_catalog = services(resolved(new_env() | {"COMPOSE_PROFILES": "catalog", "WORKERS": "0"}))
    assert set(of_catalog) == (OURS | others) - {"worker-cuda", "supervisor-cuda"}
    assert of_catalog["worker"]["deploy"]["replicas"] == 0


def test_the_gpu_is_named_in_the_env_file_so_that_every_command_knows_of_it() -> None:
    told = (ROOT / "deploy" / "compose" / "new_env.py").read_text()
    assert '"COMPOSE_PROFILES": ("gpu", ' in told
    found = services(resolved(new_env() | {"COMPOSE_PROFILES": "gpu", "WORKERS": "0"}))
    assert "worker-cuda" in found
    assert found["worker"]["deploy"]["replicas"] == 0
    for file in (FILE, ROOT / "docs" / "docker.md"):
        assert "docker compose --profile" not in file.read_text()


@pytest.mark.parametrize("missing", SECRETS)
def test_without_a_secret_nothing_starts(missing: str) -> None:
    variables = {name: value for name, value in new_env().items() if name != missing}
    for without in (variables, variables | {missing: ""}):
        with pytest.raises(Refused, match=rf"{missing} is missing a value: is unset; deploy/compose/new_env.py makes"):
            resolved(without)


def test_secrets_are_made_anew_and_long() -> None:
    first, second = new_env(), new_env()
    assert set(first) == set(SECRETS)
    assert all(len(first[name]) >= 48 and first[name] != second[name] for name in SECRETS)
    assert len({*first.values()}) == len(SECRETS)


def test_the_file_of_secrets_is_its_owners_only_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    command = ["sh", "-c", 'umask 000; exec "$0" "$@"', sys.executable, str(NEW_ENV), str(path)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert path.stat().st_mode & 0o777 == 0o600
    told = path.read_text()
    assert not any(
        line.partition("=")[2] in made.stdout for line in told.splitlines() if "=" in line and line[0] != "#"
    )
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert f"{path} is there already" in again.stderr
    assert path.read_text() == told


def test_secrets_that_a_version_before_did_not_know_are_added(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("PADDOCK_API_KEY=pk-kept\nREDIS_PASSWORD=kept\n#WORKERS=2")
    path.chmod(0o600)
    done = subprocess.run([sys.executable, str(NEW_ENV), str(path)], capture_output=True, text=True, check=True)
    assert "PADDOCK_GATEWAY_SECRET" in done.stdout
    lines = path.read_text().splitlines()
    assert lines[:3] == ["PADDOCK_API_KEY=pk-kept", "REDIS_PASSWORD=kept", "#WORKERS=2"]
    told = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    assert set(told) == set(SECRETS)
    assert path.stat().st_mode & 0o777 == 0o600


def test_each_part_logs_in_to_redis_as_its_user_and_knows_no_other(project: Resolved) -> None:
    for name in OURS - {"fetch", "fetch-catalog"}:
        role = "gateway" if name in ("accounts", "gateway") else name.removesuffix("-cuda")
        told = services(project)[name]["environment"]
        assert told["PADDOCK_REDIS_URL"].startswith(f"redis://paddock-{role}:")
        assert ("PADDOCK_GATEWAY_SECRET" in told) == (role == "gateway")
        assert told.get("PADDOCK_WORKER_REDIS_URL", "redis://paddock-worker:").startswith("redis://paddock-worker:")
        assert ("PADDOCK_WORKER_REDIS_URL" in told) == (role == "supervisor")
        assert not [key for key in told if key.startswith("REDIS")]
    program = str(ROOT / "deploy" / "write_redis_users.py")
    done = subprocess.run([sys.executable, program, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}run: python deploy/write_redis_users.py"
    script = services(project)["redis"]["command"][-1].replace("$$", "$")
    lines = [line.strip() for line in script.splitlines()]
    roles: tuple[Role, ...] = ("gateway", "supervisor", "worker")
    for user in roles:
        assert f"user {user_of(user)} on >$REDIS_{user.upper()}_PASSWORD {rules_of(user)}" in lines


def test_prometheus_sends_the_metrics_key_to_gateways_only(project: Resolved, tmp_path: Path) -> None:
    """Its own command, with a folder and a program in place of the container's, leaves the key where it reads it."""
    key = services(project)["gateway"]["environment"]["PADDOCK_METRICS_KEY"]
    prometheus = services(project)["prometheus"]
    assert prometheus["entrypoint"] == ["sh", "-c"]
    (script,) = prometheus["command"]
    stand_in = tmp_path / "prometheus"
    stand_in.write_text('#!/bin/sh\necho "$# ${METRICS_KEY-unset}"\n')
    stand_in.chmod(0o755)
    clean = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **prometheus["environment"]}
    command = ["sh", "-c", script.replace("$$", "$").replace("/tmp/", f"{tmp_path}/")]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == "3 unset\n"
    file = tmp_path / "metrics_key"
    assert file.read_text() == key
    assert file.stat().st_mode & 0o777 == 0o600
    assert "/tmp" in prometheus["tmpfs"]
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    asked = {"type": "Bearer", "credentials_file": "/tmp/metrics_key"}
    assert jobs["paddock-gateway"]["authorization"] == asked
    assert [each["authorization"] for each in jobs["paddock-worker"]["http_sd_configs"]] == [asked]
    assert "authorization" not in jobs["paddock-worker"], "a worker that has fallen would read it"


def test_no_page_has_a_shell_write_the_secrets() -> None:
    for page in (FILE, ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert "new_env.py >" not in page.read_text(), page.name


def test_every_variable_of_the_file_is_told_with_its_default() -> None:
    told = (ROOT / "deploy" / "compose" / "new_env.py").read_text()
    text = re.sub(r"^\s*#.*$", "", FILE.read_text(), flags=re.MULTILINE)
    used = re.findall(r"(?<!\$)\$\{(\w+)(:-([^}]*))?", text)
    assert {name for name, _, _ in used} >= set(SECRETS)
    for name, _, default in used:
        assert f'"{name}": ' in told, name
        # The default of PADDOCK_DATABASE_URL has a secret in it.
        if default and not name.startswith(("PADDOCK_A", "PADDOCK_DATABASE_URL")):
            assert f'"{name}": ("{default}", ' in told, name


def test_every_variable_is_a_setting_of_the_program_that_gets_it(project: Resolved) -> None:
    for name in OURS:
        service = services(project)[name]
        assert service["command"][0] in dict(cli.rows()), name
        fields = FIELDS.get(service["command"][0], known_settings())
        given = {key for key in service["environment"] if key.startswith("PADDOCK_")}
        assert given <= {variable(field) for field in fields}, name


def test_only_these_can_be_reached_and_from_this_machine_only(project: Resolved) -> None:
    published = {
        (name, port["host_ip"], str(port["target"]))
        for name, service in services(project).items()
        for port in service.get("ports", [])
    }
    assert published == {(name, "127.0.0.1", port) for name, port in PUBLISHED.items()}
    assert image_of(services(project)["gateway"]).stages[-1].last("EXPOSE") == PUBLISHED["gateway"]


def test_redis_and_workers_are_in_a_network_without_a_way_in_or_out(project: Resolved) -> None:
    assert project["networks"]["inside"]["internal"] is True
    for name in ("postgres", "redis", "worker", "worker-cuda", "supervisor", "supervisor-cuda"):
        assert set(services(project)[name]["networks"]) == {"inside"}, name


def test_nobody_has_rights_or_writes_to_the_root(project: Resolved) -> None:
    for name, service in services(project).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert "cap_add" not in service, name
        limits = service["deploy"]["resources"]["limits"]
        assert int(limits["memory"]) >= 512 << 20, name
        assert limits["pids"] > 0, name


def test_what_is_bounded_fits_together(project: Resolved) -> None:
    """A container is killed after its grace: what drains must be done by then."""
    drains = dict.fromkeys(("worker", "worker-cuda", "supervisor", "supervisor-cuda"), "WORKER_DRAIN_S")
    for name, drain in {"gateway": "DRAIN_S", **drains}.items():
        service = services(project)[name]
        drains_s = float(service["environment"][f"PADDOCK_{drain}"])
        assert seconds(service["stop_grace_period"]) >= drains_s + 20, name
    redis = " ".join(services(project)["redis"]["command"])
    (most,) = re.findall(r"--maxmemory (\d+)mb", redis)
    assert int(most) * 2**20 < int(services(project)["redis"]["deploy"]["resources"]["limits"]["memory"])
    gateway = services(project)["gateway"]["environment"]
    kept = int(gateway["PADDOCK_RESPONSES_BYTES_PER_TEAM"])
    assert 20 * 1.2 * kept <= int(most) * 2**20 / 2, "docs/capacity.md, Memory of Redis"
    # `up` replaces all workers at once: a call waits for one that drains, and for its successor to load.
    drains_s = float(services(project)["worker"]["environment"]["PADDOCK_WORKER_DRAIN_S"])
    assert float(gateway["PADDOCK_START_TIMEOUT_S"]) >= drains_s + 300


def test_what_the_gateway_is_told_can_be_told_otherwise() -> None:
    own = {"PADDOCK_START_TIMEOUT_S": "60", "PADDOCK_RESPONSES_BYTES_PER_TEAM": "0"}
    assert own.items() <= services(resolved(new_env() | own))["gateway"]["environment"].items()


def test_the_page_on_capacity_says_how_much_redis_has(project: Resolved) -> None:
    page = (ROOT / "docs" / "capacity.md").read_text()
    (most,) = re.findall(r"--maxmemory (\d+)mb", " ".join(services(project)["redis"]["command"]))
    assert f"The Redis of compose and the bundled one of the chart have {most} MiB." in page
    kept = int(services(project)["gateway"]["environment"]["PADDOCK_RESPONSES_BYTES_PER_TEAM"])
    assert f"both set `responses_bytes_per_team` to {kept >> 20} MiB" in page


def test_the_order_of_starting_which_is_the_order_of_stopping_reversed(project: Resolved) -> None:
    waits = {name: service.get("depends_on", {}) for name, service in services(project).items()}
    for worker in ("worker", "worker-cuda"):
        assert waits[worker]["redis"]["condition"] == "service_healthy"
        assert waits[worker]["fetch"]["condition"] == "service_completed_successfully"
        assert worker in waits["gateway"]
    for supervisor in ("supervisor", "supervisor-cuda"):
        assert waits[supervisor]["redis"]["condition"] == "service_healthy"
        assert waits[supervisor]["fetch-catalog"]["condition"] == "service_completed_successfully"
    assert waits["fetch-catalog"]["fetch"]["condition"] == "service_completed_successfully"
    assert waits["gateway"]["redis"]["condition"] == "service_healthy"
    assert not any(waits["gateway"][name]["required"] for name in ("worker-cuda", "supervisor", "supervisor-cuda"))
    for name in services(project):
        image_has_one = name in OURS and image_of(services(project)[name]).stages[-1].last("HEALTHCHECK")
        assert image_has_one or services(project)[name].get("healthcheck"), name


def test_images_are_pinned_and_ours_are_this_version(project: Resolved) -> None:
    for name, service in services(project).items():
        if name in OURS:
            assert service["image"].endswith(f":{__version__}"), name
            assert service["build"]["args"]["VERSION"] == __version__, name
            assert Path(service["build"]["context"]) == ROOT
        else:
            assert re.fullmatch(PINNED_IMAGE, service["image"]), name


def test_what_is_mounted_is_tracked_and_named_volumes_are_declared(project: Resolved) -> None:
    for name, service in services(project).items():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).relative_to(ROOT), name
                assert Path(volume["source"]).exists(), volume["source"]
                assert volume["read_only"] is True, name
            else:
                assert volume["source"] in project["volumes"], name
        for told, other in combinations(sorted(v["target"] for v in service.get("volumes", [])), 2):
            assert told != other, name


def test_a_worker_looks_where_fetch_puts_it(project: Resolved) -> None:
    variables = new_env() | {"PADDOCK_HF": "owner/model-GGUF", "PADDOCK_ALIAS": "m"}
    named = services(resolved(variables))
    assert named["worker"]["environment"]["PADDOCK_MODEL"] == "/models/m.gguf"
    assert named["fetch"]["environment"]["PADDOCK_ALIAS"] == named["worker"]["environment"]["PADDOCK_ALIAS"] == "m"
    assert image_of(named["fetch"]).environment()["PADDOCK_MODELS_DIR"] == "/models"
    (volume,) = named["worker"]["volumes"]
    assert (volume["source"], volume["target"], volume["read_only"]) == ("models", "/models", True)
    demo = services(project)["worker"]["environment"]
    assert demo["PADDOCK_MODEL"] == f"/models/{demo['PADDOCK_ALIAS']}.gguf" == "/models/paddock-demo.gguf"


def test_a_catalogs_models_are_known_to_all_who_need_them(project: Resolved, tmp_path: Path) -> None:
    """The folder is mounted whole, so that an editor which replaces the file changes what the containers see."""
    (tmp_path / "catalog.yaml").touch()
    own = services(resolved(new_env() | {"CATALOG_FOLDER": str(tmp_path), "COMPOSE_PROFILES": "catalog"}))
    for name in ("gateway", "supervisor", "fetch-catalog"):
        told = own[name]["environment"]
        assert told["PADDOCK_CATALOG"] == "/etc/paddock/catalog.yaml", name
        mounts = {volume["target"]: volume for volume in own[name]["volumes"]}
        assert (mounts["/etc/paddock"]["source"], mounts["/etc/paddock"]["read_only"]) == (str(tmp_path), True), name
    assert services(project)["gateway"]["environment"]["PADDOCK_CATALOG"] == "", "without a folder it knows its workers"
    assert not {"PADDOCK_ALIAS", "PADDOCK_MODEL", "PADDOCK_SLOTS"} & set(own["supervisor"]["environment"])


def test_the_catalog_that_comes_along_names_what_fetch_brings(project: Resolved) -> None:
    mounts = {volume["target"]: volume["source"] for volume in services(project)["supervisor"]["volumes"]}
    (model,) = load(Path(mounts["/etc/paddock"], "catalog.yaml")).models
    assert model.path == services(project)["worker"]["environment"]["PADDOCK_MODEL"]
