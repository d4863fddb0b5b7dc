"""The routes that need no engine: a text's tokens, the text of tokens, a request's prompt, the model's properties.

Work that takes longer than an instant runs on the threads of a `FairLane` (`workers.service.calls.lanes`), which serves
teams in turn. The replies are encoded there too, since the reply about a long text is long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.chat.prompts import SHORT_CHARS, Prompts, Seen
from workers.protocol.events import HTTP_STATUS, CallFailed, Failure, FailureCode
from workers.protocol.framing import marked_parts
from workers.protocol.queries import (
    DETOKENIZE_PATH,
    MAX_PIECES,
    MAX_TEXT_BYTES,
    PROPS_PATH,
    RENDER_PATH,
    TEAM_HEADER,
    TOKENIZE_PATH,
    Detokenize,
    Detokenized,
    Props,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
    decode_asker,
    decode_detokenize,
    decode_render,
    decode_tokenize,
    packed,
)
from workers.protocol.requests import Medium
from workers.service.calls.lanes import FairLane
from workers.service.routes.bodies import (
    INLINE_BYTES,
    PeerGone,
    decoded,
    encode,
    read_body,
    refusal,
    while_peer_stays,
)

MAX_RENDER_BYTES = 128 << 20
"""Maximum bytes of the body of a request to render a prompt (`Render`), the same as of a call's `Submit`."""

JOINED_AT_ONCE = 1024
"""Number of tokens whose texts are joined before the length of the whole text is checked again."""

SHORT_BYTES = SHORT_CHARS
"""Maximum bytes of a request that is answered on the event loop itself. Requests to render always go to a thread."""


class Vocabulary(Protocol):
    """The model's vocabulary; safe to use from several threads."""

    num_tokens: int

    def special_piece(self, token: int) -> bytes: ...
    def join(self, tokens: Sequence[int]) -> bytes: ...


class Texts:
    """Makes the answers of the routes. Every public method may block, and may raise CallFailed."""

    def __init__(self, vocab: Vocabulary, prompts: Prompts, *, bos_text: str = "") -> None:
        """`bos_text`: text of the token that begins every prompt; `render` shows prompts without that text."""
        self._vocab = vocab
        self._prompts = prompts
        self._bos_text = bos_text

    def tokenize(self, asked: Tokenize) -> Tokenized:
        tokens = self._prompts.mixed(asked.content, add_special=asked.add_special, parse_special=asked.parse_special)
        if not asked.with_pieces:
            return Tokenized(ids=packed(tokens))
        if len(tokens) > MAX_PIECES:
            message = f"the text has {len(tokens)} tokens, and at most {MAX_PIECES} are told with their pieces; "
            message += "send less of it at once, or leave `with_pieces` out"
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "with_pieces"))
        return Tokenized(ids=packed(tokens), pieces=tuple(map(self._vocab.special_piece, tokens)))

    def detokenize(self, asked: Detokenize) -> Detokenized:
        for position, token in enumerate(asked.tokens):
            if not 0 <= token < self._vocab.num_tokens:
                message = f"`tokens` has {token} at position {position}; this model's are 0 to "
                message += f"{self._vocab.num_tokens - 1}"
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "tokens"))
        return Detokenized(content=self._text(asked.tokens, "tokens"))

    def see(self, medium: Medium) -> Seen:
        """Return what the model reads of a picture or sound."""
        return self._prompts.see(medium)

    def render(self, asked: Render, seen: Sequence[Seen] = ()) -> Rendered:
        """Return the request as the model reads it. `seen`: what `see` returned for each of its media."""
        request = asked.request
        if not asked.count and request.infill is None and request.prompt is None and request.messages:
            return Rendered(prompt=self._shown(self._prompts.text(request)))
        prompt = self._prompts.prompt(request, seen)
        text = None
        if asked.text:
            text = request.prompt if isinstance(request.prompt, str) else self._shown(prompt.text)
            text = self._text(prompt.tokens, "prompt") if text is None else text
        return Rendered(prompt=text, num_tokens=len(prompt.tokens) if asked.count else None)

    def _shown(self, text: str | None) -> str | None:
        """Return a prompt's text as callers see it. Raises CallFailed if it is too long: a template can repeat text."""
        if text is None:
            return None
        if len(text) > MAX_TEXT_BYTES:
            message = (
                f"the prompt has {len(text)} characters, and at most {MAX_TEXT_BYTES} can be shown; send a shorter one"
            )
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "messages"))
        return text.removeprefix(self._bos_text)

    def _text(self, tokens: Sequence[int], param: str) -> str:
        """Return the text of tokens. Raises CallFailed if it is too long: a token can have dozens of bytes."""
        pieces, left = [], MAX_TEXT_BYTES
        for start in range(0, len(tokens), JOINED_AT_ONCE):
            pieces.append(self._vocab.join(tokens[start : start + JOINED_AT_ONCE]))
            left -= len(pieces[-1])
            if left < 0:
                message = f"the text of these {len(tokens)} tokens has more than {MAX_TEXT_BYTES} bytes; "
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message + "send fewer at once", param))
        return b"".join(pieces).decode("utf-8", "replace")


