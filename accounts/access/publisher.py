"""Publishes the records of access to Redis, where gateways read them, and repairs them there.

The position in Redis (`keys.ACCESS_POSITION`) says up to which change of which database the records there are. Each
step goes on from it, so that services that publish the same database do not undo each other's steps, and whatever a
service left undone when it died is done by the next. Where the position is lost or is another database's, everything
is compared and put right; so it is now and then anyway.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from accounts.access.mirror import Adoption, Mirror
from accounts.database.database import AWAY
from accounts.protocol.changes import KEY, MAX_CHANGES, STALE, Change, Move, command, delete
from accounts.protocol.records import FIRST_KEY_NAME
from workers.protocol import keys
from workers.redis.link import long_commands_of
from workers.redis.trouble import raise_if_cancelled, remedy_for

log = logging.getLogger(__name__)

LOOK_S = 0.4
"""Seconds between two looks at the database and at Redis: a change of another service is published within these."""
PUBLISH_WAIT_S = 1.5
"""Maximum seconds for which the answer to a change waits until it is published."""
REBUILD_S = 600.0
"""Seconds after which everything is compared, even if nothing seems to be lost."""
STUCK_S = 5.0
"""Seconds without a step after which the rebuilding of another service is taken over, as that has died."""
FOREIGN_S = 60.0
"""Seconds for which the records of another database are left alone after this service has replaced such."""
SCAN_COUNT = 500
FIRST_KEY = f"{KEY}{FIRST_KEY_NAME}"


class Overtaken(Exception):
    """Another service has published meanwhile."""


class Publisher:
    """Publishes the changes of this service, and of others that died before they could."""

    def __init__(self, redis: redis.asyncio.Redis, mirror: Mirror, adoption: Adoption) -> None:
        self._commands = long_commands_of(redis)
        self._mirror = mirror
        self._adoption = adoption
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._published = 0
        """Number of the last change that is known to be in Redis."""
        self._moved = asyncio.Condition()
        self._is_failing = False
        self._rebuilt_at = float("-inf")
        self._has_met_first_key = False
        """Whether Redis had the first key: a gateway that starts after this service writes it when it has rebuilt."""
        self._others: tuple[str, float] = ("", 0.0)
        """The last position of another service that rebuilds, and since when it has been that, by time.monotonic()."""

    def publish(self, number: int) -> bool:
        """Return once changes up to this number are in Redis, or False if that is not so soon. Call it on a thread."""
        if self._loop is None or self._is_failing:
            return False
        waiting = asyncio.run_coroutine_threadsafe(self._wait_for(number), self._loop)
        try:
            return waiting.result(PUBLISH_WAIT_S)
        except concurrent.futures.TimeoutError:
            waiting.cancel()
            return False

    async def run(self) -> None:
        """Publish whatever changes until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            raise_if_cancelled()
            self._wake.clear()
            try:
                await self._publish_all()
                if self._is_failing:
                    log.info("changes of access are published again")
                self._is_failing = False
            except (RedisError, OSError) as error:
                self._failed(f"Redis can't be written ({error}; {remedy_for(error)})")
            except AWAY as error:
                self._failed(f"the database can't be read ({error})")
            except Overtaken:
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()

    async def _wait_for(self, number: int) -> bool:
        self._wake.set()
        async with self._moved:
            await self._moved.wait_for(lambda: self._published >= number or self._is_failing)
        return self._published >= number

    def _failed(self, what: str) -> None:
        if not self._is_failing:
            log.warning("changes of access are not published, as %s; trying again until it works", what)
        self._is_failing = True

    async def _publish_all(self) -> None:
        """Publish up to the last change. Raises Overtaken, RedisError, OSError, one of AWAY."""
        found = _text(await self._ask("GET", keys.ACCESS_POSITION))  # first: the database is never behind it
        database, last = await asyncio.to_thread(self._mirror.position)
        number = _number_in(found, database, last)
        if number is None and self._is_anothers(found, database):
            return
        if number is None or time.monotonic() > self._rebuilt_at + REBUILD_S:
            found, number = await self._rebuild(found, database)
        elif not self._has_met_first_key and await self._is_first_key_new():
            _, last = await asyncio.to_thread(self._mirror.position)
        while number < last:
            changes, upto = await asyncio.to_thread(self._mirror.since, number)
            if any(change.member == FIRST_KEY for change in changes) and await self._is_first_key_new():
                changes, upto = await asyncio.to_thread(self._mirror.since, number)
            found, number = await self._step(changes, found, _position(database, upto)), upto
        await self._moved_to(number)

    def _is_anothers(self, found: str, database: str) -> bool:
        """Return whether a position is to be left alone for now, since another service is at work."""
        if not found.startswith(f"{database} "):
            if not found or time.monotonic() > self._rebuilt_at + FOREIGN_S:
                return False
            if not self._is_failing:
                log.error("services with different databases use this Redis; give all of them the same database_url")
            self._is_failing = True
            return True
        if not found.startswith(f"{database} rebuild "):
            return False
        known, since = self._others
        if known != found:
            self._others = (found, time.monotonic())
            return True
        return time.monotonic() < since + STUCK_S

    async def _rebuild(self, found: str, database: str) -> tuple[str, int]:
        """Compare everything in Redis with the database, and put right what differs. Return the position then."""
        if found and not found.startswith(database):
            log.warning("the records of access in Redis are another database's; they are replaced by this one's")
        step, token = 0, uuid.uuid4().hex[:8]
        found = await self._step((), found, f"{database} rebuild {token} {step}")
        held = await self._held()
        gone: set[str] = set(held)
        doomed = (await asyncio.to_thread(self._adoption.adopt, held)).deleted
        _, number = await asyncio.to_thread(self._mirror.position)
        pages = self._mirror.pages()
        num_changed = 0
        while (page := await asyncio.to_thread(next, pages, None)) is not None:
            gone.difference_update(change.member for change in page)
            changes = self._mirror.differences(page, held)
            for begin in range(0, len(changes), MAX_CHANGES):
                step += 1
                some = changes[begin : begin + MAX_CHANGES]
                found = await self._step(some, found, f"{database} rebuild {token} {step}")
                num_changed += len(some)
        # A key that the database lacks and did not delete is none of ours: its record has no seal, say.
        doomed += [member for member in gone if not member.startswith(KEY)]
        for begin in range(0, len(doomed), MAX_CHANGES):
            step += 1
            some = [delete(member) for member in doomed[begin : begin + MAX_CHANGES]]
            found = await self._step(some, found, f"{database} rebuild {token} {step}")
        found = await self._step((), found, _position(database, number))
        self._rebuilt_at = time.monotonic()
        if num_changed or doomed:
            fields = {"changed": num_changed, "deleted": len(doomed)}
            log.info("the records of access in Redis have been put right", extra={"fields": fields})
        return found, number

    async def _held(self) -> dict[str, bytes]:
        """Return what Redis holds: member (`key:NAME`, `team:NAME` and the like) -> sealed record."""
        found: dict[str, bytes] = {}
        for name, prefix in ((keys.ACCESS_KEYS, KEY), (keys.ACCESS_SUBJECTS, "")):
            cursor = 0
            while True:
                told, some = await self._ask("HSCAN", name, cursor, "COUNT", SCAN_COUNT)
                fields = zip(some[::2], some[1::2], strict=True)
                found.update((prefix + _text(field), value) for field, value in fields)
                if not (cursor := int(told)):
                    break
        return found

    async def _step(self, changes: Sequence[Change], before: str, after: str) -> str:
        """Make the changes and move on to the position `after`. Raises Overtaken if the position is not `before`."""
        answer = await self._ask(*command(changes, Move(before, after)))
        if answer == STALE and _text(await self._ask("GET", keys.ACCESS_POSITION)) != after:
            raise Overtaken  # else the command was sent twice, and done at first
        return after

    async def _is_first_key_new(self) -> bool:
        """Take in the first key that Redis has, since gateways decide which it is."""
        value = await self._ask("HGET", keys.ACCESS_KEYS, FIRST_KEY_NAME)
        if value is None:
            return False
        self._has_met_first_key = True
        return (await asyncio.to_thread(self._adoption.adopt, {FIRST_KEY: value})).num_taken_in > 0

    async def _ask(self, *command: str | int | bytes) -> Any:
        (answer,) = await self._commands.ask(command)
        if isinstance(answer, RedisError):
            raise answer
        return answer

    async def _moved_to(self, number: int) -> None:
        self._published = number
        async with self._moved:
            self._moved.notify_all()


def _position(database: str, number: int) -> str:
    return f"{database} {number}"


def _number_in(position: str, database: str, last: int) -> int | None:
    """Return the number in a position of this database; None: there is no position, or its number is not possible."""
    of, _, number = position.partition(" ")
    return int(number) if of == database and number.isdigit() and int(number) <= last else None


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value or ""
