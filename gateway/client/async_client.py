"""Provides the client for asyncio tasks. `calls` and `generation` define what each call sends and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import httpx2

import gateway.client.calls as calls
from gateway.client.answers import ChatChunk, ChatCompletion, CompletionChunk, CompletionResponse
from gateway.client.errors import ClientError
from gateway.client.generation import Chat, Completions
from gateway.client.receiver import StreamReceiver
from gateway.client.request import Pause, Request, Script, Sender, StreamRequest, make_async_method, read_answer
from gateway.client.stream import AsyncStream
from gateway.client.transport import DEFAULT_TIMEOUT_S, DEFAULT_URL, Server, VerifySsl, exchange_async

T = TypeVar("T")


class AsyncConnection:
    """Sends calls to one server. Tasks of one event loop may share it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = httpx2.AsyncClient(base_url=server.root, **server.options())

    async def send(self, request: Request[T]) -> T:
        """Send a call and return its answer. Raises ClientError."""
        with self._server.translating(request):
            options = self._server.options_of(request)
            sending = self._http.build_request(request.method, request.path, **options)
            response = await exchange_async(self._http, sending)
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        return read_answer(request, response.status_code, response.headers, body)

    async def open(self, request: StreamRequest[T]) -> AsyncStream[T]:
        """Send a call and return its streamed answer. Raises ClientError."""
        return await AsyncStream.open(self._http, self._server, StreamReceiver(request))

    async def run(self, script: Script[T]) -> T:
        """Run the steps of a script and return its result. Raises ClientError."""
        reply: Any = None
        failure: ClientError | None = None
        while True:
            try:
                step = script.send(reply) if failure is None else script.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            reply = failure = None
            try:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    reply = await self.send(step)
            except ClientError as error:
                failure = error

    async def close(self) -> None:
        await self._http.aclose()


class AsyncEmbeddings(Sender):
    create = make_async_method(calls.create_embeddings)


class AsyncModels(Sender):
    list = make_async_method(calls.list_models)
    retrieve = make_async_method(calls.retrieve_model)
    load = make_async_method(calls.load_model)
    unload = make_async_method(calls.unload_model)
    download = make_async_method(calls.download_model)
    remove = make_async_method(calls.remove_model)


class AsyncSlots(Sender):
    list = make_async_method(calls.list_slots)
    save = make_async_method(calls.save_slot)
    restore = make_async_method(calls.restore_slot)
    erase = make_async_method(calls.erase_slot)


class AsyncLora(Sender):
    list = make_async_method(calls.list_adapters)
    set_scales = make_async_method(calls.set_scales)
    load = make_async_method(calls.load_adapter)
    unload = make_async_method(calls.unload_adapter)


class AsyncClient(
    Completions[
        Awaitable[CompletionResponse],
        Awaitable[tuple[CompletionResponse, ...]],
        Awaitable[str],
        Awaitable[AsyncStream[CompletionChunk]],
    ],
):
    """A client of a Paddock gateway or a llama-server. Every call may raise ClientError. The client retries no call."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str = "",
        timeout: float | None = DEFAULT_TIMEOUT_S,
        verify_ssl: VerifySsl = True,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`base_url`: with or without `/v1`. `timeout`: seconds without a byte from the server after which a call
        raises Timeout; None: no limit."""
        connection = AsyncConnection(Server(base_url, api_key, timeout, verify_ssl, headers or {}))
        super().__init__(connection.send, connection.open)
        self._connection = connection
        self.chat = Chat[Awaitable[ChatCompletion], Awaitable[AsyncStream[ChatChunk]]](connection.send, connection.open)
        self.embeddings = AsyncEmbeddings(connection.send)
        self.models = AsyncModels(connection.send)
        self.slots = AsyncSlots(connection.send)
        self.lora = AsyncLora(connection.send)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connection.close()

    health = make_async_method(calls.health)
    props = make_async_method(calls.props)
    set_props = make_async_method(calls.set_props)
    metrics = make_async_method(calls.metrics)
    embed = make_async_method(calls.embed)
    rerank = make_async_method(calls.rerank)
    transcribe = make_async_method(calls.transcribe)
    translate = make_async_method(calls.translate)
    tokenize = make_async_method(calls.tokenize)
    detokenize = make_async_method(calls.detokenize)
    apply_template = make_async_method(calls.apply_template)

    async def is_ready(self) -> bool:
        """Return whether the server would answer calls now."""
        return await self._connection.run(calls.is_ready())

    async def wait_until_ready(self, timeout: float = 60.0, poll_interval: float = 0.25) -> None:
        """Wait until the server would answer calls, asking it every `poll_interval` seconds. Raises NotReady after
        `timeout` seconds."""
        await self._connection.run(calls.wait_until_ready(timeout, poll_interval))
