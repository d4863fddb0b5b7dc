"""Reads what a request says outside its body: session, deadline of the first token, resumption of a stream, query.

Resumption: `Last-Event-ID` is as in WHATWG HTML, "Server-sent events", with ids `<stream>:<number>`; `x-resume-grace`
is our own.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Scope

from gateway.api.intake.decoding import let_loop_run
from gateway.api.intake.intake import Body
from gateway.api.parameters.base import quote
from gateway.catalog.conversations import conversation_of
from gateway.errors import InvalidRequest, StreamGone
from gateway.resume.recordings import Owner
from workers.protocol.requests import GenerateRequest

SESSION_HEADER = b"x-session-id"


def conversation_key(scope: Scope, request: GenerateRequest, team: str) -> Callable[[], str]:
    """Return a function whose result is the same in all turns of a conversation: `CallResolver` picks a model by it."""
    return partial(conversation_of, request, team, session_of(scope))


def session_or_request_id(scope: Scope, request_id: str) -> Callable[[], str]:
    """Return a function that returns the key for `CallResolver` to pick a model: the session, else the request's id."""
    return lambda: session_of(scope) or request_id


def session_of(scope: Scope) -> str:
    """Return the session that the caller names; empty without the header."""
    found = next((value for name, value in scope["headers"] if name == SESSION_HEADER), b"")
    return bytes(found).decode("latin-1").strip()


SLO_HEADER = b"x-slo-ttft-ms"
MAX_SLO_MS = 24 * 3600 * 1000


def read_ttft_deadline(scope: Scope) -> float:
    """Return the Unix time by which the caller wants the first token; 0 without the header.

    Raises InvalidRequest if the header is not above 0 and at most a day."""
    for name, value in scope["headers"]:
        if name == SLO_HEADER:
            slo_ms = _number(value)
            if not 0 < slo_ms <= MAX_SLO_MS:
                shown = value[:40].decode("ascii", "replace")
                message = f"The header `x-slo-ttft-ms` is {shown!r}. Send milliseconds, above 0 and up to {MAX_SLO_MS}."
                raise InvalidRequest(message, param="x-slo-ttft-ms")
            return time.time() + slo_ms / 1e3
    return 0.0


def _number(value: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number


LONGEST_GRACE_S = 60

_EVENT_ID = re.compile(rb"([0-9a-f]{1,64}):([0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    owner: Owner
    """The team that may read the stream again, and the digest of the request that it must send for that."""
    grace_s: float
    """Seconds for which the answer is still generated after its client has disconnected."""
    stream: str
    """Id of the stream to read again; empty: the request begins a new stream."""
    after: int
    """Number of the last event that the client has."""


async def read_resume_options(scope: Scope, body: Body) -> ResumeOptions | None:
    """Return what `x-resume-grace` and `Last-Event-ID` ask for; None without them. Long bodies are hashed on a thread.

    Raises InvalidRequest, and StreamGone for a `Last-Event-ID` that is not of the form of our ids."""
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
    files = body.attachments
    # Not of the text with the files' tokens: these are others each time that the request is sent.
    digest = await body.run_aside(len(body.raw) + files.num_chars, partial(_digest, scope, files.parts(body.raw)))
    return ResumeOptions(Owner(body.team, digest), grace_s, stream, after)


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


def _digest(scope: Scope, parts: Iterable[bytes]) -> str:
    """Return a digest that is the same for the same method, path, query and body, which comes in parts."""
    head = f"{scope['method']} {scope['path']}?".encode() + scope.get("query_string", b"") + b"\n"
    digest = hashlib.sha256(head)
    for part in parts:
        digest.update(part)
        let_loop_run()
    return digest.hexdigest()


MAX_FIELDS = 32
AUTOLOAD = {"true": True, "1": True, "false": False, "0": False}


def query_of(scope: Scope) -> dict[str, str]:
    """Return the parameters of the URL's query. Raises InvalidRequest if there are more than MAX_FIELDS."""
    try:
        pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"The address has more than {MAX_FIELDS} parameters. Send fewer.") from None
    return dict(pairs)


def read_autoload(scope: Scope) -> bool | None:
    """Return whether the request may have its model loaded, by `autoload` of the query, as llama-server reads it; None:
    the request does not say. Raises InvalidRequest for another word."""
    word = query_of(scope).get("autoload", "") if b"autoload" in scope.get("query_string", b"") else ""
    if word and word not in AUTOLOAD:
        raise InvalidRequest(f"`autoload` is {quote(word)}. Send true or false.", param="autoload")
    return AUTOLOAD.get(word)


def named_model(document: dict[str, Any], scope: Scope) -> str:
    """Return `model` of the body, else of the query, else an empty string. Raises InvalidRequest if it is no string."""
    name = document.get("model")
    if name is None:
        return query_of(scope).get("model", "")
    if not isinstance(name, str):
        raise InvalidRequest(f"`model` is {quote(name)}. Send a string.", param="model")
    return name
