"""The log of one request, for its log line, its metrics and its diagnostic headers; and its ignored parameters."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from gateway.call import Principal
from gateway.telemetry.trace_recorder import UNRECORDED, QueuePosition, TraceRecorder
from workers.protocol.events import Usage

MAX_NAMES = 16
"""Most names in a header; `...` stands for more."""
MAX_NAME_CHARS = 48
UNKNOWN = "unknown"
"""Label of every name that is in no table: a caller's text must not become a label."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a header does not repeat: a caller's text must not become a header of its own."""


class Ignored:
    """The ignored parameters of one request."""

    __slots__ = ("_known", "_names", "_num_more", "_unknown", "refuses")

    def __init__(self, *, refuses: bool = False) -> None:
        """`refuses`: unknown parameters are errors, and so are those without effect that ask for something."""
        self.refuses = refuses
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        self._unknown = False
        self._num_more = 0

    def another(self) -> Ignored:
        """Return an empty one for another request, with the same `refuses`."""
        return Ignored(refuses=self.refuses)

    def note(self, name: str) -> None:
        """Note a parameter that a table or a model names."""
        self._known.add(name)
        self._tell(name)

    def note_unknown(self, name: str) -> None:
        """Note a parameter that nothing names."""
        self._unknown = True
        self._tell(name)

    @property
    def header(self) -> str:
        """The names in the order in which they came, made safe; empty: there are none."""
        more = ["..."] if self._num_more else []
        return ", ".join([*self._names, *more])

    @property
    def labels(self) -> list[str]:
        """The names for metrics, each once; UNKNOWN stands for all unknown ones."""
        return [*sorted(self._known), *([UNKNOWN] if self._unknown else [])]

    def _tell(self, name: str) -> None:
        safe = _UNSAFE.sub("?", name[:MAX_NAME_CHARS]) or "?"
        if safe in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[safe] = None
        else:
            self._num_more += 1


MAX_PATH_CHARS = 512
"""Most characters of a path in a log line: callers without a key can't make it longer."""


@dataclass(slots=True)
class RequestLog:
    """The facts of one request as they become known, without prompts, answers or keys. Times are time.monotonic()."""

    request_id: str
    method: str
    path: str
    received_at: float = field(default_factory=time.monotonic)
    route: str = ""
    """The path of its route, with `{names}` for the variable parts; empty: there is no such route."""
    trace_recorder: TraceRecorder = UNRECORDED
    """Its waits and attempts, for its trace; all its answers share it."""
    origin: bytes = b""
    """The web page that asks, by the browser's `Origin`; empty: none."""
    closes: bool = False
    """Whether its connection ends with the answer: the caller is to send the next request to another gateway."""
    team: str = ""
    key_id: str = ""
    alias: str = ""
    stands_in: str = ""
    """The name of the default model, where the call's own name is not known; empty: it is known."""
    model: str = ""
    worker: str = ""
    fingerprint: str = ""
    """`Heartbeat.fingerprint` of the worker; empty: not known."""
    slot: int | None = None
    asks_only: bool = False
    """Whether it is a question about its model, or one of an admin: no work is placed for it."""
    attempts: int = 0
    """Number of workers that the call was submitted to."""
    queue_ms: float = 0.0
    """Time of waiting for slots, and for workers that would do, in all attempts; waits in vain included."""
    failed_ms: float = 0.0
    """Time spent at workers that it was submitted to and that failed before its first token."""
    queue_position: QueuePosition = field(default_factory=QueuePosition)
    overtaken: int = 0
    """How often a slot went to another call that was behind this one in the queue."""
    expected_cached: int | None = None
    """Tokens of the prompt that its worker was expected to have cached; None: it never had a worker."""
    debug: bool = False
    """Whether the caller wants to know why the call was placed where it was."""
    placement: str = ""
    """The reasons for its placement, in one line of ASCII; for callers that want to know."""
    submitted_at: float | None = None
    """When the attempt that answered was sent to its worker."""
    first_token_at: float | None = None
    usage: Usage | None = None
    """Tokens of all its answers that came, whole or in part."""
    priority: int | None = None
    """The priority that its key allows, where it asked for a more urgent one."""
    held_bytes: int = 0
    """Most memory that its decoded body takes: the cost of going through it grows with that."""
    num_answers: int = 1
    """Number of answers that it asks for, over all prompts."""
    status: int = 0
    outcome: str = ""
    """`ok`, `client_gone`, or the code of the error."""
    handed_over: bool = False
    """Whether the answer goes on without its connection; the task that makes it finishes the log."""
    ignored: Ignored = field(default_factory=Ignored)
    """Its parameters that have no effect."""

    def asked_by(self, principal: Principal) -> None:
        self.team, self.key_id = principal.team, principal.key_id

    def add_usage(self, usage: Usage) -> None:
        """Add the tokens of one more of its answers."""
        self.usage = usage if self.usage is None else self.usage + usage

    @property
    def trace_id(self) -> str:
        """Id of its trace; empty: it is in none."""
        context = self.trace_recorder.context
        return "" if context is None else context.trace_id

    @property
    def overhead_ms(self) -> float:
        """Time from arrival to the submit to the worker that answers, without waits for slots and failed attempts."""
        if self.submitted_at is None:
            return 0.0
        return max(0.0, (self.submitted_at - self.received_at) * 1e3 - self.queue_ms - self.failed_ms)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, as the gateway saw it; None: there was none."""
        return None if self.first_token_at is None else self.first_token_at - self.received_at

    def name(self) -> dict[str, object]:
        """Return the ids that other log lines about the request carry, so that they are found with it."""
        fields: dict[str, object] = {"request_id": self.request_id}
        return fields | {"trace_id": self.trace_id} if self.trace_id else fields

    def line(self) -> dict[str, object]:
        """Return the fields of the request's log line, without those of what never happened."""
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
        if self.queue_position.filed:
            fields["queue_position"] = self.queue_position.filed
        if ttft_s is not None:
            fields["ttft_ms"] = round(ttft_s * 1e3, 2)
        if usage is not None:
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["completion_tokens"] = usage.completion_tokens
            fields["cached_tokens"] = usage.cached_tokens
        return {name: value for name, value in fields.items() if value != ""}
