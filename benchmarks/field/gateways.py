"""Starts each gateway of the field on one core, with the settings that its own documentation gives for production.

All but Paddock stand before the same plain upstream (`benchmarks.plain_upstream`). Paddock speaks the wire of its
workers instead of OpenAI's, so it stands before fake workers, which step at the same pace. Whatever a gateway needs
beside it (Paddock's Redis) is pinned to the same core and counted with it.
"""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.field.install import BIFROST, LITELLM, LLAMA_SWAP, Missing, go_program, litellm
from benchmarks.gateway_cpu import nginx_program, start_nginx
from benchmarks.plain_upstream import AT_ONCE, PACE
from gateway import __version__
from tests.support.go_tools import GoTool, built
from tests.support.stack import Process, Stack, free_port

GATEWAY_CORE, LOAD_CORE = "0", "1"
CORES = {
    "gateway": GATEWAY_CORE,
    "redis": GATEWAY_CORE,
    "nginx": GATEWAY_CORE,
    "fake": LOAD_CORE,
    "upstream": LOAD_CORE,
}
"""The others are started by `taskset`: Go counts its processors when it begins."""
KEY = "sk-field-0123456789abcdef"
STARTUP_S = 180.0
SLOTS = 640
"""Of a fake worker: more than streams are asked of it at once."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that answers. The CPU time and memory of `pids` count, with those of their children."""

    name: str
    version: str
    url: str
    key: str
    pids: tuple[int, ...]
    direct: tuple[str, ...]
    """Flags of `benchmarks.field.crowd`: how to ask what stands behind the gateway."""
    prefix: str = ""
    """Stands before the names of models."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What every gateway of a run has in common."""

    stack: Stack
    upstream: int
    """Port of the plain upstream."""
    models: tuple[str, ...]

    @property
    def upstream_url(self) -> str:
        return f"http://127.0.0.1:{self.upstream}"

    @property
    def direct(self) -> tuple[str, ...]:
        return ("--direct", self.upstream_url)


def start_paddock(run: Arrangement) -> Gateway:
    """Start Paddock as it is by default, with room in its queue for a crowd that comes at once."""
    for model in run.models:
        pace = PACE.search(model)
        flags = ("--step-ms", pace[1] if pace else "20", "--tokens", "100000")
        worker = run.stack.fake_worker(model, *flags, worker_id=f"fake-{model}", slots=SLOTS if pace else 8)
        if model == AT_ONCE:
            asked_directly = worker.url
    process = run.stack.gateway(log_level="info", max_queue=SLOTS, max_queue_per_team=SLOTS)
    run.stack.wait_until_listed(process, *run.models)
    direct = ("--direct", asked_directly, "--worker-secret", run.stack.secret)
    pids = (process.pid, run.stack.redis.pid)
    return Gateway("Paddock", __version__, process.url, run.stack.key, pids, direct)


def start_reference(run: Arrangement) -> Gateway:
    """Start nginx, which hands on bytes and does nothing with them."""
    url, pid = start_nginx(run.stack, "nginx", [run.upstream])
    said = subprocess.run([nginx_program(), "-v"], capture_output=True, text=True).stderr
    return Gateway("nginx", said.strip().rpartition("/")[2], url, "none", (pid,), run.direct)


def start_litellm(run: Arrangement) -> Gateway:
    """Start LiteLLM's proxy: one worker, a master key, no database, no callbacks, no logs below errors."""
    program, port = litellm(), free_port()
    config = run.stack.folder / "litellm.yaml"
    config.write_text(json.dumps(litellm_config(run.upstream_url, run.models)))
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        # Prices of models come with the package: nothing is fetched at the start.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    process = _pinned(run.stack, "litellm", command, environment)
    return wait_for_answer(Gateway("LiteLLM", LITELLM, _url(port), KEY, (process.pid,), run.direct), process)


def litellm_config(upstream_url: str, models: Sequence[str]) -> dict[str, object]:
    """Return the configuration file that LiteLLM's page on production recommends, without what needs a database."""
    return {
        "model_list": [
            {
                "model_name": model,
                "litellm_params": {"model": f"openai/{model}", "api_base": f"{upstream_url}/v1", "api_key": "none"},
            }
            for model in models
        ],
        "general_settings": {"master_key": KEY, "disable_spend_logs": True, "disable_error_logs": True},
        "litellm_settings": {"request_timeout": 600, "set_verbose": False, "json_logs": True},
    }


