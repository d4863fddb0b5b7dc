"""A gateway and workers that trace, and a collector: for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.otlp_sink import OtlpSink
from tests.support.stack import DEMO_MODEL, Stack

EXPORT_MS = 30

CATALOG = """
models:
  - {name: quick, path: quick.gguf}
  - {name: absent, path: absent.gguf, workers: 0}
aliases:
  steady: {targets: [absent], fallbacks: [quick]}
"""

ANSWERED = "answered-canary-7a1f-in-32-chars"
"""What one of the workers says."""

POOLS = {
    "quick": ("--step-ms", "2", "--tokens", "8", "--answer", ANSWERED),
    "slow": ("--step-ms", "10", "--tokens", "20"),
    "failing": ("--step-ms", "2", "--tokens", "20", "--fail-after", "3"),
    "refusing": ("--step-ms", "2", "--tokens", "8", "--refuse", "internal", "--refuse-calls", "1"),
    "vectors": ("--kind", "embed"),
}


@pytest.fixture(scope="package")
def sink() -> Iterator[OtlpSink]:
    with OtlpSink() as running:
        yield running


@pytest.fixture(scope="package")
def stack(sink: OtlpSink) -> Iterator[Stack]:
    """Gateways: one that records all, and one that begins no trace, has a catalog, and logs prompts."""
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(EXPORT_MS)
    try:
        with Stack() as running:
            for alias, flags in POOLS.items():
                told = (*flags, "--otlp-endpoint", sink.url, "--log-level", "debug")
                running.fake_worker(alias, *told, worker_id=f"{alias}-a", slots=1 if alias == "slow" else 8, wait=False)
            more: dict[str, Any] = {"otlp_endpoint": sink.url, "log_level": "debug"}
            running.worker(DEMO_MODEL, "demo", worker_id="demo-a", slots=2, ctx=512, wait=False, **more)
            catalog = running.folder / "catalog.yaml"
            catalog.write_text(CATALOG)
            running.gateway(wait=False, otlp_headers="x-token=a%20b", **more)
            running.gateway(wait=False, trace_share=0, catalog=catalog, log_prompts=True, **more)
            for alias, process in zip([*POOLS, "demo"], running.workers, strict=True):
                running.wait_for_worker(alias, f"{alias}-a", process)
            for gateway in running.gateways:
                running.wait_until_ready(gateway)
                running.wait_until_listed(gateway, *POOLS, "demo")
            yield running
    finally:
        del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    """Asks the gateway that records all."""
    async with calling(stack.gateways[0].url, stack.key, "quick") as asking:
        yield asking


@pytest.fixture
async def unsampled(stack: Stack) -> AsyncIterator[Caller]:
    """Asks the one that begins no trace."""
    async with calling(stack.gateways[1].url, stack.key, "quick") as asking:
        yield asking
