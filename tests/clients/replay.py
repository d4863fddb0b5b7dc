"""Sends what programs sent to a running Paddock again, and tells what became of each call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import requests

from gateway.api.compatibility import TABLES
from gateway.api.openai.writing import REASONS
from gateway.api.routes import ROUTES
from tests.clients.answers import fault
from tests.clients.recording import ANSWER_ID, Recording, Sent
from tests.support.kinds import DEMO_ALIAS, stack_of_all_kinds
from tests.support.stack import Stack

TIMEOUT_S = 300.0

Fate = Literal["answered", "refused", "failed"]
"""refused: by a parameter that docs/compatibility.md says is refused, a route that is not served, or for want of a key;
failed: anything else that is wrong.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call."""

    call: Sent
    fate: Fate
    parameter: str = ""
    reason: str = ""
    ignored: tuple[str, ...] = ()
    """Parameters that were not read, as the answer tells."""

    def __str__(self) -> str:
        told = f"`{self.parameter}`: {self.reason}" if self.parameter else self.reason
        return f"{self.call}: {told}"


UNSERVED = {f"{row.method} {row.path}": REASONS[row.name] for row in ROUTES if row.name in REASONS}
"""Route that is known and not served -> what a caller is told."""


def fleet(ctx: int = 3072) -> AbstractContextManager[Stack]:
    """Return a stack whose chat model is there for those who name none, with room for coding assistants' tools."""
    return stack_of_all_kinds(default_chat=DEMO_ALIAS, slots=2, ctx=ctx, kv_tokens=2 * ctx)


def replay(recording: Recording, url: str, key: str) -> Iterator[Outcome]:
    """Yield the outcome of each call, in order; a call that names an earlier answer gets the id that it has here."""
    answer_ids: list[str] = []
    with requests.Session() as session:
        for call in recording.calls:
            answer = session.request(
                call.method,
                url + _filled(call.path, answer_ids),
                data=None if call.body is None else json.dumps(_filled(call.body, answer_ids)).encode(),
                headers=call.headers | _key_headers(call, key),
                timeout=TIMEOUT_S,
            )
            found = re.search(r'"id": ?"(resp_[^"]+)"', answer.text)
            answer_ids.append(found[1] if found else "")
            yield _outcome(call, answer)


def _key_headers(call: Sent, key: str) -> dict[str, str]:
    headers = {}
    if call.key in ("bearer", "both"):
        headers["authorization"] = f"Bearer {key}"
    if call.key in ("x-api-key", "both"):
        headers["x-api-key"] = key
    return headers


def _filled(value: Any, answer_ids: list[str]) -> Any:
    if isinstance(value, dict):
        return {name: _filled(inner, answer_ids) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, answer_ids) for inner in value]
    if isinstance(value, str):
        return ANSWER_ID.sub(lambda found: answer_ids[int(found[1])], value)
    return value


def _outcome(call: Sent, answer: requests.Response) -> Outcome:
    if answer.status_code >= 400:
        told = answer.text
        for name, remedy in _refusals(call.route).items():
            if f"`{name}` is not supported" in told and json.dumps(remedy)[1:-1] in told:
                return Outcome(call, "refused", name, remedy)
        if (reason := UNSERVED.get(call.route)) and answer.status_code == 501 and json.dumps(reason)[1:-1] in told:
            return Outcome(call, "refused", call.route, reason)
        if (call.method, call.key, answer.status_code) == ("GET", "none", 401):
            return Outcome(call, "refused", "no key", "Every route but probes and metrics needs one.")
        return Outcome(call, "failed", reason=f"{answer.status_code} {told[:500]}")
    wrong = fault(call, answer)
    if wrong:
        return Outcome(call, "failed", reason=wrong)
    return Outcome(call, "answered", ignored=tuple(answer.headers.get("x-paddock-ignored", "").split(", ")))


def _refusals(route: str) -> dict[str, str]:
    """Return the parameters that docs/compatibility.md says are refused there, with what it says."""
    return {
        name: refusal.remedy
        for table in TABLES
        for endpoint in table.endpoints
        if route in endpoint.routes
        for name, refusal in endpoint.refused.items()
    }
