"""The log of one request, from which its log line, metrics and diagnostic headers are made; and its ignored
parameters."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.call import Principal
from gateway.catalog.call_names import CallNames
from gateway.telemetry.answer_log import UNRECORDED, AnswerLog, QueuePosition, TraceRecorder
from gateway.telemetry.end_user import EndUser
from workers.protocol.events import Usage

MAX_NAMES = 16
"""Maximum names of ignored parameters in a header; `...` stands for further ones."""
MAX_NAME_CHARS = 48
UNKNOWN = "unknown"
"""Metric label for all parameters whose names Paddock does not know: a caller's text must not become a label."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters of a parameter's name that a header shows as "?": a caller's text must not become another header."""


class Ignored:
    """The parameters of one request that are ignored: accepted, but without effect."""

    __slots__ = ("_known", "_names", "_num_more", "_unknown", "end_user", "names", "refuses")

    def __init__(self, *, refuses: bool = False) -> None:
        """`refuses`: whether to refuse unknown parameters and, if their value asks for an effect, known ones that have
        no effect here. Otherwise both are ignored."""
        self.refuses = refuses
        self.end_user: EndUser | None = None
        """Reads the end user from parameters that are ignored otherwise; None: the key may not name one."""
        self.names: CallNames | None = None
        """The names that the request's caller may use, with the parameters that the catalog sets for them; None: the
        request is no call."""
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        self._unknown = False
        self._num_more = 0

    def another(self) -> Ignored:
        """Return an empty `Ignored` for another request on the same WebSocket."""
        made = Ignored(refuses=self.refuses)
        made.end_user = None if self.end_user is None else self.end_user.another()
        return made

    def note(self, name: str) -> None:
        """Note an ignored parameter whose name Paddock knows, from a dialect's table or the class of a body."""
        self._known.add(name)
        self._tell(name)

    def note_unknown(self, name: str) -> None:
        """Note an ignored parameter whose name is known nowhere."""
        self._unknown = True
        self._tell(name)

    @property
    def header(self) -> str:
        """The names of the ignored parameters in order of appearance, with unsafe characters replaced; empty: none."""
        more = ["..."] if self._num_more else []
        return ", ".join([*self._names, *more])

    @property
    def labels(self) -> list[str]:
        """The names of the ignored parameters as labels of metrics, each once; UNKNOWN stands for all unknown names."""
        return [*sorted(self._known), *([UNKNOWN] if self._unknown else [])]

    def _tell(self, name: str) -> None:
        safe = _UNSAFE.sub("?", name[:MAX_NAME_CHARS]) or "?"
        if safe in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[safe] = None
        else:
            self._num_more += 1


@dataclass(frozen=True, slots=True)
class Headroom:
    """The rest of one limit per minute, of the subject that has the least left."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until nothing counts any more if no further call comes."""


class Meter(Protocol):
    """Meters the call of one request, for all its answers together, so that its usage is known however it ends."""

    @property
    def note_written(self) -> Callable[[int], None]:
        """Notes how many tokens of the answers are being written to the caller, all earlier ones included. It is called
        once per token, just before it is written."""
        ...

    def note_begun(self, prompts: Usage, answer: AnswerLog) -> None:
        """Note that an answer has begun. `prompts`: the tokens of all prompts of which answers have begun."""
        ...

    def finish(self, request_log: RequestLog) -> None:
        """Record the usage of the request, which has ended."""
        ...


class Unmetered:
    """The meter of requests whose usage nobody records."""

    def note_written(self, num_tokens: int) -> None:
        """Do nothing."""

    def note_begun(self, prompts: Usage, answer: AnswerLog) -> None:
        """Do nothing."""

    def finish(self, request_log: RequestLog) -> None:
        """Do nothing."""


UNMETERED = Unmetered()

MAX_PATH_CHARS = 512
"""Maximum characters of a path in a log line; the rest is cut, so that callers without a key can't fill the log."""


