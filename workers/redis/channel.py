"""Follows one pub/sub channel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import redis.asyncio
from redis.exceptions import ConnectionError, RedisError

from workers.redis.trouble import raise_if_cancelled

log = logging.getLogger(__name__)

RETRY_S = 0.2
SILENCE_S = 2.0
"""Seconds without a message after which Redis is pinged; if it does not reply within as many seconds again, the
connection counts as lost."""


async def follow(
    redis: redis.asyncio.Redis, channel: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[], None]
) -> None:
    """Call `on_message` with each message of the channel. Call `on_subscribed` after each subscription, since messages
    sent before it may have been missed. Never returns. A lost connection is logged once; then a new one is tried every
    RETRY_S until one can be made."""
    away = False
    while True:
        pubsub = redis.pubsub()
        try:
            await pubsub.subscribe(channel)
            asked = False
            while True:
                raise_if_cancelled()
                message = await pubsub.get_message(timeout=SILENCE_S)
                if message is None:
                    if asked:
                        raise ConnectionError(f"no answer to a ping in {SILENCE_S:g} s")
                    await pubsub.ping()
                    asked = True
                    continue
                asked = False
                if message["type"] == "message":
                    on_message(message["data"])
                elif message["type"] == "subscribe":
                    if away:
                        log.info("following %s again", channel)
                    away = False
                    on_subscribed()
        except (RedisError, OSError) as error:
            if not away:
                log.warning("lost %s (%s: %s); trying again until it is back", channel, type(error).__name__, error)
            away = True
        finally:
            with suppress(RedisError, OSError):
                await pubsub.aclose()  # type: ignore[no-untyped-call]
        raise_if_cancelled()
        await asyncio.sleep(RETRY_S)
