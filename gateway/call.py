"""Who asks, beside what is asked (`workers.protocol.requests.GenerateRequest`) and what comes back (`...events`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of an API key. `aliases` is None when the key may use every model."""

    key_id: str
    team: str
    aliases: frozenset[str] | None
    admin: bool
    weight: float = 1.0
    """Share of its team, beside those of other teams, where calls wait."""

    def may_use(self, alias: str) -> bool:
        return self.aliases is None or alias in self.aliases


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way through the gateway: immutable, made at the door."""

    request_id: str
    principal: Principal
    alias: str
    """The name the caller used."""
    model: str
    """The pool that serves it."""
    received_at: float
    """time.monotonic() when the request arrived."""
    deadline: float
    """time.monotonic() after which nobody waits for the answer any more."""
    queue_deadline: float
    """time.monotonic() after which the call stops waiting for a slot."""
    begin_by: float = 0.0
    """Unix time by which the caller would like the answer to have begun; 0: it did not say."""
    adapter: str = ""
    """The LoRA adapter that was called by its name."""
    fallbacks: tuple[str, ...] = ()
    """Pools that stand in for `model`, in this order, until the answer has begun."""
    meant_for: str = ""
    """The pool that `model` stands in for; empty: none."""
    session: str = ""
    """A newer call of the same key and session ends this one; empty: none does."""
