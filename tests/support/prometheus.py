"""A real Prometheus for tests: the machine's own, or Debian's package, unpacked into a cache outside of the checkout.

Where there is neither a `prometheus` on the PATH nor an apt-get that can fetch the package, the test is skipped and
says why. Nothing is installed: two programs of the package are kept in `$XDG_CACHE_HOME/paddock/prometheus`.

    python -m tests.support.prometheus    fetches what is not there yet, and tells where it is
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support.stack import free_port

PROGRAMS = ("prometheus", "promtool")
FETCH_TIMEOUT_S = 300.0
READY_S = 20.0


class NoPrometheus(Exception):
    """Neither there nor to be fetched; the message says why."""


def program(name: str) -> Path:
    """`prometheus` or `promtool`; skips the test where it can't be had."""
    try:
        return have(name)
    except NoPrometheus as error:
        pytest.skip(str(error))


def have(name: str) -> Path:
    """Raises NoPrometheus."""
    if (found := shutil.which(name)) is not None:
        return Path(found)
    folder = _cache()
    if not (folder / name).is_file():
        _fetch(folder)
    return folder / name


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paddock" / "prometheus"


def _fetch(folder: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NoPrometheus("no prometheus on the PATH, and no apt-get and dpkg to fetch Debian's package with")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all((folder / name).is_file() for name in PROGRAMS):
            return
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            package = _download(Path(scratch))
            _run(["dpkg", "-x", str(package), scratch], Path(scratch))
            for name in PROGRAMS:
                os.replace(Path(scratch, "usr", "bin", name), folder / name)


def _download(scratch: Path) -> Path:
    """A new container has no lists of packages yet."""
    try:
        _run(["apt-get", "download", "-qq", "prometheus"], scratch)
    except NoPrometheus:
        _run(["apt-get", "update", "-qq"], scratch)
        _run(["apt-get", "download", "-qq", "prometheus"], scratch)
    return next(scratch.glob("*.deb"))


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPrometheus(f"prometheus: `{command[0]} {command[1]}`: {error}") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        raise NoPrometheus(f"prometheus could not be fetched: {last}")


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """The text with each key's every occurrence replaced; a key that is not there is an error of the test."""
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the file any more"
        text = text.replace(old, new)
    return text


class Prometheus:
    """One server on a port of its own, with its data in `folder`; starts on `with`.

    `config` makes the text of its file of the port that it listens on.
    """

    def __init__(self, folder: Path, config: Callable[[int], str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "prometheus.log"
        self._file = folder / "prometheus.yml"
        self._file.write_text(config(self.port))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Prometheus:
        command = [
            str(program("prometheus")),
            f"--config.file={self._file}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--log.level=warn",
        ]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + READY_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"prometheus did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str, **parameters: str | float) -> Any:
        """What the API under /api/v1 answers as `data`. Raises RuntimeError with Prometheus' own words."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{parameters}: {error.read().decode(errors='replace')[:500]}") from None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that the expression has now."""
        found: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return found

    def alerts(self, state: str = "firing") -> dict[str, dict[str, Any]]:
        """Alerts of that state by their names; of several with one name, the last."""
        told = self.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in told if alert["state"] == state}

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


if __name__ == "__main__":
    try:
        print(have("prometheus").parent)
    except NoPrometheus as error:
        sys.exit(str(error))
