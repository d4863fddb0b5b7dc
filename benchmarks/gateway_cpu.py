"""Gateway CPU per streamed token against nginx proxying the same bytes: 64 streams, a step every 20 ms.

    python -m benchmarks.gateway_cpu

The gateway, and then nginx, has core 0 for itself; load, fake workers and Redis share core 1. CPU time is the process's
own user and system time while the load runs, divided by the tokens that reached the callers, requests' setup included.
Both are measured behind one upstream with 64 streams and behind eight with 8 each, whose steps fall at different times:
more wake-ups for the same bytes. Rounds alternate, so that both see the same machine; ratios are of the medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.table import Row, print_rows
from tests.support.stack import Stack, free_port

STREAMS, STEP_MS, TOKENS = 64, 20, 300

NGINX_CONF = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream worker {{ {servers} keepalive 128; }}
  server {{
    listen 127.0.0.1:{port};
    proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    location / {{ proxy_pass http://worker; }}
  }}
}}
"""


def load(url: str, key: str, pid: int, model: str) -> dict[str, float]:
    """One round on core 1; raises when any stream failed."""
    command = ["taskset", "-c", "1", sys.executable, "-m", "benchmarks.load", "--url", url, "--key", key]
    command += ["--model", model, "--callers", str(STREAMS), "--requests", str(STREAMS), "--max-tokens", str(TOKENS)]
    done = subprocess.run([*command, "--watch", str(pid)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"load failed: {done.stdout[-600:]} {done.stderr[-600:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def start_upstream(stack: Stack, name: str, *flags: str) -> int:
    """Start a plain upstream with these flags and return its port."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.plain_upstream", "--port", str(port), *flags]
    process = stack.spawn(name, command)
    while "ready" not in process.text() and process.popen.poll() is None:
        time.sleep(0.02)
    return port


def nginx_program() -> str:
    """Return the path of nginx, which need not be on the PATH. Raises SystemExit when there is none."""
    found = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
    if found is None:
        raise SystemExit("nginx is the yardstick of this benchmark: install the nginx package")
    return found


def start_nginx(stack: Stack, name: str, upstreams: list[int]) -> tuple[str, int]:
    """Start nginx before the upstreams on these ports; return its URL and the process id of its one worker."""
    port, servers = free_port(), " ".join(f"server 127.0.0.1:{upstream};" for upstream in upstreams)
    folder = stack.folder / name
    folder.mkdir()
    conf = folder / "nginx.conf"
    conf.write_text(NGINX_CONF.format(folder=folder, servers=servers, port=port))
    master = stack.spawn(name, [nginx_program(), "-c", str(conf), "-e", str(folder / "error.log")])
    deadline = time.monotonic() + 10
    while not (children := psutil.Process(master.pid).children()):
        if time.monotonic() > deadline or master.popen.poll() is not None:
            raise RuntimeError(f"nginx did not start: {master.text()}")
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}", children[0].pid


def nginx_before(stack: Stack, upstreams: int) -> tuple[str, int]:
    """Start nginx before that many upstreams, whose steps fall at different times."""
    flags = ("--step-ms", str(STEP_MS), "--tokens", str(TOKENS))
    ports = [start_upstream(stack, f"upstream-{upstreams}-{number}", *flags) for number in range(upstreams)]
    return start_nginx(stack, f"nginx-{upstreams}", ports)


def measure(rounds: int) -> list[Row]:
    """Microseconds of CPU per token, each arrangement beside nginx in the same arrangement."""
    cores = {"gateway": "0", "nginx": "0", "fake": "1", "upstream": "1", "redis": "1"}
    flags = ("--step-ms", str(STEP_MS), "--tokens", str(TOKENS))
    costs: dict[str, list[float]] = {}
    with Stack(measured=True, cores=cores) as stack:
        stack.fake_worker("one", *flags, worker_id="fake-one", slots=STREAMS)
        for number in range(8):
            stack.fake_worker("eight", *flags, worker_id=f"fake-eight-{number}", slots=STREAMS // 8)
        gateway = stack.gateway(log_level="info")
        targets = {
            "nginx one": nginx_before(stack, 1),
            "one": (gateway.url, gateway.pid),
            "nginx eight": nginx_before(stack, 8),
            "eight": (gateway.url, gateway.pid),
        }
        for number in range(rounds + 1):  # the first round warms up
            for name, (url, pid) in targets.items():
                cost = load(url, stack.key, pid, name)["watched_cpu_us_per_token"]
                if number:
                    costs.setdefault(name, []).append(cost)
    rows = []
    for name, label, bar in (("one", "1 worker x 64 streams", 1.0), ("eight", "8 workers x 8 streams", 1.15)):
        yardstick, cost = statistics.median(costs[f"nginx {name}"]), statistics.median(costs[name])
        rows.append(Row(f"nginx, {label}, no work done", f"{yardstick:.1f} us/token", "1.00 x", "", True))
        ratio = cost / yardstick
        rows.append(Row(f"gateway, {label}", f"{cost:.1f} us/token", f"{ratio:.2f} x", f"<= {bar:g} x", ratio <= bar))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    print_rows("gateway CPU per streamed token", measure(parser.parse_args().rounds))
