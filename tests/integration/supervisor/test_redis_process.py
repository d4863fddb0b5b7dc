"""The private Redis, on every server of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from redis.exceptions import NoPermissionError, RedisError

from tests.support.process_limits import full_disk
from tests.support.redis_server import redis_binaries, wheel_redis
from workers.protocol.keys import ROLES, Role
from workers.redis.link import connect
from workers.supervisor.child import Child
from workers.supervisor.fleet import Fleet, NoRedis
from workers.supervisor.output import Console, Output
from workers.supervisor.redis_process import SOCKET_BYTES, PrivateRedis, find_server, socket_path

SECRETS: dict[Role, str] = {"gateway": "of-gateways", "supervisor": "of-gateways", "worker": "of-workers"}


@asynccontextmanager
async def running(private: PrivateRedis, folder: Path) -> AsyncIterator[Child]:
    (folder / "run").mkdir(exist_ok=True)
    child = Child(private.recipe(os.environ), Output("redis", folder, Console("error", print)), final=())
    await private.prepare()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep())
        try:
            yield child
        finally:
            await child.stop()
            private.remove(print)


@pytest.mark.parametrize("server", redis_binaries(), ids=lambda path: path.parent.name)
async def test_answers_on_its_socket_only_and_leaves_nothing(short_folder: Path, server: Path) -> None:
    private = PrivateRedis(short_folder, SECRETS, server)
    fleet = Fleet(private.url("supervisor"))
    async with running(private, short_folder) as child:
        await fleet.wait_until_reachable()
        assert stat.S_IMODE(private.socket.stat().st_mode) == 0o700
        assert child.pid is not None
        sockets = psutil.Process(child.pid).net_connections(kind="inet")
        assert sockets == []
    await fleet.aclose()
    assert list((short_folder / "run").iterdir()) == []


async def test_each_role_has_a_login_and_nobody_gets_in_without(short_folder: Path) -> None:
    private = PrivateRedis(short_folder, SECRETS)
    fleet = Fleet(private.url("supervisor"))
    async with running(private, short_folder):
        await fleet.wait_until_reachable()
        users = short_folder / "run" / "redis.acl"
        assert stat.S_IMODE(users.stat().st_mode) == 0o600
        for role in ROLES:
            assert private.url(role).split(":")[2].partition("@")[0] not in users.read_text(), "its hash only"
        async with connect(private.url("worker"), timeout_s=2, retries=0) as worker:
            with pytest.raises(NoPermissionError):
                await worker.hset("pd:keys", "mine", "{}")
        async with connect(private.url("gateway"), timeout_s=2, retries=0) as gateway:
            await gateway.hset("pd:keys", "mine", "{}")
            with pytest.raises(NoPermissionError):
                await gateway.config_set("maxmemory", 1)
        async with connect(f"unix://{private.socket}", timeout_s=2, retries=0) as nobody:
            with pytest.raises(RedisError, match="authenticated"):
                await nobody.ping()
    await fleet.aclose()


async def test_a_full_disk_leaves_the_users_as_they_are(short_folder: Path) -> None:
    private = PrivateRedis(short_folder, SECRETS)
    users = short_folder / "run" / "redis.acl"
    await private.prepare()
    right = users.read_bytes()
    with full_disk():
        await private.prepare()
        assert users.read_bytes() == right
        users.write_bytes(b"")
        with pytest.raises(OSError, match="File too large"):
            await private.prepare()
    await private.prepare()
    assert users.read_bytes() == right
    assert [path.name for path in (short_folder / "run").iterdir()] == ["redis.acl"]


async def test_a_leftover_with_its_users_is_shut_down(short_folder: Path) -> None:
    """Left by a supervisor that was killed together with what watches over its children."""
    private = PrivateRedis(short_folder, SECRETS)
    (short_folder / "run").mkdir()
    await private.prepare()
    words = [str(private.server), "--port", "0", "--unixsocket", str(private.socket), "--save", ""]
    words += ["--aclfile", str(short_folder / "run" / "redis.acl")]
    leftover = subprocess.Popen(words, cwd=short_folder, stdout=subprocess.DEVNULL)
    fleet = Fleet(private.url("supervisor"))
    await fleet.wait_until_reachable()
    await fleet.aclose()
    await PrivateRedis(short_folder, SECRETS).prepare()
    assert await asyncio.to_thread(leftover.wait, 10) == 0


async def test_a_killed_server_is_back(short_folder: Path) -> None:
    private = PrivateRedis(short_folder, SECRETS)
    fleet = Fleet(private.url("supervisor"))
    async with running(private, short_folder) as child:
        await fleet.wait_until_reachable()
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while child.pid in (None, first):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        await fleet.wait_until_reachable()
    await fleet.aclose()


async def test_its_socket_gets_its_name_again(short_folder: Path) -> None:
    private = PrivateRedis(short_folder, SECRETS)
    async with running(private, short_folder) as child:
        fleet = Fleet(private.url("supervisor"))
        await fleet.wait_until_reachable()
        await fleet.aclose()
        assert private.is_named()
        assert not private.name_again(), "it has it"
        shutil.rmtree(private.socket.parent)
        assert not private.is_named()
        assert private.name_again()
        assert private.is_named()
        fleet = Fleet(private.url("supervisor"))
        await fleet.wait_until_reachable()
        await fleet.aclose()
        assert child.starts == 1
        private.socket.unlink()
        (short_folder / "redis.sock").unlink()
        assert not private.name_again()
        private.socket.touch()
        assert private.is_named()
        await private.prepare()
        assert not private.name_again(), "the name of a server that is gone"
    assert not (short_folder / "redis.sock").exists()


async def test_a_leftover_of_a_killed_predecessor_goes(short_folder: Path) -> None:
    """A server that outlived its supervisor is shut down, and a dead one's socket is removed."""
    private = PrivateRedis(short_folder, SECRETS)
    (short_folder / "run").mkdir()
    words = [str(private.server), "--port", "0", "--unixsocket", str(private.socket), "--save", ""]
    leftover = subprocess.Popen(words, cwd=short_folder, stdout=subprocess.DEVNULL)
    fleet = Fleet(f"unix://{private.socket}")
    await fleet.wait_until_reachable()
    await fleet.aclose()
    await private.prepare()
    assert await asyncio.to_thread(leftover.wait, 10) == 0
    assert not private.socket.exists()
    private.socket.touch()
    await private.prepare()
    assert not private.socket.exists()


