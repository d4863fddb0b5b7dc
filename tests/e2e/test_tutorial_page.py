"""docs/tutorial.md as a new user meets it: all that it has one type is run, in order, on a `paddock up`. So are the
first commands of the README, and its example of a program."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.settings import known_settings
from tests.support.stack import ROOT, free_port
from workers.sources import flag

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
START, OWN_MODEL = BLOCKS[0], BLOCKS[-1]
PRINTED = re.findall(r"^```\n(  address .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
README = (ROOT / "README.md").read_text()
READY_S = USAGE_S = 60.0

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")


@dataclass(frozen=True, slots=True)
class Terminal:
    """The second terminal, in which everything is typed."""

    environment: dict[str, str]
    url: str

    def type(self, text: str, **variables: str) -> str:
        """Return what the commands print, with this Paddock's address in place of the page's."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text.replace("http://127.0.0.1:8080", self.url)],
            env=self.environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Terminal]]:
    """What `make up` prints until it is ready, and a terminal beside it."""
    folder = tmp_path_factory.mktemp("tutorial")
    # As `make up` leaves it in .venv/bin, for these sources.
    program = folder / "paddock"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gateway.cli "$@"\n')
    program.chmod(0o755)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PADDOCK_")} | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PADDOCK_STATE_DIR": str(folder / "state"),
        "PADDOCK_PORT": str(port),
    }
    log = folder / "first-terminal"
    with log.open("wb") as out:
        running = subprocess.Popen([str(program), "up"], env=environment, stdout=out, stderr=out, cwd=ROOT)
    deadline = time.monotonic() + READY_S
    while "Ctrl-C" not in log.read_text() and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "Ctrl-C" in log.read_text(), log.read_text()
    yield log.read_text(), Terminal(environment, f"http://127.0.0.1:{port}")
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 0, log.read_text()


def test_it_starts_as_the_page_says(started: tuple[str, Terminal]) -> None:
    printed, terminal = started
    assert START == "make up\n"
    assert re.search(r"^up: .*\n\t@exec \$\(BIN\)/paddock up", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.escape(PRINTED.rstrip()).replace(re.escape("http://127.0.0.1:8080"), terminal.url)
    assert re.search(re.sub(r"\\\.\\\.\\\.", r"\\S+", shown), printed), printed


def test_all_that_is_typed_does_what_the_page_says(started: tuple[str, Terminal]) -> None:
    printed, terminal = started
    first = printed.partition("API key  ")[2].split()[0]
    settings, *blocks = BLOCKS[1:-1]
    assert settings.endswith("export PADDOCK_API_KEY=pk-...\n")
    told: list[str] = []
    ann = ""
    for block in blocks:
        ann = next(iter(re.findall(r"pk-\S{49}", told[-1])), ann) if told else ann
        told.append(terminal.type(block.replace("pk-...", ann), PADDOCK_API_KEY=first))
        if "paddock usage" in block:
            told[-1] = with_usage_of("ann", terminal, block, first)
    called, streamed, chatted, status, made, said, used = told
    assert "demo model" in called
    assert streamed.rstrip().endswith("data: [DONE]")
    assert "fox" in chatted
    assert re.search(r"^paddock-demo +loaded", status, re.MULTILINE)
    assert "60 requests per minute" in made
    assert "shown this once" in made
    assert "demo model" in said
    assert re.search(r"^friends +ann +1 ", used, re.MULTILINE), used
    assert re.search(r"^default +first ", used, re.MULTILINE), used


def with_usage_of(name: str, terminal: Terminal, block: str, key: str) -> str:
    """A call is in the ledger some seconds after its end."""
    deadline = time.monotonic() + USAGE_S
    while name not in (text := terminal.type(block, PADDOCK_API_KEY=key)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return text


def test_the_console_is_at_the_address(started: tuple[str, Terminal]) -> None:
    _, terminal = started
    assert "<http://127.0.0.1:8080/>" in PAGE
    assert "<title>Paddock" in terminal.type("curl -sSL http://127.0.0.1:8080/")


@pytest.mark.parametrize("command", OWN_MODEL.splitlines())
def test_the_flags_for_a_model_of_ones_own_are_those_that_there_are(command: str) -> None:
    assert command.startswith(".venv/bin/paddock up ")
    flags = re.findall(r"--[a-z-]+", command)
    assert flags
    assert set(flags) <= {flag(name) for name in known_settings()}


def test_the_picture_is_there() -> None:
    for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE):
        assert Path(ROOT / "docs" / picture).is_file()


def test_the_readme_begins_with_two_commands_that_work(started: tuple[str, Terminal]) -> None:
    """The first is that of the tutorial; the second talks to what it has started."""
    _, terminal = started
    start, chat, *own = [
        line.partition("#")[0].strip() for line in re.findall(r"^    ((?:make|\.venv).*)$", README, re.M)
    ]
    assert (start, chat) == ("make up", ".venv/bin/paddock chat")
    assert "demo model" in terminal.type(f"echo 'Who are you?' | {chat.removeprefix('.venv/bin/')}")
    flags = {word for command in own for word in re.findall(r"--[a-z-]+", command)}
    assert flags - {flag(name) for name in known_settings()} == set()


def test_the_program_of_the_readme_prints_an_answer(started: tuple[str, Terminal]) -> None:
    printed, terminal = started
    [program] = re.findall(r"^    from openai .*?\n\n", README, re.MULTILINE | re.DOTALL)
    first = printed.partition("API key  ")[2].split()[0]
    text = textwrap.dedent(program).replace("http://127.0.0.1:8080", terminal.url).replace("<the printed key>", first)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert "demo model" in done.stdout, done.stderr


def test_the_readme_opens_with_the_console() -> None:
    assert README.split("\n\n")[2].startswith("![The console")
