"""The commands of docs/operations.md: those that ask a running Paddock are run, the others name what there is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import yaml

from gateway import __version__
from gateway.commands.config import gateway_groups, metrics_of, worker_groups
from gateway.settings import known_settings
from tests.support.stack import ROOT, Stack
from workers.sources import flag, variable

MODEL = "story"
PAGE = (ROOT / "docs" / "operations.md").read_text()
SEEN_S = 5.0
"""Keys in Redis are valid on every gateway after three."""
IN_GATEWAY = "kubectl exec -n llm deployment/paddock-gateway -- paddock "
IN_REDIS = "kubectl exec -n llm paddock-redis-0 -- redis-cli "
MAKING = ("KEY=$(", "SUM=$(")


def commands() -> list[str]:
    """Lines of its indented blocks that are commands; blocks of YAML are none."""
    blocks = re.findall(r"(?:^ {4,}\S.*\n)+", PAGE, re.MULTILINE)
    lines = [line.strip() for block in blocks if ":\n" not in block for line in block.splitlines()]
    return [line for line in lines if re.match(r"[a-zA-Z_-]+[ =]", line)]


def of(*programs: str) -> list[str]:
    return [command for command in commands() if command.split()[0] in programs]


def test_every_command_is_looked_at_here() -> None:
    known = of(
        "make", "paddock", "helm", "docker", "python3", "--set", "export", "curl", "kubectl", "for", "kill", "pip"
    )
    assert [command for command in commands() if command not in known and not command.startswith(MAKING)] == []
    assert len(commands()) >= 20


def test_the_wheel_that_is_installed_is_the_one_that_is_built() -> None:
    """tests/integration/deploy/test_dist.py runs both."""
    whole, gateway = of("pip")
    assert f"dist/paddock-{__version__}-py3-none-any.whl[accounts,gateway,worker]" in whole
    assert f"dist/paddock-{__version__}-py3-none-any.whl[gateway]" in gateway


@pytest.mark.parametrize("command", of("make"))
def test_targets_of_make(command: str) -> None:
    assert f"\n{shlex.split(command)[1]}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("command", of("paddock"))
def test_flags_of_paddock(command: str) -> None:
    flags = {flag(name) for name in known_settings()}
    if command.startswith("paddock bench"):
        flags |= set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "bench.md").read_text()))
    assert [word for word in shlex.split(command) if word.startswith("--") and word not in flags] == []


@pytest.mark.parametrize("command", of("docker", "helm", "python3", "--set"))
def test_what_stands_on_the_pages_of_containers_and_of_the_chart_too(command: str) -> None:
    """There it is told, and tested with the compose file and the chart."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("docker.md", "kubernetes.md"))
    assert command.removesuffix(" \\") in pages
    assert [word for word in command.split() if word.startswith("helm/") and not (ROOT / word).exists()] == []


@pytest.mark.parametrize("page", ["operations.md", "kubernetes.md"])
def test_the_images_that_the_chart_asks_for_are_built_and_pushed(page: str) -> None:
    told = (ROOT / "docs" / page).read_text()
    [names, pushing] = re.findall(
        r"^    make images IMAGES=\"(.+)\"\n(    for (?:.*\n)+?    done\n)", told, re.MULTILINE
    )[0]
    [setting] = re.findall(r"^    export REGISTRY=.+ TAG=.+", told, re.MULTILINE)
    script = f'docker() {{ echo "$*"; }}\n{setting}\n{pushing}'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    asked = yaml.safe_load((ROOT / "helm" / "values.yaml").read_text())["image"]
    version = yaml.safe_load((ROOT / "helm" / "Chart.yaml").read_text())["appVersion"]
    parts = ("gateway", "accounts", "worker", "workerCuda")
    images = {f"registry.example.com/llm/{asked[part]}:{version}" for part in parts}
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("push ")} == images
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("tag ")} == {
        f"paddock-{name}:{version}" for name in names.split()
    }


def test_names_are_those_that_there_are() -> None:
    metrics = {metric.name for metric in metrics_of((*gateway_groups(), *worker_groups()))}
    told = set(re.findall(r"`((?:paddock|vllm|llamacpp|process)[_:][a-z_:]+)`", PAGE))
    assert told
    assert told - metrics == set()
    variables = {variable(name) for name in known_settings()}
    assert set(re.findall(r"PADDOCK_[A-Z_]+", PAGE)) <= variables
    settings = set(re.findall(r"`([a-z_]+_(?:s|bytes|dir|url|host))`", PAGE)) - told
    assert settings
    assert settings - set(known_settings()) == set()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker(MODEL, wait=False)
        running.gateway(accounts_url=running.accounts().url)
        yield running


def shell(stack: Stack, command: str, **more: str) -> str:
    """Runs it as it stands on the page, but for the address."""
    text = command.replace("http://127.0.0.1:8080", stack.gateways[0].url)
    text = text.replace(IN_GATEWAY, f"{sys.executable} -m gateway.cli ")
    text = text.replace(IN_REDIS, f"redis-cli -s {stack.redis.socket} ")
    for program in ("curl", "redis-cli"):
        if text.startswith(program) and shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine")
    environment = {**stack.environment(), "KEY": stack.key, "MODEL": MODEL, **more}
    done = subprocess.run(["bash", "-euc", text], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_is_it_well(stack: Stack) -> None:
    ready, models, metrics, explained = [shell(stack, command) for command in of("curl")]
    assert json.loads(ready)["status"] == "ready"
    assert [model["id"] for model in json.loads(models)["data"]] == [MODEL]
    assert "paddock_workers{" in metrics
    assert MODEL in explained


def test_a_key_that_is_made_on_the_page(stack: Stack) -> None:
    making, hashing = [command for command in commands() if command.startswith(MAKING)]
    key, sha256 = shell(stack, f'{making}; {hashing}; echo "$KEY" "$SUM"').split()
    assert (key[:3], len(sha256)) == ("pk-", 64)
    team, adding, removing = [
        f"{command} --url {stack.gateways[0].url}" for command in of("kubectl") if IN_GATEWAY in command
    ]
    [models] = [command for command in of("curl") if "/v1/models" in command]
    shell(stack, team)
    [made] = re.findall(r"^key +(\S+)$", shell(stack, adding), re.MULTILINE)
    until_told(stack, models, made, '"data"')
    shell(stack, removing)
    until_told(stack, models, made, "invalid_api_key")


def until_told(stack: Stack, command: str, key: str, part: str) -> None:
    ends = time.monotonic() + SEEN_S
    while part not in (told := shell(stack, command, KEY=key)):
        assert time.monotonic() < ends, told
        time.sleep(0.2)


def test_the_password_of_redis_changes_while_both_are_valid(stack: Stack) -> None:
    adding, removing = [command for command in of("kubectl") if "ACL" in command]
    login = f"redis-cli -s {stack.redis.socket} --user paddock-gateway -a new --no-auth-warning PING"
    shell(stack, adding, NEW_PASSWORD="new")
    shell(stack, adding, NEW_PASSWORD="old")
    assert shell(stack, login) == "PONG\n"
    shell(stack, removing, OLD_PASSWORD="old")
    assert shell(stack, login) == "PONG\n"
    # Some versions of redis-cli go on as the default user, whom this Redis lets in.
    assert "WRONGPASS" in shell(stack, login.replace("-a new", "-a old") + " 2>&1 || true")
