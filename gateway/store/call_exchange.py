"""Asks all gateways about the calls that each of them has under way, and has them cancel calls: over one Redis channel.

A question goes to every gateway. Each writes its answer into a hash that the asking gateway reads until all have
answered, and that expires by itself. No gateway has to be reachable by another one, and nothing is written while nobody
asks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import redis.asyncio

from gateway.errors import StoreUnavailable
from gateway.store.outage import Outage, answered
from gateway.store.queue_inspector import QueueInspector
from workers.protocol import keys
from workers.redis.channel import follow

log = logging.getLogger(__name__)

MOST_ROWS = 500
"""Maximum number of calls in one gateway's answer: those that came first."""
MOST_QUESTIONS = 64
"""Maximum number of questions that wait for this gateway's answer; of more, the oldest get none."""
LOOK_EVERY_S = 0.03
PATIENCE_S = 2.0
"""Maximum seconds in which the other gateways have to answer; one that is slower counts as silent."""
LIFE_S = 10
"""Seconds after which Redis forgets the answers to a question."""


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a gateway has under way: names and numbers, never text of a prompt or an answer."""

    request_id: str
    team: str
    key: str
    """Name of the API key that sent it."""
    alias: str
    """The model name that the caller used."""
    model: str
    gateway: str
    """Id of the gateway that has the call."""
    worker: str
    """Id of the worker that computes it; empty: it waits."""
    status: Literal["waiting", "running"]
    since: float
    """Unix time at which the request arrived."""
    position: int
    """Place in its model's queue when that was last looked up, from 1; 0: it does not wait for a slot."""
    predicted_wait_s: float
    """Seconds that it is expected to wait still."""
    priority: int
    """As callers send it: a lower number is more urgent."""
    num_answers: int
    """Answers to the request that are not complete."""


class CallQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which calls are asked for; an empty field does not narrow that."""

    asked_by: str
    """Id of the gateway that asks, which does not answer itself."""
    reply_to: str
    """Name of the hash into which each other gateway writes its answer."""
    cancels: bool = False
    """Whether these calls are to be cancelled."""
    request_id: str = ""
    team: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class CallsFound:
    rows: tuple[CallRow, ...]
    silent: tuple[str, ...]
    """Ids of the gateways that did not answer in time."""


_encode = msgspec.json.Encoder().encode
_decode_question = msgspec.json.Decoder(CallQuestion).decode
_decode_rows = msgspec.json.Decoder(tuple[CallRow, ...]).decode


class CallExchange:
    """This gateway's part in the exchange: asks the others, and answers what they ask."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway_id: str,
        look: Callable[[CallQuestion], tuple[CallRow, ...]],
    ) -> None:
        """`look` returns the calls of this gateway that a question asks for, and cancels them if it says so."""
        self._redis = redis
        self._gateway = gateway_id
        self._look = look
        self._gateways = QueueInspector(redis)
        self._asked: asyncio.Queue[CallQuestion] = asyncio.Queue(MOST_QUESTIONS)

    async def run(self) -> None:
        """Answer other gateways' questions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._redis, keys.CALLS_CHANNEL, self._hear, lambda: None))
            tasks.create_task(self._answer_all())

    async def ask(self, *, request_id: str = "", team: str = "", model: str = "", cancels: bool = False) -> CallsFound:
        """Return the calls of all gateways that fit, after they were cancelled if `cancels`. While Redis does not
        answer, these are this gateway's own."""
        reply_to = keys.calls_found(secrets.token_hex(8))
        question = CallQuestion(
            asked_by=self._gateway,
            reply_to=reply_to,
            cancels=cancels,
            request_id=request_id,
            team=team,
            model=model,
        )
        own = self._look(question)
        try:
            others = await self._others()
            found = await self._ask_others(question, others) if others else {}
        except StoreUnavailable:
            return CallsFound(own, ("other gateways: Redis does not answer",))
        rows = [*own, *(row for rows in found.values() for row in rows)]
        rows.sort(key=lambda row: row.since)
        return CallsFound(tuple(rows), tuple(sorted(others - found.keys())))

    async def _others(self) -> frozenset[str]:
        """Return the other gateways that are alive. Raises StoreUnavailable."""
        beats = await self._gateways.gateways()
        latest = max(beats.values(), default=0.0)
        return frozenset(id for id, at in beats.items() if at > latest - keys.GATEWAY_TTL_S and id != self._gateway)

    async def _ask_others(self, question: CallQuestion, others: frozenset[str]) -> dict[str, tuple[CallRow, ...]]:
        """Return gateway id -> its calls, of those that answered in time. Raises StoreUnavailable."""
        await answered(self._redis.publish(keys.CALLS_CHANNEL, _encode(question)))
        loop = asyncio.get_running_loop()
        ends = loop.time() + PATIENCE_S
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            raw: Any = await answered(self._redis.hgetall(question.reply_to))
            if len(raw) >= len(others) or loop.time() > ends:
                break
        found: dict[str, tuple[CallRow, ...]] = {}
        for gateway, rows in raw.items():
            try:
                found[gateway.decode()] = _decode_rows(rows)
            except ValueError as error:
                log.warning("what a gateway told of its calls can't be read: %s", error)
        return found

    def _hear(self, message: bytes) -> None:
        try:
            question = _decode_question(message)
        except ValueError as error:
            log.warning("a question about calls can't be read: %s", error)
            return
        if self._asked.full():
            self._asked.get_nowait()
        self._asked.put_nowait(question)

    async def _answer_all(self) -> None:
        outage = Outage("Redis is away, no answer to other gateways", "they ask again", "")
        while True:
            question = await self._asked.get()
            with outage.survive():
                await self._answer(question)

    async def _answer(self, question: CallQuestion) -> None:
        if question.asked_by == self._gateway or not question.reply_to.startswith(keys.CALLS_FOUND):
            return  # no other names are written to because a message says so
        rows = self._look(question)
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.hset(question.reply_to, self._gateway, _encode(rows))
            pipeline.expire(question.reply_to, LIFE_S)
            await answered(pipeline.execute())
