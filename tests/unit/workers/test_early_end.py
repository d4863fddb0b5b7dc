"""A process that is told to end while it sits in C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workers.process.signals import ending_at_once
from workers.protocol.exits import Exit

ROOT = Path(__file__).parents[3]

LOADING = """
import ctypes, signal, sys
from workers.process.signals import ending_at_once
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with ending_at_once():
    print("loads", flush=True)
    ctypes.CDLL(None).poll(None, 0, 60_000 if sys.argv[1] == "long" else 100)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
sys.exit(7)
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP, None])
def test_it_ends_at_once_and_only_if_it_is_told(told: signal.Signals | None) -> None:
    command = [sys.executable, "-c", LOADING, "long" if told else "short"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loads\n"
        if told:
            process.send_signal(told)
        assert process.wait(20) == (Exit.OK if told else 7)


def test_handlers_are_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending_at_once():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
