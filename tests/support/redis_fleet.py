"""Redis as a site runs it, on loopback: a master with a replica and Sentinels, or a Cluster of masters."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tests.support.redis_server import RedisServer
from tests.support.stack import free_port

SETTLE_S = 15.0
SLOTS = 16384
SERVICE = "paddock-test"


def ask(server: RedisServer, *command: Any) -> Any:
    """One command over the server's socket."""
    with redis.Redis(unix_socket_path=str(server.socket), socket_timeout=2.0) as client:
        return client.execute_command(*command)


def settled(done: Callable[[], object], what: str) -> None:
    """Returns when it is; raises RuntimeError after a while."""
    deadline = time.monotonic() + SETTLE_S
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {SETTLE_S:g} s: {what}")
        time.sleep(0.02)


class _Servers:
    """Started on `with`, closed together."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._start(opened)
            self._open = opened.pop_all()
        return self

    def _start(self, opened: ExitStack) -> None:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


class SentinelFleet(_Servers):
    """One master, one replica, and Sentinels that make the replica master half a second after the master is gone."""

    def __init__(self, binary: Path | None = None, *, sentinels: int = 1, password: str = "") -> None:
        super().__init__()
        common: tuple[str, ...] = ("--repl-diskless-sync-delay", "0")
        common += ("--requirepass", password, "--masterauth", password) if password else ()
        self.first = RedisServer(binary, port=free_port(), options=common)
        follow = ("--replicaof", "127.0.0.1", str(self.first.port))
        self.second = RedisServer(binary, port=free_port(), options=(*common, *follow))
        quorum = sentinels // 2 + 1
        lines = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.first.port} {quorum}",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 500",
        ]
        lines += [f"sentinel auth-pass {SERVICE} {password}"] if password else []
        config = "\n".join(lines) + "\n"
        self.sentinels = [
            RedisServer(binary, port=free_port(), options=("--sentinel",), config=config) for _ in range(sentinels)
        ]
        self._password = password

    def _start(self, opened: ExitStack) -> None:
        for server in (self.first, self.second):
            opened.enter_context(server)
        # Sentinels ask for replicas as they start, and then every ten seconds.
        settled(lambda: b"master_link_status:up" in self._replication(), "the replica follows the master")
        for server in self.sentinels:
            opened.enter_context(server)
        settled(self._knows_replica, "the Sentinels know the replica")

    @property
    def url(self) -> str:
        login = f":{self._password}@" if self._password else ""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{login}{hosts}/{SERVICE}"

    def master_port(self) -> int:
        """As the first Sentinel has it."""
        return int(ask(self.sentinels[0], "SENTINEL", "get-master-addr-by-name", SERVICE)[1])

    def wait_for_failover(self) -> None:
        """Returns when the second server is the master."""
        settled(lambda: self.master_port() == self.second.port, "the replica is the master")

    def _knows_replica(self) -> bool:
        for sentinel in self.sentinels:
            known = ask(sentinel, "SENTINEL", "master", SERVICE)
            facts = known if isinstance(known, dict) else dict(zip(known[::2], known[1::2], strict=True))
            facts = {_text(name): _text(value) for name, value in facts.items()}
            if int(facts["num-slaves"]) < 1 or int(facts["num-other-sentinels"]) < len(self.sentinels) - 1:
                return False
        return True

    def _replication(self) -> bytes:
        login = {"password": self._password} if self._password else {}
        with redis.Redis(unix_socket_path=str(self.second.socket), **login) as client:  # type: ignore[arg-type]
            client.set_response_callback("INFO", lambda answer, **_: answer)
            return bytes(client.execute_command("INFO", "replication"))


class ClusterFleet(_Servers):
    """Three masters with a third of the slots each; a master that is gone takes its own slots away only."""

    def __init__(self, binary: Path | None = None, *, masters: int = 3) -> None:
        super().__init__()
        self._moved: dict[int, RedisServer] = {}
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-require-full-coverage",
            "no",
            "--cluster-node-timeout",
            "2000",
        )
        self.masters = [RedisServer(binary, port=free_cluster_port(), options=options) for _ in range(masters)]

    def _start(self, opened: ExitStack) -> None:
        share = -(-SLOTS // len(self.masters))
        for number, server in enumerate(self.masters):
            opened.enter_context(server)
            ask(server, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            slots = range(number * share, min(SLOTS, (number + 1) * share))
            ask(server, "CLUSTER", "ADDSLOTS", *slots)
        for server in self.masters[1:]:
            ask(server, "CLUSTER", "MEET", "127.0.0.1", self.masters[0].port)
        settled(lambda: all(self._knows_all(server) for server in self.masters), "the Cluster has met")

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.masters)}"

    def owner(self, key: str) -> RedisServer:
        """Who has the key's slot."""
        slot = int(ask(self.masters[0], "CLUSTER", "KEYSLOT", key))
        return self._moved.get(slot) or self.masters[slot // -(-SLOTS // len(self.masters))]

    def give_slot(self, key: str, to: RedisServer) -> None:
        """The key's slot, and all that is in it, to another master, at once as far as clients can see."""
        slot, source = ask(self.masters[0], "CLUSTER", "KEYSLOT", key), self.owner(key)
        ask(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(to))
        while names := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            ask(source, "MIGRATE", "127.0.0.1", to.port, "", 0, 2000, "KEYS", *names)
        for server in (to, source, *self.masters):
            ask(server, "CLUSTER", "SETSLOT", slot, "NODE", self._id(to))
        self._moved[slot] = to

    def _id(self, server: RedisServer) -> str:
        return _text(ask(server, "CLUSTER", "MYID"))

    def _knows_all(self, server: RedisServer) -> bool:
        known = ask(server, "CLUSTER", "INFO")
        text = _text(known) if isinstance(known, bytes) else "\n".join(f"{name}:{known[name]}" for name in known)
        facts = dict(line.split(":", 1) for line in text.split())
        return facts["cluster_slots_ok"] == str(SLOTS) and facts["cluster_size"] == str(len(self.masters))


def free_cluster_port() -> int:
    """A free port whose bus port, 10000 above, is free too, and none that the system gives to connections."""
    while True:
        port = free_port()
        if port < 22_000:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port + 10_000))
                return port


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
