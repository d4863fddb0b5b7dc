"""A supervisor without workers: it tells of models' states by the true protocol, and hears which models are wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import redis

from tests.support.redis_server import logged_in
from workers.protocol import keys
from workers.protocol.residency import (
    TOLD_EVERY_S,
    GatewayDemand,
    MachineModels,
    ModelDemand,
    ModelState,
    decode_demand,
    encode,
)


class FakeSupervisor:
    """Start with `with FakeSupervisor(url, states) as supervisor`, then `supervisor.tell(model=ModelState(...))`."""

    def __init__(self, url: str, states: Mapping[str, ModelState], machine: str = "host1") -> None:
        self._redis = redis.Redis.from_url(logged_in(url, "supervisor"))
        self._machine = machine
        self._states = dict(states)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.tell()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._redis.hdel(keys.RESIDENCY, self._machine)
        self._redis.close()

    def tell(self, **states: ModelState) -> None:
        """Tell these states at once, and again and again from now on, besides those of other models."""
        with self._lock:
            self._states |= states
            told = encode(MachineModels(at=time.time(), models=self._states))
            self._redis.hset(keys.RESIDENCY, self._machine, told)

    def gateways(self) -> dict[str, GatewayDemand]:
        """Gateway -> what it tells now."""
        found: Any = self._redis.hgetall(keys.DEMAND)
        return {name.decode(): decode_demand(told) for name, told in found.items()}

    def demand(self, model: str) -> ModelDemand | None:
        """What one of the gateways tells of the model; None: none tells of it."""
        found = (told.models.get(model) for told in self.gateways().values())
        return next((demand for demand in found if demand is not None), None)

    def num_waiting(self, model: str) -> int:
        """Calls that wait for the model at all gateways."""
        found = (told.models.get(model) for told in self.gateways().values())
        return sum(demand.num_waiting for demand in found if demand is not None)

    def is_asked_for(self, model: str) -> bool:
        """Whether an admin wants the model loaded."""
        return self._redis.hget(keys.ASKED, model) is not None

    def is_unloaded(self, model: str) -> bool:
        return bool(self._redis.exists(keys.unloaded(model)))

    def _run(self) -> None:
        while not self._over.wait(TOLD_EVERY_S):
            self.tell()
