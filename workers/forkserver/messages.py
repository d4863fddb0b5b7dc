"""The message by which a supervisor tells a forked process what it is to be, and how a whole message is read.

It goes over a socket that only these two have, so that the process that forks never knows a worker's secrets.
"""

from __future__ import annotations

import socket

import msgspec

DESCRIPTOR = "PADDOCK_FORK_SOCKET"
"""Variable with the number of the descriptor on which the process that forks gets its orders."""

ORDER = b"w"
"""The message that asks for a process. With it comes a descriptor: the private socket."""

OUTPUT = b"o"
"""The first message over the private socket, before the process's identity. With it comes a descriptor: where the
process writes output."""

PID_BYTES = 16
"""Bytes of a process id in decimal, padded with spaces: the first that a forked process sends."""

CHUNK_BYTES = 64 << 10


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a forked process: a worker's."""

    name: str
    """Name of the worker, which `ps -o comm` shows."""
    environment: dict[str, str]


class HelperOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a helper process: a Python module, run as `python -m MODULE ARGS` would run it."""

    module: str
    args: tuple[str, ...]
    variables: dict[str, str]
    descriptors: tuple[int, ...]
    """Numbers that the descriptors sent along get, in their order."""
    cores: tuple[int, ...]
    core_bytes: tuple[int, int]
    """Soft and hard limit of a core file's size."""
    oom_score: int
    """With cores and limit, what a process that the worker had started would have inherited."""


def read_to_end(source: socket.socket) -> bytes:
    """Return all bytes until the other side sends no more."""
    parts: list[bytes] = []
    while part := source.recv(CHUNK_BYTES):
        parts.append(part)
    return b"".join(parts)
