"""Tells supervisors, through Redis, which models this gateway's calls wait for or use (`workers.protocol.residency`).

Supervisors load and unload models by that. It is written every half second while there is anything to tell, and at once
when a call begins to wait for a model without a worker: the loading begins then; and when the last such call has left,
so that nothing is loaded, and nothing leaves, for callers who have gone. While Redis is away nothing is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import redis.asyncio
from msgspec.structs import replace

from gateway.admission.local_queue import LocalQueue
from gateway.errors import StoreUnavailable
from gateway.store.outage import NO_ANSWER, Outage, checked, raise_if_cancelled
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.protocol.residency import (
    LIFE_S,
    MAX_MODELS,
    MAX_TEAMS,
    TOLD_EVERY_S,
    GatewayDemand,
    ModelDemand,
    encode,
)
from workers.redis.link import short_commands_of

USED_S = 60.0
"""Seconds for which a model is told of after its last call."""
ELSEWHERE_S = 15.0
"""Seconds for which a model is wanted after a fallback took a call: what may leave for it can have calls just now."""
SETTLE_S = 0.01
"""Seconds that a call has waited before it is told: who leaves at once has nothing loaded, and models that are called
together are told together."""
LEAVING_TURNS = 8
"""Turns of the event loop within which a call has left whose caller's end was heard of; a process that the system let
wait hears of it in the turn in which SETTLE_S are over."""
LEAST_S = 0.05
"""Minimum seconds between two writings, whatever callers do: each has all supervisors decide anew."""
TOLD_BYTES = 512 << 10
"""Maximum bytes of what is told: half of what one sending on the connection for short commands may have."""
KEY_TTL_S = 2 * LIFE_S
"""Lifetime of the hash unless a gateway writes to it: fields do not expire by themselves."""


def _nothing() -> Mapping[str, tuple[int, float]]:
    """Return no calls: the default of `DemandReport.unqueued`."""
    return {}


@dataclass(slots=True)
class _Elsewhere:
    """The calls for one model that fallbacks serve, one not long after the other."""

    since: float
    """time.monotonic() of the first, and of the last."""
    last: float
    number: int = 1


class DemandReport:
    """Writes one gateway's field of `keys.DEMAND`."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        gateway_id: str,
        queue: LocalQueue,
        predicted_wait_s: Callable[[str], float],
        is_on_demand: Callable[[str], bool],
    ) -> None:
        """`predicted_wait_s` returns the predicted wait of a call for this model that comes now; `is_on_demand`,
        whether calls load a model."""
        self._commands = short_commands_of(redis)
        self._gateway = gateway_id
        self._queue = queue
        self._predicted_wait_s = predicted_wait_s
        self._is_on_demand = is_on_demand
        self.unqueued: Callable[[], Mapping[str, tuple[int, float]]] = _nothing
        """Returns model -> (number of calls that wait before they are queued, longest wait so far in seconds)."""
        self._waited_for = frozenset[str]()
        """Models that Redis has been told, or is being told, that calls wait for."""
        self._wanted = set[str]()
        """Models without workers for which calls began to wait since Redis was last told."""
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._is_told = False
        """Whether Redis may have this gateway's field."""
        self._over = False
        self._wake = asyncio.Event()
        self._outage = Outage("supervisors can't be told which models are wanted", "it is tried again and again", "")

    def tell_soon(self, model: str) -> None:
        """Tell at once that a call waits for a model without a worker, unless that is told already. Never waits."""
        if model not in self._waited_for and not self._outage.lasts:
            self._wanted.add(model)
            self._wake.set()

    def note_left(self, model: str) -> None:
        """Tell soon that a call does not wait any more and got no slot, if it was the last one that Redis knows to wait
        for its model. Never waits."""
        if model in self._waited_for and not self._queue.num_waiting(model):
            self._wake.set()

    def want(self, model: str) -> None:
        """Note that a fallback serves a call in place of a model that has no worker. Never waits."""
        now, known = time.monotonic(), self._elsewhere.get(model)
        if known is None or now - known.last > ELSEWHERE_S:
            self._elsewhere[model] = _Elsewhere(now, now)
            self._wake.set()
        else:
            known.last, known.number = now, known.number + 1

    async def run(self) -> None:
        """Tell until cancelled."""
        told_at = float("-inf")
        while True:
            if self._wake.is_set():
                await asyncio.sleep(max(1.1 * SETTLE_S, told_at + LEAST_S - time.monotonic()))
                for _ in range(LEAVING_TURNS):
                    await asyncio.sleep(0)
            self._wake.clear()
            told_at = time.monotonic()
            with self._outage.survive():
                await self._tell()
            if self._outage.lasts:
                self._waited_for = frozenset()
            raise_if_cancelled()
            await wait_tick(TOLD_EVERY_S, self._wake)

    async def give_back(self) -> None:
        """Remove this gateway's field, and tell nothing any more. Raises nothing if Redis is away."""
        self._over = True
        if self._is_told:
            with suppress(StoreUnavailable, *NO_ANSWER):
                await self._remove()

    def models(self) -> dict[str, ModelDemand]:
        """Return the demand for each model with calls, or that was used within USED_S; most wanted first. A model whose
        calls have all just come does not count as waited for yet."""
        now, clock = time.monotonic(), time.time()
        unqueued, oldest, teams = self.unqueued(), self._queue.oldest_waits(), self._queue.teams(MAX_TEAMS)
        found: dict[str, ModelDemand] = {}
        self._elsewhere = {model: calls for model, calls in self._elsewhere.items() if now - calls.last <= ELSEWHERE_S}
        for model in self._queue.used_since(now - USED_S) | unqueued.keys() | self._elsewhere.keys():
            num_unqueued, unqueued_s = unqueued.get(model, (0, 0.0))
            num_waiting = self._queue.num_waiting(model) + num_unqueued
            waited_s = max(now - oldest.get(model, now), unqueued_s)
            if waited_s < SETTLE_S:
                num_waiting = 0
            used_at, elsewhere = self._queue.used_at(model), self._elsewhere.get(model)
            if elsewhere is not None and not num_waiting:
                waited_s = now - elsewhere.since
            found[model] = ModelDemand(
                num_waiting=num_waiting,
                oldest_at=clock - waited_s if num_waiting or elsewhere is not None else 0.0,
                predicted_wait_s=self._predicted_wait_s(model),
                num_running=self._queue.num_in_flight(model),
                num_elsewhere=0 if elsewhere is None else elsewhere.number,
                used_at=clock - (now - used_at) if used_at is not None else 0.0,
                teams=tuple(teams.get(model, ())) if num_waiting else (),
            )
        return dict(sorted(found.items(), key=lambda item: -item[1].num_waiting))

    async def _tell(self) -> None:
        if self._over:
            return
        models = dict(islice(self.models().items(), MAX_MODELS))
        self._waited_for = frozenset(model for model, demand in models.items() if demand.num_waiting)
        if not models:
            if self._is_told:
                await self._remove()
            return
        # A call that came after an admin had such a model unloaded loads it again.
        wanted = self._wanted & self._waited_for
        # Callers of the others have left meanwhile, or have just come.
        self._wanted = {model for model in self._wanted - wanted if self._queue.num_waiting(model)}
        if self._wanted:
            self._wake.set()
        again = [model for model in wanted if self._is_on_demand(model)]
        woken = (("PUBLISH", keys.WANTED_CHANNEL, ""),) if wanted else ()
        self._is_told = True
        told = _encoded(models)
        answers = await self._commands.ask(
            ("HSET", keys.DEMAND, self._gateway, told),
            ("PEXPIRE", keys.DEMAND, round(KEY_TTL_S * 1000)),
            *(("DEL", keys.unloaded(model)) for model in again),
            *woken,
        )
        checked(answers)

    async def _remove(self) -> None:
        checked(await self._commands.ask(("HDEL", keys.DEMAND, self._gateway)))
        self._is_told = False


def _encoded(models: Mapping[str, ModelDemand]) -> bytes:
    """Return what is told of these models, the most wanted first: if it were too long with fewer teams of each model,
    and then of fewer models."""
    told, num_teams, num_models = b"", MAX_TEAMS, len(models)
    while not told or (len(told) > TOLD_BYTES and num_models > 1):
        some = dict(islice(models.items(), num_models))
        if num_teams < MAX_TEAMS:
            some = {name: replace(demand, teams=demand.teams[:num_teams]) for name, demand in some.items()}
        told = encode(GatewayDemand(at=time.time(), models=some))
        num_teams, num_models = num_teams // 2, num_models if num_teams else num_models // 2
    return told
