"""Runs a batch of script calls on the server that has their keys: the only one, or the right node of a Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import redis.asyncio
from redis.exceptions import MovedError, NoScriptError

from gateway.store.scripts import Script
from workers.redis_cluster import ClusterClient
from workers.redis_link import cluster_of

Call = tuple[str | int | bytes, ...]
"""The arguments of EVALSHA: SHA-1, number of keys (1), key, arguments."""

MENDABLE = (NoScriptError, MovedError)
"""Answers for a call that was not run and can be: the script is to be loaded, or the key is at another node."""


class Runner(Protocol):
    """Runs batches of script calls. Methods raise redis.RedisError and OSError."""

    def lane(self, prefix: str) -> str:
        """Return the lane of a key prefix; calls of one lane may share a batch."""
        ...

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run the calls of one lane. Return one answer or exception for each."""
        ...

    async def mend(self, call: Call, answer: Any) -> None:
        """Repair the cause for which the call was not run, one of MENDABLE."""
        ...


def runner_for(redis: redis.asyncio.Redis, scripts: Sequence[Script]) -> Runner:
    cluster = cluster_of(redis)
    return ServerRunner(redis, scripts) if cluster is None else ClusterRunner(cluster, scripts)


class ServerRunner:
    """Runs calls on a single server, which has all keys."""

    def __init__(self, redis: redis.asyncio.Redis, scripts: Sequence[Script]) -> None:
        self._redis = redis
        self._scripts = scripts
        self._loaded = False

    def lane(self, prefix: str) -> str:
        return ""

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        if not self._loaded:
            await self._load()
        if len(calls) == 1:
            try:
                sha, _, *rest = calls[0]
                return [await self._redis.evalsha(str(sha), 1, *rest)]
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.execute_command("EVALSHA", *call)
            return await pipeline.execute(raise_on_error=False)

    async def mend(self, call: Call, answer: Any) -> None:
        await self._load()

    async def _load(self) -> None:
        async with self._redis.pipeline(transaction=False) as pipeline:
            for script in self._scripts:
                pipeline.script_load(script.source)
            await pipeline.execute()
        self._loaded = True


class ClusterRunner:
    """Runs calls on a Cluster: keys with the same hash tag are on one node, and each key prefix has its own tag."""

    def __init__(self, cluster: ClusterClient, scripts: Sequence[Script]) -> None:
        self._cluster = cluster
        self._scripts = scripts

    def lane(self, prefix: str) -> str:
        return prefix

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        # Not redirected: while a hash slot migrates to another server, no script sees all of its keys.
        return await self._cluster.send([(("EVALSHA", *call), {}) for call in calls], redirect=False)

    async def mend(self, call: Call, answer: Any) -> None:
        if isinstance(answer, MovedError):
            await self._cluster.has_moved(answer)
            return
        node = self._cluster.get_node_from_key(str(call[2]))
        for script in self._scripts:
            await self._cluster.execute_command("SCRIPT LOAD", script.source, target_nodes=node)
