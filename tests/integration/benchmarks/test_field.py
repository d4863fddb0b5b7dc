"""The benchmark of the field: crowds at the plain upstream, which stands in for a gateway here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.field import WARM_UP, tried
from benchmarks.field.crowd import Crowd, parser, reason
from benchmarks.field.gateways import STARTS, Arrangement, Gateway
from tests.support.stack import Stack, free_port

STAND_IN = f"""#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in -port) port=$2 ;; -listen) port=${{2##*:}} ;; esac
  shift
done
exec {sys.executable} -m benchmarks.plain_upstream --port "$port" --tokens 1000
"""


@pytest.fixture
def upstream() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.plain_upstream", "--port", str(port), "--tokens", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield f"http://127.0.0.1:{port}"
        process.terminate()


async def test_a_crowd_counts_tokens_cpu_time_memory_and_what_a_newcomer_waits(upstream: str) -> None:
    flags = ["--url", upstream, "--direct", upstream, "--model", "every-10ms", "--streams", "3", "--tokens", "60"]
    flags += ["--window", "0.2", "--probes", "2", "--watch", str(os.getpid())]
    found = await Crowd(parser().parse_args(flags)).run()
    assert found["num_begun"] == 3
    assert 3 <= int(str(found["tokens"])) <= 180
    for name in ("cpu_s", "window_s", "most_bytes", "longest_gap_ms", "ttft_ms", "direct_ms"):
        assert float(str(found[name])) > 0


async def test_a_crowd_whose_calls_fail_says_so(upstream: str) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    flags = ["--url", closed, "--direct", upstream, "--model", "every-10ms", "--streams", "1"]
    with pytest.raises(ExceptionGroup) as raised:
        await Crowd(parser().parse_args(flags)).run()
    assert "Connect call failed" in reason(raised.value)


def test_a_crowd_is_a_process_whose_figures_are_read(upstream: str) -> None:
    gateway = Gateway("one", "", upstream, "none", (os.getpid(),), ("--direct", upstream))
    assert tried(gateway, WARM_UP).tokens > 0
    with pytest.raises(RuntimeError, match="Connect call failed"):
        tried(replace(gateway, url=f"http://127.0.0.1:{free_port()}"), WARM_UP)


@pytest.mark.parametrize(("name", "program"), [("bifrost", "bifrost-http"), ("llama-swap", "llama-swap")])
def test_a_program_on_the_path_is_started(
    name: str, program: str, upstream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / program
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PADDOCK_BENCH_DIR", str(tmp_path / "bench"))
    with Stack(measured=True) as stack:
        gateway = STARTS[name](Arrangement(stack, int(upstream.rpartition(":")[2]), ("at-once", WARM_UP.model)))
        assert gateway.version == "as on the PATH"
