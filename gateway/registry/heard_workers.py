"""Upholds the records of workers that this gateway hears although they can't renew them: their way to Redis is slow or
cut, and the gateway's is not.

A gateway hears a worker while its event stream to that very process is open and not silent: the worker has proved there
that it knows the worker secret. The gateway renews the worker's last record in its place, and writes it anew if it has
expired. So admission goes on in Redis as always: one queue, fair shares, and all leases; gateways without a stream to
the worker, and those that start meanwhile, know it, too. Placing the model's calls by shares, as without Redis, would
give up all of that for every worker of the model, even if only one is cut off.

Of several gateways one does so: to the others the record is not late then, until that gateway ends.

A worker that leaves is gone at once: it closes its streams before it deletes its record, so it is not heard any more;
one that drains is not upheld; and a record that its worker, or a successor, has written itself is never changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import redis.asyncio
from msgspec.structs import replace

from gateway.registry.records import WorkerKey
from gateway.store.outage import Outage, raise_if_cancelled
from gateway.store.scripts import load_uphold_script
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.protocol.heartbeat import Heartbeat, encode_heartbeat, placing_of, record_of
from workers.redis.link import long_commands_of

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Number of records renewed in one round trip. Sealing one that must be written anew takes some microseconds."""
SAID_FOR_S = 60.0
"""Seconds without upholding a worker's record after which the log names the worker anew."""


def _never(boot: str) -> bool:
    """Return False for any process. It is the default of `HeardWorkers.hears`."""
    return False


class HeardWorkers:
    """Upholds records of workers that this gateway hears. Its `run` is a task beside the reading of records."""

    def __init__(self, redis: redis.asyncio.Redis, secret: str) -> None:
        """`secret` seals what workers write, and so what is written in their place."""
        self._commands = long_commands_of(redis)
        self._secret = secret
        self._script = load_uphold_script().source
        self.hears: Callable[[str], bool] = _never
        """Whether an event stream to the process with this boot id is open, and not silent."""
        self._missing: dict[WorkerKey, Heartbeat] = {}
        """Workers whose records the last reading missed; they are to be written anew."""
        self._upheld: dict[WorkerKey, Heartbeat] = {}
        """Workers whose records are to be renewed as long as they are there and nobody else changes them."""
        self._upheld_at: dict[WorkerKey, float] = {}
        """Worker -> time.monotonic() when its record was last upheld, for SAID_FOR_S."""
        self._wake = asyncio.Event()
        self._outage = Outage("records of workers can't be upheld", "it is tried again", "")

    def only(self, beats: Mapping[WorkerKey, Heartbeat]) -> dict[WorkerKey, Heartbeat]:
        """Return those of the records whose worker processes are heard."""
        return {key: beat for key, beat in beats.items() if self.hears(beat.boot)}

    def uphold(self, missing: Mapping[WorkerKey, Heartbeat], late: Mapping[WorkerKey, Heartbeat]) -> None:
        """Have the records of heard workers upheld, as just read: `missing` are gone, `late` expire soon."""
        self._missing = dict(missing)
        self._upheld |= self.only(late)
        if self._missing or late:
            self._wake.set()

    def forget(self, workers: Iterable[WorkerKey]) -> None:
        """Uphold the records of these workers no longer, as they have left."""
        for key in workers:
            self._missing.pop(key, None)
            self._upheld.pop(key, None)

    async def run(self) -> None:
        """Renew records every `keys.HEARTBEAT_INTERVAL_S` until cancelled."""
        while True:
            self._wake.clear()
            with self._outage.survive():
                await self._renew_all()
            raise_if_cancelled()
            await wait_tick(keys.HEARTBEAT_INTERVAL_S, self._wake)

    async def _renew_all(self) -> None:
        missing, self._missing = self.only(self._missing), {}
        self._upheld = self.only(self._upheld)
        beats = list({**self._upheld, **missing}.items())
        for first in range(0, len(beats), AT_ONCE):
            some = beats[first : first + AT_ONCE]
            calls = [self._call(key, beat, anew=key in missing) for key, beat in some]
            models = {key[0] for key, _ in some if key in missing}
            answers = await self._commands.ask(*calls, *(("SADD", keys.MODELS, model) for model in models))
            for (key, beat), answer in zip(some, answers, strict=False):
                self._note(key, beat, is_upheld=answer == 1)
        now = time.monotonic()
        self._upheld_at = {key: at for key, at in self._upheld_at.items() if now - at < SAID_FOR_S}

    def _call(self, key: WorkerKey, beat: Heartbeat, *, anew: bool) -> tuple[str | int | bytes, ...]:
        """Return the call of the script `uphold` for a worker."""
        names = (keys.worker(*key), keys.workers(key[0]))
        ttl_ms, placing = round(keys.HEARTBEAT_TTL_S * 1000), placing_of(replace(beat, kv_tokens_used=0))
        record = record_of(beat, self._secret) if anew else {}
        fields = (record.get("beat") or encode_heartbeat(beat), record.get("seal") or b"", placing)
        return ("EVAL", self._script, len(names), *names, ttl_ms, key[1], "1" if anew else "", *fields)

    def _note(self, key: WorkerKey, beat: Heartbeat, *, is_upheld: bool) -> None:
        if not is_upheld:
            self._upheld.pop(key, None)
            return
        self._upheld[key] = beat
        now = time.monotonic()
        if now - self._upheld_at.get(key, -math.inf) >= SAID_FOR_S:
            log.warning(
                "worker %s of model %s lives and does not renew its record in Redis; this gateway renews it. See the "
                "worker's way to Redis, and its log",
                key[1],
                key[0],
            )
        self._upheld_at[key] = now
