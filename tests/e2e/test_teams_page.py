"""docs/teams.md, "By command", as readers meet it: each of its commands is run, in order, as it stands there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program import Program
from tests.support.stack import ROOT, Stack

PAGE = (ROOT / "docs" / "teams.md").read_text()
SECTION = PAGE.partition("\n## By command\n")[2].partition("\n## ")[0]
ADDRESS = "https://llm.example.com"
COMMANDS = [line.partition("#")[0].strip() for line in re.findall(r"^    ((?:paddock|source) .*)$", SECTION, re.M)]
TESTED_ELSEWHERE = (f"paddock login --url {ADDRESS}", "source <(paddock completion bash)")
"""By tests/e2e/test_login.py, as a person has to go on with it, and by tests/unit/gateway/test_completion.py."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.fake_worker("small", "--step-ms", "2", "--tokens", "8")
        running.gateway(accounts_url=running.accounts().url)
        yield running


def test_the_walk_says_what_the_page_says(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [declared] = re.findall(r"^```yaml\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    (tmp_path / "key-file").write_text(stack.key + "\n")
    (tmp_path / "access.yaml").write_text(declared)
    monkeypatch.chdir(tmp_path)
    paddock = Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(tmp_path / "own")})
    told = {command: run(paddock, stack, command) for command in COMMANDS if command not in TESTED_ELSEWHERE}
    assert set(COMMANDS) - told.keys() == set(TESTED_ELSEWHERE)

    def of(begin: str) -> str:
        [found] = [text for command, text in told.items() if command.startswith(begin)]
        return found

    assert "admin in the team default" in of(f"paddock login --url {ADDRESS} --key -")
    for name in ("--team red --name ci", "--team red --name web", "--team blue --name lab"):
        assert re.search(r"^key +pk-\S{49}$", of(f"paddock keys create {name}"), re.MULTILINE)
    assert {"ci", "web", "lab"} <= set(re.findall(r"^(\S+)", of("paddock keys list"), re.MULTILINE))
    assert "TOKENS/DAY" in of("paddock limits list")
    assert "100.00" in of("paddock budgets list")
    assert (tmp_path / "usage.parquet").read_bytes().startswith(b"PAR1")
    assert "works until" in of("paddock keys rotate ci")
    assert "blocked" in of("paddock keys block web")
    assert "+ team green" in of("paddock apply -f access.yaml --dry-run")
    assert "+ key nightly" in told["paddock apply -f access.yaml"]
    assert of("paddock apply -f access.yaml --prune") == "All is as the file declares it.\n"
    assert "The audit is whole" in of("paddock audit verify")
    assert "is removed" in of("paddock logout")


def run(paddock: Program, stack: Stack, command: str) -> str:
    """What a command prints, with the stack's address in place of the page's. The database has its tables soon."""
    line, _, file = command.replace(ADDRESS, stack.gateways[0].url).partition(" < ")
    stdin = Path(file).read_text() if file else ""
    ends = time.monotonic() + 20
    while (done := paddock.run(line.removeprefix("paddock "), stdin)).code == 68 and time.monotonic() < ends:
        time.sleep(0.1)
    assert (done.code, done.err) == (0, ""), command
    return done.out
