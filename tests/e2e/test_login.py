"""`paddock login` by a browser, and by the code of a device; and what the key is good for until `paddock logout`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program import Program
from tests.support.sign_on_front import ANN, EVE, SignOnFront, sign_on_front
from tests.support.stack import ROOT
from workers.protocol.exits import Exit


@pytest.fixture(scope="module")
def front() -> Iterator[SignOnFront]:
    with sign_on_front() as running:
        yield running


@pytest.fixture(autouse=True)
def as_usual(front: SignOnFront) -> None:
    front.provider.person, front.provider.refuses = dict(ANN), False


def environment(state_dir: Path) -> dict[str, str]:
    """Of a person's machine, whose browser is one that signs in by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")}
    browser = f"{sys.executable} -m tests.support.browser %s"
    return clean | {"BROWSER": browser, "PYTHONPATH": str(ROOT), "PADDOCK_STATE_DIR": str(state_dir)}


def log_in(front: SignOnFront, state_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "login", "--url", front.url, *flags]
    return subprocess.run(command, env=environment(state_dir), capture_output=True, text=True, timeout=60)


def test_a_person_signs_in_by_the_browser_and_out(
    front: SignOnFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = log_in(front, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"You are ann@example\.com: user in the team red\.\nThe key for {re.escape(front.url)} is kept in "
        r"\S+/logins\.json until \d{4}-\d\d-\d\d \d\d:\d\dZ\.\n",
        done.stdout,
    )
    assert f"{front.url}/auth/login?" in done.stderr, "for a browser that does not open"
    assert (tmp_path / "logins.json").stat().st_mode & 0o777 == 0o600
    paddock = Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(tmp_path)})
    assert paddock.ok("users list").rows[1][0] == "ann@example.com"
    [key] = re.findall(r'"key":"(pk-[^"]+)"', (tmp_path / "logins.json").read_text())
    assert front.call(key).status_code == 200
    assert paddock.ok("logout").out == f"The key for {front.url} is removed. Its session has ended.\n"
    assert key not in (tmp_path / "logins.json").read_text()


def test_a_person_who_refuses_or_has_no_team_is_told(front: SignOnFront, tmp_path: Path) -> None:
    front.provider.refuses = True
    refused = log_in(front, tmp_path)
    assert (refused.returncode, "access_denied" in refused.stderr) == (Exit.USAGE, True)
    front.provider.refuses, front.provider.person = False, dict(EVE)
    teamless = log_in(front, tmp_path)
    assert teamless.returncode != 0
    assert "No team is given to eve@example.com" in teamless.stderr
    assert not (tmp_path / "logins.json").exists()


def test_a_person_signs_in_by_the_code_of_a_device(front: SignOnFront, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "login", "--url", front.url, "--device"]
    with subprocess.Popen(
        command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        told = running.stderr.readline()
        [address, code] = re.findall(r"^Open (\S+) on any device, and enter the code (\S+)$", told)[0]
        assert address == f"{front.provider.issuer}/activate"
        front.provider.approve(code)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    assert out.startswith("You are ann@example.com: user in the team red.\n")


def test_without_single_sign_on_another_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with sign_on_front(others=None) as front:
        paddock = Program(monkeypatch, capfd, {"PADDOCK_STATE_DIR": str(tmp_path), "BROWSER": "true"})
        assert "paddock login --key -" in paddock.refused(f"login --url {front.url}", Exit.USAGE)
