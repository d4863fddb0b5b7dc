"""A replica takes over that has missed what was written last: it has leases that are over, and lacks others."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis

from tests.fault.scene import SHORT, Scene, staged
from tests.support.redis_server import RedisServer
from tests.support.stack import Stack, free_port
from tests.support.waiting import until
from tests.support.wire import Wire, open_wire

NOBODY = ("127.0.0.1", "1")


@asynccontextmanager
async def replicated() -> AsyncIterator[tuple[Stack, RedisServer, Wire]]:
    """A stack on a master with a replica, reached by a wire that can lead to the replica."""
    master = RedisServer(port=free_port())
    replica = RedisServer(
        port=free_port(), options=("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0")
    )
    with master, replica:
        async with open_wire(master.port) as wire:
            with Stack(site=f"redis://127.0.0.1:{wire.port}", redis=master) as stack:
                yield stack, replica, wire


def tell(server: RedisServer, *command: str) -> object:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        return client.execute_command(*command)


def follows(server: RedisServer) -> bool:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        return str(client.info("replication").get("master_link_status")) == "up"


@pytest.mark.long
async def test_with_lost_writes() -> None:
    async with replicated() as (stack, replica, wire):
        await until(lambda: follows(replica), 10, "the replica follows")
        async with staged(stack) as scene:
            over = [scene.book.ask(scene.other, phase, SHORT) for phase in ("streaming", "queued", "granted")]
            await asyncio.gather(*(record.has_begun() for record in over))
            await asyncio.sleep(0.2)
            tell(replica, "REPLICAOF", *NOBODY)
            stale = leases_in(replica)
            await scene.ends(over)
            await scene.all_phases()
            new = leases_in(stack.redis)
            assert len(stale) == 3
            assert len(new) >= 7
            assert not stale & new
            scene.redis_down = True
            await take_over(scene, replica, wire)
            await scene.ends(scene.book.records)
            assert scene.book.endings() == {"answered": len(scene.book.records) - 1, "left": 1}
            scene.redis_down = False
            await scene.report(f"failover with {len(stale)} stale leases, {len(new)} lost", 8.0)


async def take_over(scene: Scene, replica: RedisServer, wire: Wire) -> None:
    """The master dies, and the replica is where it was."""
    scene.stack.redis.kill()
    tell(replica, "REPLICAOF", "NO", "ONE")
    wire.target = ("127.0.0.1", replica.port)
    wire.cut()
    scene.stack.redis = replica
    scene.doomed.signal(signal.SIGCONT)


def leases_in(server: RedisServer) -> set[str]:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        return {
            f"{name.decode()} {id.decode()}"
            for name in client.keys("pd:{*}:calls")
            for id, record in client.hgetall(name).items()
            if record.startswith(b"L ")
        }
