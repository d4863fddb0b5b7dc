"""A pytest plugin for llama.cpp's tests: gives callers a key, and waits for a server that is ready.

Nothing else is changed: requests, expected answers and the order of both are those of the tests.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import types
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.upstream.stand_in import ADAPTERS, MODELS_DIR, NO_KEY, model_file

REPORT = "UPSTREAM_REPORT"
"""Variable: the file that gets what became of each case."""

READY_S = 60.0
POLL_S = 0.02
KEY_HEADERS = frozenset({"authorization", "x-api-key"})

_outcomes: dict[str, tuple[str, str]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Change what the tests import before they do."""
    wget = types.ModuleType("wget")
    wget.download = _fetched  # type: ignore[attr-defined]
    sys.modules["wget"] = wget
    _with_key()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Change the server class of the tests' `utils`, which is there by now."""
    utils = sys.modules["utils"]
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    start = utils.ServerProcess.start

    def start_ready(self: Any, *args: Any, **named: Any) -> None:
        if self.model_hf_repo and not self.model_file and model_file(self.model_hf_repo, self.model_hf_file) is None:
            pytest.skip(f"there is no {self.model_hf_repo} here")
        start(self, *args, **named)
        _wait_until_ready(self.make_url("/ready"), self.api_key or NO_KEY)

    utils.ServerProcess.start = start_ready


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember the worst that became of a case."""
    if report.when == "call" or report.outcome != "passed":
        known = _outcomes.get(report.nodeid, ("", ""))[0]
        if known != "failed":
            _outcomes[report.nodeid] = (report.outcome, _last_line(report))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, unless this is one of several processes."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ[REPORT]).write_text(json.dumps(_outcomes))


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return lines[0][1:].strip() if lines else ""


def _wait_until_ready(url: str, key: str) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if requests.get(url, headers={"authorization": f"Bearer {key}"}, timeout=5).status_code == 200:
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"not ready within {READY_S:g} s")


def _with_key() -> None:
    """Send a key with requests that have none. Those that try a wrong one, or None on purpose, stay as they are."""
    request = requests.Session.request

    def keyed(self: requests.Session, method: str, url: str, **named: Any) -> requests.Response:
        headers: Mapping[str, str | None] | None = named.get("headers")
        if headers is None or not KEY_HEADERS & {name.lower() for name in headers}:
            named["headers"] = {**(headers or {}), "Authorization": f"Bearer {NO_KEY}"}
        return request(self, method, url, **named)

    requests.Session.request = keyed  # type: ignore[method-assign, assignment]


def _fetched(url: str, out: str) -> str:
    """Stand for a download: an adapter that is here, or a case that can't be run."""
    name = ADAPTERS.get(url.rsplit("/", 1)[-1])
    if name is None:
        pytest.skip(f"there is no {url.rsplit('/', 1)[-1]} here")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(os.environ[MODELS_DIR]) / name, out)
    return out


def counted(outcomes: Mapping[str, tuple[str, str]]) -> Counter[str]:
    """Return how many cases had each outcome."""
    return Counter(outcome for outcome, _ in outcomes.values())
