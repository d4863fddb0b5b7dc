"""Elects the machine that plans for all: a lease in Redis, and a number (fence) that grows with each election.

The lease is timed by Redis. Its holder counts from before it asked, by a clock that goes on while a process is stopped,
and plans no more a second before the lease can end. A holder that was stopped just then may still write: its orders
have a lower number than those of the next one, which machines have heard of, and are not followed.

The lease and the number are taken in one transaction: so the number of a later holder is higher. A Redis that has lost
its data counts from 1 again; the number is raised above what machines have heard before the lease is taken.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from workers.protocol import keys

LEASE_S = 5.0
"""Lifetime of the lease unless it is renewed: so long nobody plans when a planner dies."""
MARGIN_S = 1.0
"""Seconds before the end of the lease from which its holder does not plan."""


@dataclass(slots=True)
class Lease:
    """One machine's view of the lease. Methods that ask Redis raise redis.RedisError, OSError."""

    machine: str
    clock: Callable[[], float] = time.monotonic
    fence: int = 0
    """This machine's number; 0: it does not hold the lease."""
    holder: str = ""
    """The machine that held the lease when it was last read."""
    seen: int = 0
    """The highest number that this machine knows of."""
    is_new_redis: bool = False
    """Whether Redis had lost its data when this machine was last elected: others have to tell all again."""
    _token: str = ""
    _until: float = field(default=float("-inf"))

    def holds(self) -> bool:
        """Return whether this machine may plan now."""
        return bool(self.fence) and self.clock() < self._until - MARGIN_S

    def ask(self, pipeline: Any) -> int:
        """Add the commands that renew and read the lease; return their number. The answers are for `note`."""
        if not self.fence:
            pipeline.get(keys.PLANNER)
            return 1
        # Whoever has the lease now gets it for longer; whether that is this machine, the second answer tells.
        pipeline.pexpire(keys.PLANNER, round(LEASE_S * 1000))
        pipeline.get(keys.PLANNER)
        return 2

    def note(self, answers: list[Any], asked_at: float) -> None:
        """Take in the answers to `ask`. `asked_at`: by `clock`, before it was sent."""
        value = answers[-1]
        token = value.decode(errors="replace") if isinstance(value, bytes) else ""
        self.holder = token.partition(" ")[0]
        if self.fence and token == self._token:
            self._until = asked_at + LEASE_S
        else:
            self.fence = 0

    async def contend(self, client: redis.asyncio.Redis) -> None:
        """Take the lease if nobody has it, or if this machine's supervisor had it before it was started anew. Raises
        redis.RedisError, OSError."""
        if self.fence or self.holder not in ("", self.machine):
            return
        token, asked_at = f"{self.machine} {secrets.token_hex(8)}", self.clock()
        async with client.pipeline(transaction=True) as pipeline:
            if self.holder:
                pipeline.delete(keys.PLANNER)
            pipeline.incrby(keys.PLANNER_FENCE, 1)
            pipeline.set(keys.PLANNER, token, nx=True, px=round(LEASE_S * 1000))
            *_, number, has_won = await pipeline.execute()
        self.holder = ""
        if has_won and number <= self.seen:
            self.is_new_redis = True
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.incrby(keys.PLANNER_FENCE, self.seen)
                pipeline.delete(keys.PLANNER)
                await pipeline.execute()
        elif has_won:
            self.fence, self.holder, self.seen = number, self.machine, number
            self._token, self._until = token, asked_at + LEASE_S

    def see(self, fence: int) -> None:
        """Note that a machine has heard of this number. If it is higher than this machine's own, others plan."""
        self.seen = max(self.seen, fence)
        if self.fence and fence > self.fence:
            self.fence, self._until = 0, float("-inf")

    async def give_back(self, client: redis.asyncio.Redis) -> None:
        """Let another machine plan at once. Raises redis.RedisError, OSError."""
        if self.holds():
            self.fence = 0
            await client.delete(keys.PLANNER)