def _answer(message: Any) -> Response:
    """Return the response with a message. It is encoded in parts, between which the event loop runs: megabytes of line
    ends took 60 ms in one call."""
    return Response(b"".join(marked_parts(message)), media_type="application/json")


async def _team_of(request: Request, body: bytes) -> str:
    """Return the team that asks. Raises CallFailed."""
    told = request.headers.get(TEAM_HEADER)
    if told is not None:
        return unquote(told)
    if len(body) <= INLINE_BYTES:
        return decoded(decode_asker, body).tenant
    return (await asyncio.to_thread(decoded, decode_asker, body)).tenant


class TextRoutes:
    def __init__(self, texts: Texts, props: Props, lane: FairLane, media: FairLane) -> None:
        """`lane`: threads for texts; `media`: for pictures and sounds."""
        self._texts = texts
        self._props = encode(props)
        self._lane = lane
        self._media_lane = media

    def routes(self) -> list[Route]:
        return [
            Route(TOKENIZE_PATH, self.tokenize, methods=["POST"]),
            Route(DETOKENIZE_PATH, self.detokenize, methods=["POST"]),
            Route(RENDER_PATH, self.render, methods=["POST"]),
            Route(PROPS_PATH, self.props, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        return await self._respond(request, MAX_TEXT_BYTES, decode_tokenize, self._texts.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._respond(request, MAX_TEXT_BYTES, decode_detokenize, self._texts.detokenize)

    async def render(self, request: Request) -> Response:
        """Answer with a request as the model would read it. Its media are read one by one, in turns with others."""

        def respond(body: bytes) -> Response | Render:
            asked = decoded(decode_render, body)
            return asked if asked.request.media and asked.count else _answer(self._texts.render(asked))

        async def rendered(body: bytes, team: str) -> Response:
            found = await self._lane.run(team, len(body), respond, body)
            if isinstance(found, Response):
                return found
            seen = [await self._media_lane.run(team, len(body), self._texts.see, one) for one in found.request.media]
            return _answer(await self._lane.run(team, len(body), self._texts.render, found, seen))

        try:
            body = await read_body(request, MAX_RENDER_BYTES)
            team = await _team_of(request, body)
            return await while_peer_stays(request.receive, rendered(body, team))
        except PeerGone:
            return Response(status_code=HTTP_STATUS[FailureCode.WORKER_LOST])
        except CallFailed as failed:
            return refusal(failed.failure)

    async def props(self, request: Request) -> Response:
        return Response(self._props, media_type="application/json")

    async def _respond(
        self,
        request: Request,
        max_bytes: int,
        decode: Callable[[bytes], Any],
        compute: Callable[[Any], Any],
    ) -> Response:
        def respond(body: bytes) -> Response:
            return _answer(compute(decoded(decode, body)))

        try:
            body = await read_body(request, max_bytes)
            if len(body) <= SHORT_BYTES:
                return respond(body)
            team = await _team_of(request, body)
            return await while_peer_stays(request.receive, self._lane.run(team, len(body), respond, body))
        except PeerGone:
            return Response(status_code=HTTP_STATUS[FailureCode.WORKER_LOST])
        except CallFailed as failed:
            return refusal(failed.failure)