def test_a_long_state_folder_gets_a_short_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    path = socket_path(long)
    assert len(os.fsencode(path)) <= SOCKET_BYTES
    assert path == socket_path(long)
    assert path != socket_path(tmp_path / ("y" * 100))
    assert socket_path(Path("/s")) == Path("/s/run/redis.sock")


async def test_a_link_is_no_folder_for_the_short_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it in a folder for all could have it lead to a Redis of theirs, which would be told passwords."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = PrivateRedis(tmp_path / ("x" * 100), SECRETS)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    private.socket.parent.symlink_to(elsewhere)
    with pytest.raises(NoRedis, match="set --state-dir to a shorter path"):
        await private.prepare()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755


async def test_the_short_socket_works_and_its_folder_goes(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    private = PrivateRedis(long, SECRETS)
    fleet = Fleet(private.url("supervisor"))
    async with running(private, long):
        await fleet.wait_until_reachable()
        assert stat.S_IMODE(private.socket.parent.stat().st_mode) == 0o700
    await fleet.aclose()
    assert not private.socket.parent.exists()


async def test_no_redis_is_said_with_the_password_covered() -> None:
    fleet = Fleet("redis://me:hidden@127.0.0.1:9/0")
    with pytest.raises(NoRedis) as caught:
        await fleet.wait_until_reachable(timeout_s=0.0)
    await fleet.aclose()
    assert "redis://me:********@127.0.0.1:9/0" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_the_wheels_server_serves_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    carried = wheel_redis()
    monkeypatch.setenv("PATH", str(tmp_path))
    if carried is None:
        with pytest.raises(NoRedis, match="install one of them"):
            find_server()
    else:
        assert find_server() == carried
    for name, says in (
        ("valkey-server", "Valkey server v=8.0.1 sha=00000000:0"),
        ("redis-server", "Redis server v=6.2.0 sha=00000000:0"),
    ):
        server_that_says(tmp_path / name, says)
        assert find_server() == tmp_path / name


@pytest.mark.parametrize("says", ["Redis server v=6.0.16 sha=00000000:0", "Redis server v=5.0.7", "", "no version"])
def test_a_server_that_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str) -> None:
    carried = wheel_redis()
    monkeypatch.setenv("PATH", str(tmp_path))
    server_that_says(tmp_path / "redis-server", says)
    if carried is None:
        with pytest.raises(NoRedis, match=r"redis-server is too old .*6\.2 is needed"):
            find_server()
    else:
        assert find_server() == carried


def server_that_says(path: Path, version: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
