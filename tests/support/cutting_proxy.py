"""A connection that breaks: a TCP proxy that hands on so many bytes of an answer, then drops it.

Each connection goes to the next of its targets in turn.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from urllib.parse import urlsplit

CHUNK_BYTES = 65536
NUM_THREADS = 32


@dataclass(slots=True)
class CuttingProxy:
    url: str
    num_connections: int = 0
    cut_after: int | None = None
    """Bytes of each answer that get through; None: all."""


@contextmanager
def cutting_proxy(targets: Sequence[str]) -> Iterator[CuttingProxy]:
    """`targets`: URLs of the servers behind it."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(NUM_THREADS) as threads:
        proxy = CuttingProxy(f"http://127.0.0.1:{listening.getsockname()[1]}")
        threads.submit(_accept, proxy, listening, targets, threads)
        try:
            yield proxy
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def _accept(proxy: CuttingProxy, listening: socket.socket, targets: Sequence[str], threads: ThreadPoolExecutor) -> None:
    for target in cycle(targets):
        try:
            client, _ = listening.accept()
        except OSError:
            return
        proxy.num_connections += 1
        threads.submit(_serve, client, target, proxy.cut_after, threads)


def _serve(client: socket.socket, target: str, cut_after: int | None, threads: ThreadPoolExecutor) -> None:
    url = urlsplit(target)
    with client, socket.create_connection((url.hostname, url.port)) as server:
        asking = threads.submit(_hand_on, client, server, None)
        _hand_on(server, client, cut_after)
        asking.result()


def _hand_on(source: socket.socket, sink: socket.socket, most: int | None) -> None:
    """Until either end closes or `most` bytes have gone through; then both are shut."""
    num_bytes = 0
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            taken = data if most is None else data[: most - num_bytes]
            num_bytes += len(taken)
            sink.sendall(taken)
            if num_bytes == most:
                break
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
