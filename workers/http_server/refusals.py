"""What the server itself answers, before any application is asked: a status, and words that its owner puts in form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

RESPONSE = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a connection ends with this answer. `message` names the thing, the limit and the remedy."""

    status: int
    message: str


Form = Callable[[Refusal], bytes]
"""Writes the JSON body of a refusal as the rest of the service writes its errors."""


def response_of(refusal: Refusal, form: Form) -> bytes:
    """Return a whole response, after which the connection is closed."""
    status, body = HTTPStatus(refusal.status), form(refusal)
    return RESPONSE % (status, status.phrase.encode(), len(body), body)
