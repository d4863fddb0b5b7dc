"""Iterates over streamed answers, in threads and in tasks. `receiver` parses the bytes and decides on reconnects.

Closing a stream, leaving its `with` block or ending a loop over it closes the connection. This ends the call on the
server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Generic, TypeVar

import httpx2

from gateway.client.errors import (
    ClientError,
    ConnectionFailed,
    StreamBroken,
    Timeout,
    Unavailable,
    UnexpectedAnswer,
    refusal,
)
from gateway.client.receiver import StreamReceiver
from gateway.client.transport import Server, exchange, exchange_async

T = TypeVar("T")

BREAKS = (ConnectionFailed, StreamBroken, Timeout)
"""Errors after which a stream may be resumed."""

NOT_NOW = (ConnectionFailed, Timeout, Unavailable)
"""Errors with which a reconnect may fail and be tried again; any other error ends the stream."""


class Stream(Generic[T]):
    """An iterator over the items of an answer as they come. It yields them only once. Iterating raises ClientError."""

    def __init__(self, http: httpx2.Client, server: Server, receiver: StreamReceiver[T]) -> None:
        """Connect, and wait until the server begins to answer. Raises ClientError."""
        self._http = http
        self._server = server
        self._receiver = receiver
        self._response = self._connect()
        self._items = self._receive()

    @property
    def request_id(self) -> str | None:
        return self._receiver.headers.get("x-request-id")

    def __iter__(self) -> Iterator[T]:
        with self:
            yield from self._items

    def __next__(self) -> T:
        return next(self._items)

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, which ends the call on the server if it still runs."""
        self._items.close()
        self._response.close()

    def _receive(self) -> Generator[T]:
        receiver = self._receiver
        while not receiver.complete:
            try:
                with self._server.translating(receiver.request):
                    for chunk in self._response.iter_bytes():
                        yield from receiver.feed(chunk)
                receiver.ended()
            except BREAKS as error:
                if not receiver.complete:
                    self._reconnect(error)

    def _reconnect(self, error: ClientError) -> None:
        self._response.close()
        while True:
            time.sleep(self._receiver.pause_s(error))
            try:
                self._response = self._connect()
            except NOT_NOW as again:
                error = again
            else:
                return

    def _connect(self) -> httpx2.Response:
        request = _request(self._http, self._receiver)
        with self._server.translating(self._receiver.request):
            response = exchange(self._http, request)
            if _begins(response):
                self._receiver.opened(response.headers)
                return response
            try:
                body = response.read()
            finally:
                response.close()
        raise self._receiver.refused(_refusal(response, body))


class AsyncStream(Generic[T]):
    """`Stream` for asyncio tasks: an asynchronous iterator over the items of an answer."""

    def __init__(
        self, http: httpx2.AsyncClient, server: Server, receiver: StreamReceiver[T], response: httpx2.Response
    ) -> None:
        """Use `open` instead, which connects."""
        self._http = http
        self._server = server
        self._receiver = receiver
        self._response = response
        self._items = self._receive()

    @classmethod
    async def open(cls, http: httpx2.AsyncClient, server: Server, receiver: StreamReceiver[T]) -> AsyncStream[T]:
        """Connect, and wait until the server begins to answer. Raises ClientError."""
        return cls(http, server, receiver, await _connect(http, server, receiver))

    @property
    def request_id(self) -> str | None:
        return self._receiver.headers.get("x-request-id")

    async def __aiter__(self) -> AsyncIterator[T]:
        async with self:
            async for item in self._items:
                yield item

    async def __anext__(self) -> T:
        return await anext(self._items)

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, which ends the call on the server if it still runs."""
        await self._items.aclose()
        await self._response.aclose()

    async def _receive(self) -> AsyncGenerator[T]:
        receiver = self._receiver
        while not receiver.complete:
            try:
                with self._server.translating(receiver.request):
                    async for chunk in self._response.aiter_bytes():
                        for item in receiver.feed(chunk):
                            yield item
                receiver.ended()
            except BREAKS as error:
                if not receiver.complete:
                    await self._reconnect(error)

    async def _reconnect(self, error: ClientError) -> None:
        await self._response.aclose()
        while True:
            await asyncio.sleep(self._receiver.pause_s(error))
            try:
                self._response = await _connect(self._http, self._server, self._receiver)
            except NOT_NOW as again:
                error = again
            else:
                return


async def _connect(http: httpx2.AsyncClient, server: Server, receiver: StreamReceiver[T]) -> httpx2.Response:
    request = _request(http, receiver)
    with server.translating(receiver.request):
        response = await exchange_async(http, request)
        if _begins(response):
            receiver.opened(response.headers)
            return response
        try:
            body = await response.aread()
        finally:
            await response.aclose()
    raise receiver.refused(_refusal(response, body))


def _request(http: httpx2.Client | httpx2.AsyncClient, receiver: StreamReceiver[T]) -> httpx2.Request:
    return http.build_request(
        "POST", receiver.request.path, content=receiver.request.body, headers=receiver.request_headers()
    )


def _begins(response: httpx2.Response) -> bool:
    kind: str = response.headers.get("content-type", "")
    return response.status_code == 200 and kind.startswith("text/event-stream")


def _refusal(response: httpx2.Response, body: bytes) -> ClientError:
    if response.status_code != 200:
        return refusal(response.status_code, response.headers, body)
    kind = response.headers.get("content-type", "of no type")
    return UnexpectedAnswer(f"{response.url} answered with {kind} instead of a stream; check the base URL")
