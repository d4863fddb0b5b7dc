"""Ways in which a Redis that runs does not answer the question: each begins and ends on a server with no replicas."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from tests.support.redis_server import RedisServer
from workers.protocol import keys

Trouble = Callable[[RedisServer, str], Iterator[None]]
"""The server, and a model's name; in trouble while it is suspended."""


def busy(server: RedisServer, model: str) -> Iterator[None]:
    """A script of somebody's that never ends."""
    _admin(server).config_set("lua-time-limit", "20")

    def loop() -> None:
        with suppress(redis.RedisError):
            _admin(server, timeout_s=60.0).eval("while true do end", 0)

    thread = threading.Thread(target=loop)
    thread.start()
    yield
    _until(lambda: bool(_admin(server).script_kill()))
    thread.join(10)


def misconf(server: RedisServer, model: str) -> Iterator[None]:
    """Its folder is gone, so a snapshot fails and it takes no writes."""
    admin, folder = _admin(server), server.folder / "gone"
    folder.mkdir()
    admin.config_set("dir", str(folder))
    admin.config_set("save", "3600 1")
    shutil.rmtree(folder)
    with suppress(redis.RedisError):  # it says so at once, or the child does
        admin.bgsave()
    _until(lambda: _info(admin, "persistence")["rdb_last_bgsave_status"] == "err")
    yield
    admin.config_set("dir", str(server.folder))
    admin.config_set("save", "")


def noreplicas(server: RedisServer, model: str) -> Iterator[None]:
    _admin(server).config_set("min-replicas-to-write", "1")
    yield
    _admin(server).config_set("min-replicas-to-write", "0")


def out_of_memory(server: RedisServer, model: str) -> Iterator[None]:
    _admin(server).config_set("maxmemory", "1")
    yield
    _admin(server).config_set("maxmemory", "0")


def readonly(server: RedisServer, model: str) -> Iterator[None]:
    """A replica of a master that is not there."""
    admin = _admin(server)
    admin.execute_command("REPLICAOF", "127.0.0.1", "1")  # type: ignore[no-untyped-call]
    yield
    admin.execute_command("REPLICAOF", "NO", "ONE")  # type: ignore[no-untyped-call]


def masterdown(server: RedisServer, model: str) -> Iterator[None]:
    """The same, and it does not answer from what it had."""
    admin = _admin(server)
    admin.config_set("replica-serve-stale-data", "no")
    for _ in readonly(server, model):
        yield
    admin.config_set("replica-serve-stale-data", "yes")


def loading(server: RedisServer, model: str) -> Iterator[None]:
    """It reads its own data back, slowly: some seconds. Needs DEBUG."""
    admin = _admin(server)
    admin.execute_command("DEBUG", "POPULATE", "400", "pad", "64")  # type: ignore[no-untyped-call]
    admin.config_set("key-load-delay", "5000")
    with suppress(redis.ResponseError):  # older ones can't be told; they say nothing while they read
        admin.config_set("loading-process-events-interval-bytes", "1024")

    def reload() -> None:
        with suppress(redis.RedisError):
            _admin(server, timeout_s=60.0).execute_command("DEBUG", "RELOAD")  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=reload)
    thread.start()
    yield
    thread.join(30)
    admin.config_set("key-load-delay", "0")


def noperm(server: RedisServer, model: str) -> Iterator[None]:
    """Somebody takes the scripts away from everybody."""
    admin = _admin(server)
    users = [name.decode() for name in admin.execute_command("ACL", "USERS")]  # type: ignore[no-untyped-call]
    for user in users:
        admin.execute_command("ACL", "SETUSER", user, "-eval", "-evalsha", "-script")  # type: ignore[no-untyped-call]
    yield
    for user in users:
        given = ("+eval", "+evalsha", "+script")
        admin.execute_command("ACL", "SETUSER", user, *given)  # type: ignore[no-untyped-call]


def noscript(server: RedisServer, model: str) -> Iterator[None]:
    """Somebody flushes the scripts again and again."""
    over = threading.Event()

    def flush() -> None:
        admin = _admin(server)
        while not over.is_set():
            admin.script_flush()

    thread = threading.Thread(target=flush)
    thread.start()
    yield
    over.set()
    thread.join(10)


def wrongtype(server: RedisServer, model: str) -> Iterator[None]:
    """Something of another type lies where the model's line is."""
    _admin(server).set(keys.queue(model), "not a line")
    yield
    _admin(server).delete(keys.queue(model))


def paused(server: RedisServer, model: str) -> Iterator[None]:
    """It does not say a word."""
    server.pause()
    yield
    server.resume()


TROUBLES: dict[str, Trouble] = {
    "BUSY": busy,
    "MISCONF": misconf,
    "NOREPLICAS": noreplicas,
    "OOM": out_of_memory,
    "READONLY": readonly,
    "MASTERDOWN": masterdown,
    "LOADING": loading,
    "NOPERM": noperm,
    "NOSCRIPT": noscript,
    "WRONGTYPE": wrongtype,
    "silence": paused,
}


@contextmanager
def in_trouble(name: str, server: RedisServer, model: str) -> Iterator[None]:
    """Leaves the server as it was."""
    trouble = TROUBLES[name](server, model)
    next(trouble)
    try:
        yield
    finally:
        for _ in trouble:
            raise AssertionError(f"{name} began twice")


def _admin(server: RedisServer, timeout_s: float = 5.0) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(Path(server.socket)), socket_timeout=timeout_s)


def _info(admin: redis.Redis, section: str) -> dict[str, Any]:
    found = admin.info(section)
    assert isinstance(found, dict)
    return found


def _until(done: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(500):
        with suppress(redis.ResponseError):
            if done():
                return
        pause.wait(0.02)
    raise AssertionError("Redis did not do what it was told")
