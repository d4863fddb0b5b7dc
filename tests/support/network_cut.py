"""A part of the network that can be cut: a namespace of its own, joined by a pair of virtual Ethernet devices.

A process inside loses its machine's power, as far as anybody can see: no packet comes from it any more, no FIN either.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Island:
    """Processes started with `command` before theirs are on it."""

    name: str
    here: str
    """Address of this machine, as the island sees it."""
    there: str
    """Address of the island."""

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        _ip("link", "set", f"{self.name}h", "down")


def can_make_islands() -> bool:
    """Whether this machine lets tests make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"pdtry{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    made = subprocess.run(["ip", "link", "add", f"{name}h", "type", "veth"], capture_output=True, check=False)
    if not made.returncode:
        subprocess.run(["ip", "link", "del", f"{name}h"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return not made.returncode


@contextmanager
def island() -> Iterator[Island]:
    """Made and taken away again. Not to be asked for where `can_make_islands` says no."""
    name, net = f"pd{os.getpid() % 100_000}", random.randrange(1, 250)
    place = Island(name, f"10.213.{net}.1", f"10.213.{net}.2")
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}n")
        _ip("link", "set", f"{name}n", "netns", name)
        _ip("addr", "add", f"{place.here}/30", "dev", f"{name}h")
        _ip("link", "set", f"{name}h", "up")
        _ip("-n", name, "addr", "add", f"{place.there}/30", "dev", f"{name}n")
        _ip("-n", name, "link", "set", f"{name}n", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield place
    finally:
        subprocess.run(["ip", "link", "del", f"{name}h"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
