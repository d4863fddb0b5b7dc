"""The C++ llama-server that stands built in the benchmark's folder, for tests that compare with it.

`python -m benchmarks.reference` builds it, in some minutes; a binary elsewhere may be named by LLAMA_SERVER. Tests skip
where there is none.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference import bench_dir
from tests.support.stack import free_port

STARTUP_S = 120.0


def built_server() -> Path:
    """Return the binary. Skips the test where there is none."""
    if named := os.environ.get("LLAMA_SERVER"):
        return Path(named)
    pattern = f"build-{importlib.metadata.version('llama-cpp-python')}*/bin/llama-server"
    found = sorted(bench_dir().glob(pattern))
    if not found:
        pytest.skip("no llama-server is built here (`python -m benchmarks.reference` builds it)")
    return found[0]


@contextlib.contextmanager
def real_server(model: Path, *flags: str) -> Iterator[str]:
    """Run it on loopback with one slot; yields its URL."""
    port = free_port()
    command = [str(built_server()), "-m", str(model), "-c", "256", "-np", "1", "-t", "1", "--no-warmup", *flags]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield url
    finally:
        process.kill()
        process.wait()


def asked(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a POST; None: it was refused."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=STARTUP_S) as answer:
            answered: dict[str, Any] = json.load(answer)
            return answered
    except urllib.error.HTTPError:
        return None


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.02)
    raise RuntimeError(f"llama-server did not start; exit code {process.poll()}")
