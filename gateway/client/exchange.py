"""Sends a request and waits for the headers of the answer, over a kept connection or a new one.

A server may close an idle connection at the moment in which it is used again; llama-server does so after each stream.
The error that follows says nothing about the request, so the request is sent once more over another connection. Nothing
else is sent twice.
"""

from __future__ import annotations

from typing import Any

import httpx2

CLOSED = (httpx2.ReadError, httpx2.RemoteProtocolError, httpx2.WriteError)
"""Errors that follow when the server has closed the connection."""


class _Trace:
    """Notes whether a new connection is made for a request."""

    def __init__(self) -> None:
        self.is_new = False

    def note(self, event: str, _: Any) -> None:
        self.is_new = self.is_new or "connect_" in event

    async def note_async(self, event: str, _: Any) -> None:
        self.note(event, _)


def exchange(http: httpx2.Client, request: httpx2.Request) -> httpx2.Response:
    """Send a request and return the response, its body unread. Raises httpx2.HTTPError."""
    while True:
        trace = _Trace()
        request.extensions["trace"] = trace.note
        try:
            return http.send(request, stream=True)
        except CLOSED:
            if trace.is_new:
                raise


async def exchange_async(http: httpx2.AsyncClient, request: httpx2.Request) -> httpx2.Response:
    """Send a request and return the response, its body unread. Raises httpx2.HTTPError."""
    while True:
        trace = _Trace()
        request.extensions["trace"] = trace.note_async
        try:
            return await http.send(request, stream=True)
        except CLOSED:
            if trace.is_new:
                raise
