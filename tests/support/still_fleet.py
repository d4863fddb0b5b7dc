"""A fleet that changes only when a test sets its snapshot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.registry.snapshot import FleetSnapshot


@dataclass(slots=True)
class StillFleet:
    snapshot: FleetSnapshot
    listeners: list[Callable[[FleetSnapshot], None]] = field(default_factory=list)

    def listen(self, on_change: Callable[[FleetSnapshot], None]) -> None:
        self.listeners.append(on_change)
