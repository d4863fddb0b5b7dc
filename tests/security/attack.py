"""What an attack is, and what it is aimed at."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto

import aiohttp

REQUEST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """The address under attack and the keys of both sides. Enter `session` for requests with the attacker's key."""

    url: str
    model: str
    attacker_key: str
    """A key without admin rights, of another team than the victim's."""
    victim_key: str
    worker_url: str = ""
    """A worker's own address; empty: attacks that need it are left out."""
    authority: str = ""
    """The file of those who vouch for the gateway's certificate; empty: this machine knows them."""

    @property
    def is_encrypted(self) -> bool:
        return self.url.startswith("https:")

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncGenerator[aiohttp.ClientSession, None]:
        """Open a session whose requests carry the attacker's key and end after half a minute."""
        headers = {"Authorization": f"Bearer {self.attacker_key}"}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        trusting = ssl.create_default_context(cafile=self.authority or None) if self.is_encrypted else True
        connector = aiohttp.TCPConnector(limit=0, ssl=trusting)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
            yield session

    async def post(self, session: aiohttp.ClientSession, path: str, body: bytes | str | object) -> int:
        """Send one request and drop its answer; returns the status, 0 where the connection broke."""
        text = body if isinstance(body, bytes | str) else json.dumps(body)
        data = io.BytesIO(text.encode() if isinstance(text, str) else text)
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(self.url + path, data=data, headers=headers) as response:
                async for _ in response.content.iter_any():
                    pass
                return response.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0


Strike = Callable[[Target], Awaitable[None]]


class Fleet(Enum):
    """The fleet on which an attack is tried."""

    PLAIN = auto()
    WIDE = auto()
    """Its model has a vocabulary of 150,000 tokens: what is computed grows with that."""
    ENCRYPTED = auto()
    """Its gateway speaks TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One way to take the service from others. `strike` is one round of it; rounds are repeated until time is up."""

    name: str
    """Words with hyphens between them, as the command line takes it."""
    about: str
    """One sentence: what is sent, and what it did before it was bounded."""
    strike: Strike
    at_once: int = 1
    """Rounds that run side by side."""
    pause_s: float = 0.05
    """Between two rounds of one attacker."""
    needs_worker: bool = False
    """It is aimed at a worker's own port."""
    fleet: Fleet = Fleet.PLAIN
    short_s: float = 0.8
    """How long it goes on where it is one of many: long enough for a round of it."""


async def carry_out(attack: Attack, target: Target, seconds: float) -> int:
    """Repeat the attack for that long; returns the number of rounds begun. Whatever a round raises ends that round."""
    rounds = 0

    async def repeat() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, EOFError):
                await attack.strike(target)
            await asyncio.sleep(attack.pause_s)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for _ in range(attack.at_once):
                group.create_task(repeat())
    return rounds