@dataclass(slots=True)
class RequestLog:
    """The log of one request, without prompts, answers or keys. Times are time.monotonic().

    Each field is set once: some when the request comes, others by access control and the pipeline, and the outcome by
    the code that answers the caller. `answers` has one log for each answer on its way to a worker."""

    request_id: str
    method: str
    path: str
    received_at: float = field(default_factory=time.monotonic)
    trace: TraceRecorder = UNRECORDED
    scheme: str = "http"
    origin: bytes = b""
    """The web page that sent the request, by the browser's `Origin` header; empty: the header is missing."""
    closes: bool = False
    """Whether the connection is closed after the answer, so that the caller sends the next request to another gateway.
    """
    explains: bool = False
    """Whether the caller asked for the reasons why the call's worker was chosen."""
    ignored: Ignored = field(default_factory=Ignored)
    """The request's parameters that have no effect."""
    route: str = ""
    """The path of the request's route, with `{names}` for the variable parts; empty: no route matches."""

    team: str = ""
    key_id: str = ""
    organisation: str = ""
    user: str = ""

    alias: str = ""
    stands_in: str = ""
    """The name of the default model, if the default is used because the request names an unknown model; empty: the
    request's model is known."""
    adapter: str = ""
    """The LoRA adapter that the request names, in the field of the model or of adapters; empty: none."""
    asks_only: bool = False
    """Whether the request is only a question about its model, or an admin's request: no work is placed for it."""

    answers: list[AnswerLog] = field(init=False)
    """The logs of all answers to the request, over all its prompts. The first one has the queue position that is sent
    to the caller."""
    answer: AnswerLog = field(init=False)
    """The log that headers, log line and metrics are made from: that of the answer that began first; until an answer
    has begun, the first in `answers`."""

    requests_left: Headroom | None = None
    tokens_left: Headroom | None = None
    """The rest of the caller's limits per minute; None: it has none, or was not asked for."""

    first_token_at: float | None = None
    usage: Usage | None = None
    """Sum of the tokens of all answers that came, whole or in part; a prompt counts once for all its answers. None: no
    answer to the request came."""
    meter: Meter = UNMETERED
    status: int = 0
    outcome: str = ""
    """`ok`, `client_gone`, `cancelled`, or the error's code (its type if it has no code)."""
    handed_over: bool = False
    """Whether the answer goes on without its connection; then the task that makes the answer finishes this log."""

    def __post_init__(self) -> None:
        self.answer = AnswerLog(self.trace, self.explains)
        self.answers = [self.answer]

    @property
    def end_user(self) -> str:
        """Whoever uses the caller's program, as a key says that is trusted to name them; empty: nobody is named. No log
        line has it."""
        return "" if self.ignored.end_user is None else self.ignored.end_user.name

    def asked_by(self, principal: Principal) -> None:
        self.team, self.key_id = principal.team, principal.key_id
        self.organisation, self.user = principal.organisation, principal.user

    def split(self, num_answers: int) -> list[AnswerLog]:
        """Return `num_answers` logs, for a request whose answers are each placed separately."""
        more = [AnswerLog(self.trace, self.explains, self.model) for _ in range(num_answers - 1)]
        self.answers = [self.answer, *more]
        return self.answers

    def add_usage(self, usage: Usage) -> None:
        """Add the tokens of one more answer to the request."""
        self.usage = usage if self.usage is None else self.usage + usage

    @property
    def model(self) -> str:
        """The model whose workers serve the request; empty: not known."""
        return self.answer.model

    @property
    def worker(self) -> str:
        """The worker that the request was submitted to last; empty: it was submitted to none."""
        attempt = self.answer.last_attempt
        return "" if attempt is None else attempt.at.worker

    @property
    def fingerprint(self) -> str:
        """`Heartbeat.fingerprint` of the worker that the request was submitted to last; empty: not known."""
        attempt = self.answer.last_attempt
        return "" if attempt is None else attempt.fingerprint

    @property
    def queue_position(self) -> QueuePosition:
        return self.answers[0].queue_position

    @property
    def compute_s(self) -> float:
        """Seconds from each answer's last submission to a worker to its end, added up."""
        now, total_s = time.monotonic(), 0.0
        for answer in self.answers:
            if (attempt := answer.last_attempt) is not None:
                total_s += (attempt.ended_at or now) - attempt.submitted_at
        return total_s

    @property
    def overhead_s(self) -> float:
        """Seconds from arrival until the last attempt is submitted, less waits for slots and failed attempts."""
        answer, attempt = self.answer, self.answer.last_attempt
        if attempt is None:
            return 0.0
        return max(0.0, attempt.submitted_at - self.received_at - answer.queue_s - answer.failed_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, as the gateway saw it; None: there was no token."""
        return None if self.first_token_at is None else self.first_token_at - self.received_at

    def ids(self) -> dict[str, object]:
        """Return the ids that every other log line about the request has too, so that all its lines can be found
        together."""
        return ids_of(self.request_id, self.trace)

    def line(self) -> dict[str, object]:
        """Return the fields of the request's log line, leaving out those for things that never happened."""
        ttft_s, usage, answer = self.ttft_s, self.usage, self.answer
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "trace_id": self.trace.trace_id,
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
        if answer.attempts:
            fields |= {"attempts": len(answer.attempts), "queue_ms": round(answer.queue_s * 1e3, 2)}
            fields["overhead_ms"] = round(self.overhead_s * 1e3, 2)
        if self.queue_position.filed:
            fields["queue_position"] = self.queue_position.filed
        if ttft_s is not None:
            fields["ttft_ms"] = round(ttft_s * 1e3, 2)
        if usage is not None:
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["completion_tokens"] = usage.completion_tokens
            fields["cached_tokens"] = usage.cached_tokens
        return {name: value for name, value in fields.items() if value != ""}


def ids_of(request_id: str, trace: TraceRecorder) -> dict[str, object]:
    """Return the ids of a request, as fields of a log line."""
    return {"request_id": request_id, "trace_id": trace.trace_id} if trace.trace_id else {"request_id": request_id}
