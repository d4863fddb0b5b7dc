"""One running front for the tests of this folder: Redis, fake workers with different manners, two gateways.

Each test uses pools of its own or leaves them as it found them; what a test kills, it started.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from accounts.protocol.records import digest
from tests.support.caller import Caller, calling
from tests.support.stack import Process, Stack

NARROW_KEY = "pk-narrow-0123456789"
CHAINED_KEY = "pk-chained-0123456789"
CHAINED = {"name": "chained", "team": "blue", "sha256": digest(CHAINED_KEY), "aliases": ["steady"]}
BOUND_KEY = "pk-bound-0123456789"
BOUND = {
    "name": "bound",
    "team": "green",
    "sha256": digest(BOUND_KEY),
    "min_priority": -2,
    "max_tokens": 60,
    "answer_timeout_s": 0.6,
}
NARROW = {"name": "narrow", "team": "blue", "sha256": digest(NARROW_KEY), "aliases": ["quick"]}
MAX_BODY_BYTES = 1 << 20
QUEUE_TIMEOUT_S = 1.5
PING_INTERVAL_S = 0.2

REQUEST_TIMEOUT_S = 2.0
"""Of the second gateway."""
CATALOG = """
models:
  - {name: quick, path: quick.gguf, tags: [small, quick]}
  - {name: absent, path: absent.gguf, workers: 0}
  - {name: slow, path: slow.gguf}
  - {name: failing, path: failing.gguf}
  - {name: vectors, path: vectors.gguf}
  - {name: ailing, path: ailing.gguf, workers: 0}
  - {name: sickly, path: sickly.gguf, workers: 0}
aliases:
  chat: quick
  later: absent
  steady: {targets: [absent], fallbacks: [quick]}
  patient: {targets: [slow], fallbacks: [quick]}
  fragile: {targets: [failing], fallbacks: [quick]}
  brave: {targets: [ailing], fallbacks: [quick]}
  feigned: {targets: [sickly], fallbacks: [quick]}
  roomy: {targets: [absent], fallbacks: [quick, slow]}
  narrow: {targets: [absent], fallbacks: [quick]}
  working: {targets: [vectors], fallbacks: [later, chat]}
  turning: {targets: [absent], fallbacks: [vectors]}
  shared: {targets: [{model: quick, weight: 2}, failing]}
"""
"""Of the second gateway: a model with an alias, one that no worker serves, and names of several models."""


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        pools = {
            "quick": ("--step-ms", "2", "--tokens", "8", "--ctx", "64"),
            "slow": ("--step-ms", "20", "--tokens", "500"),
            "failing": ("--step-ms", "2", "--tokens", "20", "--fail-after", "3"),
            "dropping": ("--step-ms", "2", "--tokens", "100", "--drop-stream-every", "9"),
            "flood": ("--step-ms", "0.2", "--tokens", "1000000"),
            "vectors": ("--kind", "embed", "--ctx", "64"),
            "ranks": ("--kind", "rank", "--ctx", "64"),
        }
        slots = {"slow": 2, "flood": 1}
        for alias, flags in pools.items():
            running.fake_worker(alias, *flags, worker_id=f"{alias}-a", slots=slots.get(alias, 8), wait=False)
        settings = {
            "api_keys": json.dumps([NARROW, CHAINED, BOUND]),
            "max_body_bytes": MAX_BODY_BYTES,
            "queue_timeout_s": QUEUE_TIMEOUT_S,
            "max_queue": 2,
            "ping_interval_s": PING_INTERVAL_S,
            "stream_buffer_events": 256,
        }
        catalog = running.folder / "catalog.yaml"
        catalog.write_text(CATALOG)
        running.gateway(wait=False, **settings)
        running.gateway(wait=False, catalog=catalog, request_timeout_s=REQUEST_TIMEOUT_S, **settings)
        for alias, process in zip(pools, running.workers, strict=True):
            running.wait_for_worker(alias, f"{alias}-a", process)
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
        yield running


@pytest.fixture
def gateway(stack: Stack) -> Process:
    return stack.gateways[0]


@pytest.fixture
async def caller(stack: Stack, gateway: Process) -> AsyncIterator[Caller]:
    """Asks the first gateway; `caller.model` may be set."""
    async with calling(gateway.url, stack.key, "quick") as asking:
        yield asking


@pytest.fixture
async def other_caller(stack: Stack) -> AsyncIterator[Caller]:
    """Asks the second gateway, which has a catalog."""
    async with calling(stack.gateways[1].url, stack.key, "quick") as asking:
        yield asking
