"""Keeps the calls of a worker that generates text, each from its submit to its last event."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from workers.chat.tools import Parser
from workers.engine.request import EngineRequest
from workers.protocol.events import Failed, Failure, Finished
from workers.protocol.requests import Sampling, Submit
from workers.service.calls.call_record import CallRecord, CallRecords
from workers.service.calls.stream import Listing
from workers.service.registration.heartbeat import Rates
from workers.service.registration.prefix_adverts import CallAdverts


class Engine(Protocol):
    """The part of an engine that calls need. Its events go to `Delivery`; their field `call` is the request's key."""

    @property
    def n_ctx(self) -> int:
        """Longest single conversation, tokens."""

    def submit(self, request: EngineRequest) -> None:
        """Take the call without waiting for a slot. Raises CallFailed."""

    def cancel(self, key: int) -> None:
        """End the call within one step; unknown keys are ignored."""

    def end(self, key: int, num_tokens: int) -> None:
        """End the answer after its first `num_tokens` tokens, as Finished (STOP); unknown keys are ignored."""


class Begun(NamedTuple):
    """Facts about a call that the engine has taken, for the reply to its submit (`protocol.requests.Accepted`)."""

    num_prompt_tokens: int
    prompt: str = ""
    sampling: Sampling | None = None


@dataclass(slots=True, eq=False)
class LiveCall:
    """One call between its submit and its last event."""

    listing: Listing
    record: CallRecord
    parser: Parser | None = None
    held_tokens: int = 0
    """Tokens whose text the parser still holds back."""
    num_read_tokens: int = 0
    """Tokens whose text the parser has seen."""
    adverts: CallAdverts | None = None
    """The prefix hashes of the call; None: its prompt is not cached."""
    preparing: asyncio.Future[Any] | None = None
    """Preparation of the call for the engine; cancelled if nobody wants the call any more. None: none is under way."""
    has_ended: bool = False
    """Whether the call's last event was sent. A short answer can end before the thread that submitted it returns."""
    outcome: asyncio.Future[Begun | Failure] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The result of the submit, or why it was refused."""


class LiveCalls:
    """Keeps all live calls, by the engine's key. Use it on the event loop."""

    def __init__(self, engine: Engine, records: CallRecords) -> None:
        self.idle = asyncio.Event()
        """Set while there is no call."""
        self.idle.set()
        self.rates = Rates()
        """Averages over past calls, from which gateways predict how long a call would wait."""
        self._engine = engine
        self._records = records
        self._calls: dict[int, LiveCall] = {}
        self.get = self._calls.get
        """Returns the call of a key, or None; called once per token."""

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, key: int) -> bool:
        return key in self._calls

    def __getitem__(self, key: int) -> LiveCall:
        return self._calls[key]

    @property
    def keys(self) -> list[int]:
        return list(self._calls)

    def begin(self, listing: Listing, submit: Submit) -> LiveCall:
        self.idle.clear()
        record = self._records.begin("generate", submit.request_id, submit.traceparent, submit.tracestate)
        call = self._calls[listing.key] = LiveCall(listing, record)
        return call

    def give_up(self, key: int) -> None:
        """Forget a call that nobody wants any more, and cancel it in the engine."""
        if self.forget(key):
            self._engine.cancel(key)

    def forget(self, key: int, end: Finished | Failed | None = None) -> bool:
        """Forget a call; return whether it was still there. `end`: the call's last event; None: it was given up."""
        call = self._calls.pop(key, None)
        if not self._calls:
            self.idle.set()
        if call is not None:
            call.has_ended = end is not None
            if call.preparing is not None and end is None:
                call.preparing.cancel()
            if call.record.started_at:
                self.rates.held(call.record.started_at)
            self._records.end(call.record, end)
        return call is not None
