"""What a worker offers, beside the engine that computes it."""

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
    """Made once, by whoever puts the worker together."""

    prompts: Prompts
    defaults: Sampling = field(default_factory=Sampling)
    """What a caller gets who does not say."""
    constraints: Constraints | None = None
    """None: answers can't be kept to a form."""
    answers: Answers | None = None
    """How the model's text is read; None: as it is."""
    adapters: AdapterRoutes | None = None
    """For a worker whose calls may name LoRA adapters."""
    slots: SlotRoutes = field(default_factory=SlotRoutes)
    """Unless they are connected to an engine, the worker says that it has none."""
    heads: HeadBook = field(default_factory=HeadBook)
    """Unless it is connected to an engine, what was cached once counts as cached."""
    lane: FairLane = field(default_factory=prompt_lane)
    """Where prompts are made; `texts` and `pool` share it."""
    texts: TextRoutes | None = None
    devices: Callable[[], Sequence[DeviceMemory]] = tuple
    """The memory of what it computes on, at each call; for any thread."""
    pool: PooledDesk | None = None
    """For a worker that does pooled work, which is all that it does then."""

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
        """Adapter that calls may use -> SHA-256 of its file. For any thread."""
        return {} if self.adapters is None else self.adapters.hashes()

    def routes(self) -> list[Route]:
        """Beside those that every worker has."""
        return [
            *(self.adapters.routes() if self.adapters is not None else ()),
            *self.slots.routes(),
            *(self.texts.routes() if self.texts is not None else ()),
        ]
