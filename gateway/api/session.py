"""The header `x-session-id`: the caller's own name for a conversation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.types import Scope

from gateway.catalog.shares import conversation_of
from workers.protocol.requests import GenerateRequest

HEADER = b"x-session-id"


def conversation(scope: Scope, request: GenerateRequest, team: str) -> Callable[[], str]:
    """What `Pipeline.call` may want to know: which conversation the request belongs to."""
    return partial(conversation_of, request, team, session_of(scope))


def talk_of(scope: Scope, request_id: str) -> Callable[[], str]:
    """The same for a request that is no turn of a conversation: it stands for itself, unless it names a session."""
    return lambda: session_of(scope) or request_id


def session_of(scope: Scope) -> str:
    """Empty without the header."""
    found = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return bytes(found).decode("latin-1").strip()
