"""A gateway whose log nobody reads: a collector that stands still, a container's log driver that is full."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator

import httpx2
import pytest

from tests.support.preloaded import start_anew
from tests.support.stack import Process, Stack, free_port

MODEL = "unread"
PIPE_BYTES = 4096
"""The smallest pipe: some ten lines fill it."""
NUM_CALLS = 60


@pytest.fixture
def gateway() -> Iterator[tuple[Stack, Process]]:
    """Yield a gateway with a worker; its log goes into a pipe that is never read."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with Stack() as stack:
        stack.fake_worker(MODEL)
        port = free_port()
        environment = stack.environment() | {"PADDOCK_PORT": str(port), "PADDOCK_GATEWAY_ID": "unread"}
        child = start_anew([sys.executable, "-m", "gateway.cli", "gateway"], environment, writer, writer)
        process = Process("gateway", child, stack.folder / "none.log", url=f"http://127.0.0.1:{port}")
        try:
            stack.wait_until_ready(process)
            yield stack, process
        finally:
            process.stop(5.0)
            os.close(reader)
            os.close(writer)


def test_a_log_that_nobody_reads_stops_no_call(gateway: tuple[Stack, Process]) -> None:
    stack, process = gateway
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=process.url, headers=headers, timeout=10) as http:
        answers = [http.post("/v1/chat/completions", json=body).status_code for _ in range(NUM_CALLS)]
        assert answers == [200] * NUM_CALLS
        assert http.get("/health").status_code == 200
