"""The parts that a worker serves calls with, beside its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.routing import Route

from workers.chat.answers import Answers
from workers.chat.prompts import Prompts
from workers.protocol.devices import DeviceMemory
from workers.protocol.heartbeat import WorkerKind
from workers.protocol.requests import Sampling
from workers.service.adapters import AdapterRoutes
from workers.service.desk import Constraints
from workers.service.heads import HeadBook
from workers.service.lanes import FairLane, prompt_lane
from workers.service.pooled import PooledDesk
from workers.service.slots import SlotRoutes
from workers.service.text import TextRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts, made once, by the worker's composition root."""

    prompts: Prompts
    defaults: Sampling = field(default_factory=Sampling)
    """Sampling where a caller does not say."""
    constraints: Constraints | None = None
    """Compiles the forms of answers; None: answers can't be kept to a form."""
    answers: Answers | None = None
    """Makes the parsers of the model's answers; None: they are read as Hermes'."""
    adapters: AdapterRoutes | None = None
    """Routes for LoRA adapters, for a worker whose calls may name them."""
    slots: SlotRoutes = field(default_factory=SlotRoutes)
    """Routes for slots; unless they are connected to an engine, the worker answers that it has none."""
    heads: HeadBook = field(default_factory=HeadBook)
    """Prefix hashes; unless it is connected to an engine, what was cached once counts as cached."""
    lane: FairLane = field(default_factory=prompt_lane)
    """Threads on which prompts are made; `texts` and `pool` share it."""
    texts: TextRoutes | None = None
    devices: Callable[[], Sequence[DeviceMemory]] = tuple
    """Returns the memory of the worker's devices at each call; for any thread."""
    pool: PooledDesk | None = None
    """The desk of a worker that does pooled work, and then nothing else."""

    @property
    def kind(self) -> WorkerKind:
        return "generate" if self.pool is None else self.pool.kind

    @property
    def infill(self) -> bool:
        return self.pool is None and self.prompts.can_infill

    @property
    def form_counts(self) -> dict[str, int]:
        return {} if self.constraints is None else self.constraints.counts

    def adapter_hashes(self) -> dict[str, str]:
        """Return each adapter that calls may use -> SHA-256 of its file. For any thread."""
        return {} if self.adapters is None else self.adapters.hashes()

    def routes(self) -> list[Route]:
        """Return the routes beside those that every worker has."""
        return [
            *(self.adapters.routes() if self.adapters is not None else ()),
            *self.slots.routes(),
            *(self.texts.routes() if self.texts is not None else ()),
        ]
