"""A command that is told to end before it has handlers of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from workers.commands.command import TERMINATED

ROOT = Path(__file__).parents[3]
LOADING = """
import sys, time, types
from workers.commands import command
slow = types.ModuleType("slow")
def Settings(): ...
def __getattr__(name):
    try:
        print("loads", flush=True)
        time.sleep(60)
    finally:
        print("tidy", flush=True)
slow.__getattr__ = __getattr__
sys.modules["slow"] = slow
sys.exit(command.run("worker", command.Command("slow:Settings", "slow:run", "", "worker"), []))
"""


def test_it_ends_in_order_while_it_loads() -> None:
    """As process 1 of a container it would not have heard of it at all."""
    with subprocess.Popen([sys.executable, "-c", LOADING], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loads\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == TERMINATED
        assert process.stdout.read() == b"tidy\n"
