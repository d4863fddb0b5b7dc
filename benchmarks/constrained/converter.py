"""llama.cpp's own way from a JSON Schema to a grammar: a llama-server says which GBNF it made of one."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.reference import llama_server
from tests.support.stack import free_port

STARTUP_S = 60.0
ASK_S = 30.0


class Refused(Exception):
    """It takes the schema for none that it can convert."""


class Converter:
    def __init__(self, url: str) -> None:
        self._url = url

    def gbnf(self, schema: Any) -> str:
        """Raises Refused."""
        body = json.dumps({"prompt": "a", "n_predict": 1, "json_schema": schema}).encode()
        request = urllib.request.Request(f"{self._url}/completion", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ASK_S) as response:
                return str(json.load(response)["generation_settings"]["grammar"])
        except urllib.error.HTTPError as error:
            raise Refused(json.load(error)["error"]["message"]) from None


@contextmanager
def converter(model: Path) -> Iterator[Converter]:
    port = free_port()
    arguments = ["-m", str(model), "--port", str(port), "-t", "1", "-np", "1", "-c", "512", "--no-webui"]
    process = subprocess.Popen([str(llama_server()), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield Converter(url)
    finally:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"llama-server did not answer within {STARTUP_S:g} s")
