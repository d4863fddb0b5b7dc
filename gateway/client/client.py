"""Provides the synchronous client. The modules `calls` and `generation` define what each call sends and reads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

import httpx2

import gateway.client.calls as calls
from gateway.client.answers import ChatChunk, ChatCompletion, CompletionChunk, CompletionResponse
from gateway.client.errors import ClientError, refusal
from gateway.client.generation import Chat, Completions
from gateway.client.receiver import StreamReceiver
from gateway.client.request import Pause, Request, Script, Sender, StreamRequest, make_method, read_answer
from gateway.client.stream import Stream
from gateway.client.transport import DEFAULT_TIMEOUT_S, DEFAULT_URL, Server, VerifySsl, exchange

T = TypeVar("T")


class Connection:
    """Sends calls to one server. Threads may share it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http = httpx2.Client(base_url=server.root, **server.options())

    def send(self, request: Request[T]) -> T:
        """Send a call and return its answer. Raises ClientError."""
        with self._server.translating(request):
            options = self._server.options_of(request)
            sending = self._http.build_request(request.method, request.path, **options)
            response = exchange(self._http, sending)
            try:
                body = response.read()
            finally:
                response.close()
        return read_answer(request, response.status_code, response.headers, body)

    def save(self, request: Request[Any], file: BinaryIO) -> int:
        """Send a call and write its answer into a file, piece by piece; return the number of bytes. Raises ClientError,
        OSError (the file can't be written)."""
        num_bytes = 0
        with self._server.translating(request):
            sending = self._http.build_request(request.method, request.path, **self._server.options_of(request))
            response = exchange(self._http, sending)
            try:
                if not response.is_success:
                    raise refusal(response.status_code, response.headers, response.read())
                for piece in response.iter_bytes():
                    num_bytes += file.write(piece)
            finally:
                response.close()
        return num_bytes

    def open(self, request: StreamRequest[T]) -> Stream[T]:
        """Send a call and return its streamed answer. Raises ClientError."""
        return Stream(self._http, self._server, StreamReceiver(request))

    def run(self, script: Script[T]) -> T:
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
                    time.sleep(step.seconds)
                else:
                    reply = self.send(step)
            except ClientError as error:
                failure = error

    def close(self) -> None:
        self._http.close()


class Embeddings(Sender):
    create = make_method(calls.create_embeddings)


class Models(Sender):
    list = make_method(calls.list_models)
    retrieve = make_method(calls.retrieve_model)
    load = make_method(calls.load_model)
    unload = make_method(calls.unload_model)
    download = make_method(calls.download_model)
    remove = make_method(calls.remove_model)


class Slots(Sender):
    list = make_method(calls.list_slots)
    save = make_method(calls.save_slot)
    restore = make_method(calls.restore_slot)
    erase = make_method(calls.erase_slot)


class Lora(Sender):
    list = make_method(calls.list_adapters)
    set_scales = make_method(calls.set_scales)
    load = make_method(calls.load_adapter)
    unload = make_method(calls.unload_adapter)


class Client(
    Completions[
        CompletionResponse,
        tuple[CompletionResponse, ...],
        str,
        Stream[CompletionChunk],
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
        connection = Connection(Server(base_url, api_key, timeout, verify_ssl, headers or {}))
        super().__init__(connection.send, connection.open)
        self._connection = connection
        self.chat = Chat[ChatCompletion, Stream[ChatChunk]](connection.send, connection.open)
        self.embeddings = Embeddings(connection.send)
        self.models = Models(connection.send)
        self.slots = Slots(connection.send)
        self.lora = Lora(connection.send)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    health = make_method(calls.health)
    props = make_method(calls.props)
    set_props = make_method(calls.set_props)
    metrics = make_method(calls.metrics)
    embed = make_method(calls.embed)
    rerank = make_method(calls.rerank)
    transcribe = make_method(calls.transcribe)
    translate = make_method(calls.translate)
    tokenize = make_method(calls.tokenize)
    detokenize = make_method(calls.detokenize)
    apply_template = make_method(calls.apply_template)

    def is_ready(self) -> bool:
        """Return whether the server would answer calls now."""
        return self._connection.run(calls.is_ready())

    def wait_until_ready(self, timeout: float = 60.0, poll_interval: float = 0.25) -> None:
        """Wait until the server would answer calls, asking it every `poll_interval` seconds. Raises NotReady after
        `timeout` seconds."""
        self._connection.run(calls.wait_until_ready(timeout, poll_interval))
