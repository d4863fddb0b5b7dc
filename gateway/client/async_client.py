"""The client for tasks. `calls` and `generation` define what each call sends and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import httpx2

import gateway.client.calls as calls
from gateway.client.answers import ChatChunk, ChatCompletion, CompletionChunk, CompletionResponse
from gateway.client.ask import Ask, Pause, Script, Sender, StreamAsk, answer, sent_async
from gateway.client.errors import ClientError
from gateway.client.generation import Chat, Completions
from gateway.client.reception import Reception
from gateway.client.stream import AsyncStream
from gateway.client.transport import DEFAULT_TIMEOUT_S, DEFAULT_URL, Server, VerifySsl, exchange_async

T = TypeVar("T")


class AsyncConnection:
    """Sends calls to one server. May be shared by tasks of one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = httpx2.AsyncClient(base_url=server.root, **server.options())

    async def send(self, ask: Ask[T]) -> T:
        """Send a call and return its answer. Raises ClientError."""
        with self._server.translating(ask):
            request = self._http.build_request(ask.method, ask.path, **self._server.options_of(ask))
            response = await exchange_async(self._http, request)
            try:
                body = await response.aread()
            finally:
                await response.aclose()
        return answer(ask, response.status_code, response.headers, body)

    async def open(self, ask: StreamAsk[T]) -> AsyncStream[T]:
        """Send a call and return its streamed answer. Raises ClientError."""
        return await AsyncStream.open(self._http, self._server, Reception(ask))

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
    create = sent_async(calls.create_embeddings)


class AsyncModels(Sender):
    list = sent_async(calls.list_models)
    retrieve = sent_async(calls.retrieve_model)
    load = sent_async(calls.load_model)
    unload = sent_async(calls.unload_model)


class AsyncSlots(Sender):
    list = sent_async(calls.list_slots)
    save = sent_async(calls.save_slot)
    restore = sent_async(calls.restore_slot)
    erase = sent_async(calls.erase_slot)


class AsyncLora(Sender):
    list = sent_async(calls.list_adapters)
    set_scales = sent_async(calls.set_scales)
    load = sent_async(calls.load_adapter)
    unload = sent_async(calls.unload_adapter)


class AsyncClient(
    Completions[
        Awaitable[CompletionResponse],
        Awaitable[tuple[CompletionResponse, ...]],
        Awaitable[str],
        Awaitable[AsyncStream[CompletionChunk]],
    ],
):
    """A client of a Paddock gateway or a llama-server. Every call raises ClientError; none is retried by itself."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        api_key: str = "",
        timeout: float | None = DEFAULT_TIMEOUT_S,
        verify_ssl: VerifySsl = True,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`base_url` with or without `/v1`; `timeout` is the server's longest silence in seconds, None: forever."""
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

    health = sent_async(calls.health)
    props = sent_async(calls.props)
    set_props = sent_async(calls.set_props)
    metrics = sent_async(calls.metrics)
    embed = sent_async(calls.embed)
    rerank = sent_async(calls.rerank)
    tokenize = sent_async(calls.tokenize)
    detokenize = sent_async(calls.detokenize)
    apply_template = sent_async(calls.apply_template)

    async def is_ready(self) -> bool:
        """Return whether calls would be answered now."""
        return await self._connection.run(calls.is_ready())

    async def wait_until_ready(self, timeout: float = 60.0, poll_interval: float = 0.25) -> None:
        """Wait until calls would be answered. Both parameters are in seconds. Raises NotReady."""
        await self._connection.run(calls.wait_until_ready(timeout, poll_interval))
