"""Reads how a stream is to outlive a broken connection: the headers `x-resume-grace` and `Last-Event-ID`.

Source of the latter: WHATWG HTML, "Server-sent events". Ids of events are `<stream>:<number>`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial

from starlette.types import Scope

from gateway.api.intake import Body
from gateway.errors import InvalidRequest, StreamGone
from gateway.resume.recordings import Owner

LONGEST_GRACE_S = 60

_EVENT_ID = re.compile(rb"([0-9a-f]{1,64}):([0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class Wish:
    owner: Owner
    """The team and the request (its digest) that may read the stream again."""
    grace_s: float
    """Seconds that the answer goes on without its client."""
    stream: str
    """Id of the stream that is read again; empty: none, this is the first time."""
    after: int
    """Number of the last event that the client has."""


async def read_wish(scope: Scope, body: Body) -> Wish | None:
    """Return what both headers ask for; None without either. Long bodies are hashed on a thread.

    Raises InvalidRequest, and StreamGone for an id that never was one of ours.
    """
    grace: bytes | None = None
    last: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"x-resume-grace":
            grace = value
        elif name == b"last-event-id" and value:
            last = value
    if grace is None and last is None:
        return None
    stream, after = ("", 0) if last is None else _event(last)
    grace_s = 0.0 if grace is None else _grace_s(grace)
    digest = await body.aside(len(body.raw), partial(_digest, scope, body.raw))
    return Wish(Owner(body.team, digest), grace_s, stream, after)


def _grace_s(value: bytes) -> float:
    text = value.strip()
    if not re.fullmatch(rb"[0-9]{1,2}(\.[0-9]{1,3})?", text) or not 1 <= float(text) <= LONGEST_GRACE_S:
        shown = value[:40].decode("ascii", "replace")
        message = f"The header `x-resume-grace` is {shown!r}. Send seconds, from 1 to {LONGEST_GRACE_S}."
        raise InvalidRequest(message, param="x-resume-grace")
    return float(text)


def _event(value: bytes) -> tuple[str, int]:
    found = _EVENT_ID.fullmatch(value.strip())
    if found is None:
        shown = value[:40].decode("ascii", "replace")
        raise StreamGone(f"`Last-Event-ID` {shown!r} is no event of a stream here. Send the request without it.")
    return found[1].decode(), int(found[2])


def _digest(scope: Scope, raw: bytes) -> str:
    """Return a digest that is the same for the same method, path, query and body."""
    head = f"{scope['method']} {scope['path']}?".encode() + scope.get("query_string", b"") + b"\n"
    digest = hashlib.sha256(head)
    digest.update(raw)
    return digest.hexdigest()
