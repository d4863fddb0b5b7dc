"""`paddock up --gateways 2`: two processes on one port, each with its own metrics, replaced without a failed call."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.commands.listeners import number_of_gateways
from tests.integration.supervisor.conftest import Program, Programs, wait_until
from tests.support.stack import free_port

NUM_CALLERS = 4
GATEWAYS = 2


@pytest.fixture
def up(programs: Programs, model: Path) -> Program:
    flags = ("--workers", "1", "--slots", "4", "--model", str(model), "--alias", "tale", "--log-level", "info")
    started = programs.start("up", "--port", "0", "--gateways", str(GATEWAYS), *flags)
    started.until("Ctrl-C stops everything")
    return started


def addresses(program: Program) -> tuple[str, list[str]]:
    """The address of callers, and those of the gateways' own ports, as they are printed."""
    printed = dict(line.strip().split(maxsplit=1) for line in program.text().splitlines() if line.startswith("  "))
    own = printed["metrics"].removeprefix("of each gateway: ").split(", ")
    return printed["address"].removesuffix("/v1"), [f"http://{address}" for address in own]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def num_answered(url: str) -> float:
    families = text_string_to_metric_families(get(f"{url}/metrics"))
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "paddock_requests_total")


def gateway_pids(program: Program) -> set[int]:
    children = psutil.Process(program.popen.pid).children()
    return {child.pid for child in children if child.cmdline()[-1:] == ["gateway"]}


async def keep_asking(url: str, key: str, over: asyncio.Event, answered: Counter[str]) -> None:
    """Ask over one connection after the other, as a client does that keeps them, until it is over."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "tale", "max_tokens": 20, "stream": True, "messages": [{"role": "user", "content": "Once"}]}
    async with aiohttp.ClientSession(headers=headers) as session:
        while not over.is_set():
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                whole = await response.text()
            is_whole = response.status == 200 and whole.rstrip().endswith("[DONE]")
            answered["whole" if is_whole else f"{response.status} {whole[-200:]}"] += 1


def test_each_gateway_shows_its_own_metrics_and_callers_are_shared_out(up: Program) -> None:
    url, own = addresses(up)
    key = (up.state / "first-key").read_text().strip()
    answered = Counter[str]()

    async def ask() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(1.5, over.set)
        await asyncio.gather(*(keep_asking(url, key, over, answered) for _ in range(2 * NUM_CALLERS)))

    asyncio.run(ask())
    assert set(answered) == {"whole"}
    told = [num_answered(each) for each in own]
    assert sum(told) == answered["whole"]
    assert min(told) > 0
    with pytest.raises(urllib.error.HTTPError, match="501") as refused:
        get(f"{url}/metrics")
    message = json.loads(refused.value.read())["error"]["message"]
    assert all(each.removeprefix("http://") in message for each in own)
    listed = [
        group["targets"][0] for group in json.loads(get(f"{url}/metrics/targets")) if "gateway" in group["labels"]
    ]
    assert [f"http://{target}" for target in listed] == own


def status(url: str, key: str) -> int:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_gateways_share_a_port_for_admins_as_well(programs: Programs, model: Path) -> None:
    admin_port = free_port()
    flags = ("--workers", "1", "--slots", "4", "--model", str(model), "--alias", "tale", "--log-level", "info")
    started = programs.start(
        "up", "--port", "0", "--gateways", str(GATEWAYS), "--admin-port", str(admin_port), "--accounts", "false", *flags
    )
    started.until("Ctrl-C stops everything")
    url, own = addresses(started)
    admin = f"http://127.0.0.1:{admin_port}"
    key = (started.state / "first-key").read_text().strip()
    for _ in range(4):  # each connection may find another gateway
        assert [status(f"{each}/admin/explain?model=tale", key) for each in (url, *own, admin)] == [404, 404, 404, 200]
        assert [status(f"{each}/admin/whoami", key) for each in (url, admin)] == [404, 501]
        assert [status(f"{each}/v1/models", key) for each in (url, admin)] == [200, 200]
        assert [status(f"{each}/metrics", key) for each in (url, own[0], admin)] == [501, 200, 501]


def test_gateways_are_replaced_one_after_the_other_without_a_failed_call(up: Program) -> None:
    url, _ = addresses(up)
    key = (up.state / "first-key").read_text().strip()
    before, answered = gateway_pids(up), Counter[str]()

    async def replace() -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CALLERS):
                tasks.create_task(keep_asking(url, key, over, answered))
            await asyncio.sleep(0.5)
            up.send(signal.SIGUSR1)
            async with asyncio.timeout(60):
                while "all gateways have been replaced" not in up.text():  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            over.set()

    asyncio.run(replace())
    assert set(answered) == {"whole"}, answered
    after = gateway_pids(up)
    assert len(after) == GATEWAYS
    assert not before & after
    assert up.stop() == 0


def test_a_gateway_that_dies_is_started_again_and_the_other_serves_meanwhile(up: Program) -> None:
    url, own = addresses(up)
    before = gateway_pids(up)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    for _ in range(20):
        assert json.loads(get(f"{url}/health"))["status"] == "ok"
    wait_until(lambda: len(gateway_pids(up) - {victim}) == GATEWAYS, lambda: "a new gateway")
    for each in own:
        assert json.loads(get(f"{each}/ready"))["status"] == "ready"


def test_one_gateway_is_not_replaced_while_it_serves(programs: Programs, model: Path) -> None:
    alone = programs.start("up", "--port", "0", "--workers", "1", "--slots", "2", "--model", str(model))
    alone.until("Ctrl-C stops everything")
    alone.send(signal.SIGUSR1)
    alone.until("one gateway can't be replaced while it serves; run more with --gateways")
    assert "metrics" not in alone.text()


@pytest.mark.parametrize(
    ("num_workers", "cores", "expected"), [(1, 64, 1), (4, 64, 1), (5, 64, 2), (16, 64, 4), (16, 4, 2), (16, 1, 1)]
)
def test_auto_counts_workers_and_cores(num_workers: int, cores: int, expected: int) -> None:
    assert number_of_gateways(0, num_workers, cores) == expected
    assert number_of_gateways(3, num_workers, cores) == 3
