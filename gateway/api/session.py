"""Reads the header `x-session-id`, the caller's own name for a conversation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.types import Scope

from gateway.catalog.shares import conversation_of
from workers.protocol.requests import GenerateRequest

HEADER = b"x-session-id"


def conversation(scope: Scope, request: GenerateRequest, team: str) -> Callable[[], str]:
    """Return a function for `Pipeline.call` that tells which conversation the request belongs to."""
    return partial(conversation_of, request, team, session_of(scope))


def talk_of(scope: Scope, request_id: str) -> Callable[[], str]:
    """Return the same for a request that is no turn of a conversation: its session if it names one, else its own id."""
    return lambda: session_of(scope) or request_id


def session_of(scope: Scope) -> str:
    """Return the session that the caller names; empty without the header."""
    found = next((value for name, value in scope["headers"] if name == HEADER), b"")
    return bytes(found).decode("latin-1").strip()
