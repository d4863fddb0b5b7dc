"""A process that is started without standard input, output or error."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SAYS = """
import os, socket, sys
from workers.process import standard_streams
standard_streams.complete()
standard_streams.complete()
print("printed")
print("printed", file=sys.stderr, flush=True)
read = sys.stdin.read()
with open(sys.argv[1], "w") as told, socket.socket() as listener:
    told.write(f"{os.get_inheritable(0)} {os.get_inheritable(1)} {os.get_inheritable(2)} {read!r} ")
    told.write(str(min(told.fileno(), listener.fileno()) > 2))
"""


def _close(numbers: tuple[int, ...]) -> None:
    for number in numbers:
        os.close(number)


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_what_is_opened_later_takes_no_number_of_theirs(tmp_path: Path, closed: tuple[int, ...]) -> None:
    told = tmp_path / "told"
    ended = subprocess.run(
        [sys.executable, "-c", SAYS, str(told)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        preexec_fn=partial(_close, closed),
        check=False,
        timeout=20,
    )
    assert ended.returncode == 0, ended.stderr
    assert told.read_text() == "True True True '' True"
    assert ended.stdout == (b"" if 1 in closed else b"printed\n")
    assert ended.stderr == (b"" if 2 in closed else b"printed\n")


@pytest.mark.parametrize("module", ["gateway.cli", "workers.cli"])
def test_a_command_ends_as_with_them(module: str) -> None:
    """Its last act is to write out what it printed; that of a closed output was an AttributeError."""
    ended = subprocess.run(
        [sys.executable, "-m", module, "no-such-command"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=partial(_close, (0, 1)),
        check=False,
        timeout=20,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"paddock: no-such-command: no such command")
    assert ended.stderr.count(b"\n") == 1
