"""Answers `POST /tokenize`, `/detokenize` and `/apply-template`, for which workers don't use their engine.

Source of bodies and answers: tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from pydantic import Field
from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import JSON, send_json, send_parts
from gateway.api.http.diagnostics import ignored_of, request_log_of
from gateway.api.intake.disconnect import until_disconnect
from gateway.api.intake.intake import Body as HeldBody
from gateway.api.intake.request_reader import RequestReader, document_of, validated
from gateway.api.media.loader import MediaLoader
from gateway.api.native.request import read_native_prompt
from gateway.api.parameters.base import Body
from gateway.api.request_headers import named_model
from gateway.call import Call, Principal
from gateway.errors import InternalError
from gateway.relay.relay import WorkerQueries
from workers.protocol.queries import (
    DETOKENIZE_PATH,
    RENDER_PATH,
    TOKEN_BYTES,
    TOKENIZE_PATH,
    Detokenize,
    Render,
    Tokenize,
    Tokenized,
    decode_detokenized,
    decode_rendered,
    decode_tokenized,
    ints_of,
)
from workers.protocol.requests import GenerateRequest

MAX_TOKEN = 2**31 - 1

TOKENS_PER_TURN = 1 << 14
"""Tokens in one part of an answer; the event loop runs between parts. Encoding a token and its text takes 0.5 us."""

CHARS_PER_TURN = 1 << 17
"""Characters of a text in one part of an answer; the event loop runs between parts."""

UNREADABLE = "A worker answered what this gateway can't read. Run the same version of both."

ReplyT = TypeVar("ReplyT")

_encode = msgspec.json.Encoder().encode


class TokenizeBody(Body):
    model: str = ""
    content: Any = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN)]] = Field(default_factory=list, fail_fast=True)


class Conversation(Protocol):
    """The fields of a chat request that `/apply-template` uses."""

    @property
    def model(self) -> str: ...
    @property
    def requests(self) -> tuple[GenerateRequest, ...]: ...


class ChatReader(Protocol):
    """Reads the body of `POST /v1/chat/completions`."""

    def read(self, raw: bytes, scope: Scope) -> Conversation: ...


class TextRoutes:
    """Handles `/tokenize`, `/detokenize` and `/apply-template`, which reads its body as the chat route does."""

    def __init__(self, reader: RequestReader, queries: WorkerQueries, chat: ChatReader, media: MediaLoader) -> None:
        self._reader = reader
        self._queries = queries
        self._chat = chat
        self._media = media

    async def tokenize(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reader.intake.open_body(principal, scope, receive) as body:
            name, asked = await body.decode(partial(_tokenize_of, scope=scope, team=principal.team))
            call = self._reader.call(principal, {"model": name}, scope)
            if asked is None:
                await send_json(send, {"tokens": []}, request_log_of(scope))
                return
            found = await self._ask(body, call, TOKENIZE_PATH, asked, decode_tokenized, receive)
            await send_parts(send, token_parts(found), JSON, request_log_of(scope))

    async def detokenize(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reader.intake.open_body(principal, scope, receive) as body:
            name, tokens = await body.decode(partial(_tokens_of, scope=scope))
            call = self._reader.call(principal, {"model": name}, scope)
            asked = Detokenize(tokens=tokens, tenant=principal.team)
            found = await self._ask(body, call, DETOKENIZE_PATH, asked, decode_detokenized, receive)
            await send_parts(send, text_parts("content", found.content), JSON, request_log_of(scope))

    async def apply_template(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._reader.intake.open_body(principal, scope, receive, takes_media=True) as body:
            self._reader.begin(principal, scope)
            asked = await body.decode(lambda raw: self._chat.read(raw, scope))
            call = self._reader.call(principal, {"model": asked.model or named_model({}, scope)}, scope)
            call = self._media.check(call, asked.requests[:1])
            async with until_disconnect(receive):
                (request,) = await self._media.load(call, asked.requests[:1], body.hold)
            render = Render(request=request, count=False, tenant=principal.team)
            found = await self._ask(body, call, RENDER_PATH, render, decode_rendered, receive)
            await send_parts(send, text_parts("prompt", found.prompt or ""), JSON, request_log_of(scope))

    async def _ask(
        self,
        body: HeldBody,
        call: Call,
        path: str,
        asked: msgspec.Struct,
        decode: Callable[[bytes], ReplyT],
        receive: Receive,
    ) -> ReplyT:
        """Ask a worker and return its answer. Raises PaddockError, and ClientGone if the client leaves meanwhile."""
        async with until_disconnect(receive):
            reply = await self._queries.ask_any(call.model, "POST", path, bytes, asked)
        return await decoded_reply(body, reply, decode)


def _tokenize_of(raw: bytes, scope: Scope, team: str) -> tuple[str, Tokenize | None]:
    """Return the model's name and the request to a worker (None: no text). Raises InvalidRequest, NotSupported."""
    document = document_of(raw)
    name, body = named_model(document, scope), validated(TokenizeBody, document, ignored_of(scope))
    if body.content is None or body.content == []:
        return name, None
    content = read_native_prompt(body.content, "content")
    flags = {"add_special": body.add_special, "parse_special": body.parse_special, "with_pieces": body.with_pieces}
    return name, Tokenize(content=content, tenant=team, **flags)


def _tokens_of(raw: bytes, scope: Scope) -> tuple[str, tuple[int, ...]]:
    """Return the model's name and the tokens. Raises InvalidRequest."""
    document = document_of(raw)
    return named_model(document, scope), tuple(validated(DetokenizeBody, document, ignored_of(scope)).tokens)


async def decoded_reply(body: HeldBody, reply: bytes, decode: Callable[[bytes], ReplyT]) -> ReplyT:
    """Decode a worker's answer, on a thread if it is long. Count its bytes too: they can far exceed the body's.

    Raises InternalError, HeldTooMuch, MemoryFull, TakesTooMuch."""
    body.hold(len(reply))
    try:
        return await body.run_aside(len(reply), partial(decode, reply))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InternalError(UNREADABLE) from error


def text_parts(name: str, text: str) -> Iterator[bytes]:
    """Yield a JSON object with the one field `name: text`, at most CHARS_PER_TURN characters of the text at a time."""
    if len(text) <= CHARS_PER_TURN:
        yield _encode({name: text})
        return
    opening = b'{"%b":"' % name.encode()
    for start in range(0, len(text), CHARS_PER_TURN):
        yield opening + _encode(text[start : start + CHARS_PER_TURN])[1:-1]
        opening = b""
    yield b'"}'


def token_parts(found: Tokenized) -> Iterator[bytes]:
    """Yield `{"tokens": [...]}` in parts: tokens' numbers or, with pieces, objects of a number and its piece.

    A piece that is not valid UTF-8 by itself is written as a list of its bytes."""
    num_tokens = len(found.ids) // TOKEN_BYTES
    opening = b'{"tokens":['
    for start in range(0, num_tokens, TOKENS_PER_TURN):
        end = min(num_tokens, start + TOKENS_PER_TURN)
        tokens: list[Any] = ints_of(found.ids[TOKEN_BYTES * start : TOKEN_BYTES * end]).tolist()
        if found.pieces is not None:
            pieces = found.pieces[start:end]
            tokens = [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]
        yield opening + _encode(tokens)[1:-1]
        opening = b","
    yield (b"" if num_tokens else opening) + b"]}"


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
