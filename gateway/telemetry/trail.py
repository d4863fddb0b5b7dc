"""The trail of one request: what happened to it, for its log line, its metrics and its diagnostic headers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.call import Principal
from gateway.telemetry.ignored import Ignored
from gateway.telemetry.record import UNRECORDED, Record
from gateway.telemetry.standing import Standing
from workers.protocol.events import Usage

MAX_PATH_CHARS = 512
"""Of a path in a log line: whoever has no key writes nothing longer."""


@dataclass(slots=True)
class Trail:
    """Filled in by whoever learns a fact first. Holds no prompt text, answers or keys. Times are time.monotonic()."""

    request_id: str
    method: str
    path: str
    received_at: float = field(default_factory=time.monotonic)
    route: str = ""
    """The path as the route has it, `{names}` in place of what differs; empty: there is no such route."""
    record: Record = UNRECORDED
    """What is kept of its way for its trace; all its answers share it."""
    origin: bytes = b""
    """The web page that asks, as its browser says; empty: none."""
    closes: bool = False
    """Its connection ends with the answer: the caller is to go to another gateway with the next request."""
    team: str = ""
    key_id: str = ""
    alias: str = ""
    stands_in: str = ""
    """The default's name, where the call's own is not known; empty: it is."""
    model: str = ""
    worker: str = ""
    fingerprint: str = ""
    """What the worker computes with, as `Heartbeat.fingerprint`; empty: not known."""
    slot: int | None = None
    asks_only: bool = False
    """It is a question about its model, or one for an admin: no work is to be placed for it."""
    attempts: int = 0
    """Workers that the call was submitted to."""
    queue_ms: float = 0.0
    """Waiting for slots, and for workers that would do, all attempts together; in vain, too."""
    failed_ms: float = 0.0
    """With workers that it was submitted to and that failed before its first token."""
    standing: Standing = field(default_factory=Standing)
    overtaken: int = 0
    """How often a slot went to another call that stood behind this one in line."""
    expected_cached: int | None = None
    """Tokens of the prompt that its worker was expected to have cached; None: it never had a worker."""
    debug: bool = False
    """The caller wants to know why the call went where it did."""
    placement: str = ""
    """Why it did, in one line of ASCII; for callers that want to know."""
    submitted_at: float | None = None
    """When the attempt that answered left for its worker."""
    first_token_at: float | None = None
    usage: Usage | None = None
    """Of all its answers, as far as they came."""
    priority: int | None = None
    """What its key allows, where it asked for a more urgent one."""
    held_bytes: int = 0
    """Memory that its decoded body takes at most: what it costs to go through it grows with that."""
    num_answers: int = 1
    """That it asks for, over all prompts."""
    status: int = 0
    outcome: str = ""
    """`ok`, `client_gone`, or the code of the error."""
    handed_over: bool = False
    """The answer goes on without its connection; whoever makes it ends the trail."""
    ignored: Ignored = field(default_factory=Ignored)
    """Its parameters that nothing is done with."""

    def asked_by(self, principal: Principal) -> None:
        self.team, self.key_id = principal.team, principal.key_id

    def used(self, usage: Usage) -> None:
        """By one more of its answers."""
        before = self.usage or Usage(0, 0, 0)
        self.usage = Usage(
            before.prompt_tokens + usage.prompt_tokens,
            before.completion_tokens + usage.completion_tokens,
            before.cached_tokens + usage.cached_tokens,
        )

    @property
    def trace_id(self) -> str:
        """Empty: it is in no trace."""
        context = self.record.context
        return "" if context is None else context.trace_id

    @property
    def overhead_ms(self) -> float:
        """From arrival to leaving for the worker that answers, without waiting for a slot and without failed tries."""
        if self.submitted_at is None:
            return 0.0
        return max(0.0, (self.submitted_at - self.received_at) * 1e3 - self.queue_ms - self.failed_ms)

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, as the gateway saw it."""
        return None if self.first_token_at is None else self.first_token_at - self.received_at

    def name(self) -> dict[str, object]:
        """What other log lines about the request carry, so that they are found with it."""
        fields: dict[str, object] = {"request_id": self.request_id}
        return fields | {"trace_id": self.trace_id} if self.trace_id else fields

    def line(self) -> dict[str, object]:
        """The fields of the request's log line; what never happened is left out."""
        ttft_s, usage = self.ttft_s, self.usage
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "method": self.method,
            "path": self.path[:MAX_PATH_CHARS],
            "status": self.status,
            "outcome": self.outcome,
            "team": self.team,
            "key": self.key_id,
            "alias": self.alias,
            "model": self.model,
            "worker": self.worker,
            "total_ms": round((time.monotonic() - self.received_at) * 1e3, 2),
        }
        if self.attempts:
            fields |= {"attempts": self.attempts, "queue_ms": round(self.queue_ms, 2)}
            fields["overhead_ms"] = round(self.overhead_ms, 2)
        if self.standing.filed:
            fields["queue_position"] = self.standing.filed
        if ttft_s is not None:
            fields["ttft_ms"] = round(ttft_s * 1e3, 2)
        if usage is not None:
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["completion_tokens"] = usage.completion_tokens
            fields["cached_tokens"] = usage.cached_tokens
        return {name: value for name, value in fields.items() if value != ""}
