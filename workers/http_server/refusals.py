"""Answers that the server gives itself, before any application is called; its owner gives their JSON its form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

RESPONSE = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer after which the connection ends. `message` names the thing, the limit and the remedy."""

    status: int
    message: str


Form = Callable[[Refusal], bytes]
"""Writes the JSON body of a refusal as the rest of the service writes its errors."""


def response_of(refusal: Refusal, form: Form) -> bytes:
    """Return a whole response, after which the connection is closed."""
    status, body = HTTPStatus(refusal.status), form(refusal)
    return RESPONSE % (status, status.phrase.encode(), len(body), body)