def start_bifrost(run: Arrangement) -> Gateway:
    """Start Bifrost from its configuration file alone: no store, no logs of requests, sized as its docs say."""
    program, port = go_program(BIFROST), free_port()
    folder = run.stack.folder / "bifrost"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(bifrost_config(run.upstream_url)))
    command = [str(program), "-app-dir", str(folder), "-host", "127.0.0.1", "-port", str(port), "-log-level", "error"]
    process = _pinned(run.stack, "bifrost", command)
    version = _version(BIFROST, str(program))
    return wait_for_answer(Gateway("Bifrost", version, _url(port), KEY, (process.pid,), run.direct, "openai/"), process)


def bifrost_config(upstream_url: str) -> dict[str, object]:
    """Return a configuration for some 1,000 calls at once: a queue and pools of 1.5 times that, as its docs advise."""
    return {
        "client": {"initial_pool_size": 1500, "drop_excess_requests": True, "enable_logging": False},
        "providers": {
            "openai": {
                "keys": [{"name": "fake", "value": "none", "models": ["*"], "weight": 1.0}],
                "network_config": {"base_url": upstream_url, "default_request_timeout_in_seconds": 600},
                "concurrency_and_buffer_size": {"concurrency": 1000, "buffer_size": 1500},
            }
        },
        "config_store": {"enabled": False},
        "logs_store": {"enabled": False},
    }


def start_llama_swap(run: Arrangement) -> Gateway:
    """Start llama-swap with one model that is there already, and keys as the other gateways have."""
    program, port = go_program(LLAMA_SWAP), free_port()
    config = run.stack.folder / "llama-swap.yaml"
    config.write_text(json.dumps(llama_swap_config(run.upstream_url, run.models)))
    command = [str(program), "-config", str(config), "-listen", f"127.0.0.1:{port}"]
    process = _pinned(run.stack, "llama-swap", command)
    version = _version(LLAMA_SWAP, str(program))
    return wait_for_answer(Gateway("llama-swap", version, _url(port), KEY, (process.pid,), run.direct), process)


def llama_swap_config(upstream_url: str, models: Sequence[str]) -> dict[str, object]:
    """Return a configuration whose one model has all names; more than 10 calls at once must be allowed for."""
    model = {
        # It starts the servers of its models itself; the upstream that all gateways share is running.
        "cmd": "sleep 100000",
        "proxy": upstream_url,
        "checkEndpoint": "none",
        "concurrencyLimit": 2 * SLOTS,
        "aliases": list(models[1:]),
    }
    return {"logLevel": "error", "captureBuffer": 0, "apiKeys": [KEY], "models": {models[0]: model}}


STARTS: dict[str, Callable[[Arrangement], Gateway]] = {
    "nginx": start_reference,
    "paddock": start_paddock,
    "litellm": start_litellm,
    "bifrost": start_bifrost,
    "llama-swap": start_llama_swap,
}


TITLES = {
    "litellm": f"LiteLLM {LITELLM}",
    "bifrost": f"Bifrost {BIFROST.version}",
    "llama-swap": f"llama-swap {LLAMA_SWAP.version}",
}
"""Of those that may be missing."""


def _pinned(stack: Stack, name: str, command: list[str], environment: dict[str, str] | None = None) -> Process:
    return stack.spawn(name, ["taskset", "-c", GATEWAY_CORE, *command], environment)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _version(tool: GoTool, program: str) -> str:
    """Return the pinned version where the program was built from it."""
    return tool.version if program == str(built(tool)) else "as on the PATH"


def wait_for_answer(gateway: Gateway, process: Process) -> Gateway:
    """Return the gateway once it has answered a chat. Raises Missing when it ends or never does."""
    said, until = "", time.monotonic() + STARTUP_S
    while time.monotonic() < until:
        if process.popen.poll() is not None:
            lines = process.text().strip().splitlines()
            raise Missing(f"it ended with {process.popen.returncode}: {lines[-1] if lines else 'no word of why'}")
        try:
            ask_once(gateway)
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.read()[:200].decode(errors='replace')}"
        except OSError as error:
            said = str(error)
        else:
            return gateway
        time.sleep(0.2)
    raise Missing(f"it answered no chat within {STARTUP_S:g} s: {said}")


def ask_once(gateway: Gateway) -> None:
    """Ask for a chat of one token. Raises OSError when there is no answer."""
    body = {
        "model": gateway.prefix + AT_ONCE,
        "messages": [{"role": "user", "content": "Say a word."}],
        "max_tokens": 1,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {gateway.key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{gateway.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()
