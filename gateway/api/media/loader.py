"""Makes requests with media ready to be sent to workers: their model takes such media, and their files are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeVar, cast

from msgspec.structs import replace as replace_struct
from starlette.types import Receive

from gateway.api.dialect import RequestT
from gateway.api.intake.disconnect import until_disconnect
from gateway.api.media.attachments import (
    DEFAULT_MAX_TEXT_CHARS,
    WIDEST_CHAR,
    LinkedMedium,
    check_length,
    check_size,
    text_of,
)
from gateway.api.media.fetcher import FetchBounds, Fetched, Fetcher
from gateway.api.media.kinds import KNOWN, NAME_OF, kind_of, kind_of_type
from gateway.call import Call
from gateway.errors import InvalidRequest, NotSupported, TakesTooMuch
from gateway.registry.snapshot import FleetView
from gateway.routing.placement import MODALITY_OF
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.pooled import PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Medium, Message

VERBS: dict[str, str] = {"picture": "sees", "sound": "hears"}

LONG_BYTES = 256 << 10
"""Files of more bytes are hashed or decoded on a thread, which takes a millisecond or so for each megabyte."""

MediaRequestT = TypeVar("MediaRequestT", GenerateRequest, PoolRequest)
"""A request that may have media."""

Hold = Callable[[int], None]
Loaded = Mapping[int, str | Medium]
"""Number of a medium of a request -> the medium or text in its place."""


class MediaLoader:
    """Checks the media of requests against their models, and fetches the files that are named by links."""

    def __init__(
        self,
        fleet: FleetView,
        fetcher: Fetcher | None = None,
        max_bytes: int = 32 << 20,
        max_text_chars: int = DEFAULT_MAX_TEXT_CHARS,
    ) -> None:
        """`max_bytes`: maximum bytes of all media of one request. `max_text_chars`: maximum characters of all documents
        that are fetched for it."""
        self._max_text_chars = max_text_chars
        self._fleet = fleet
        self._fetcher = fetcher or Fetcher(FetchBounds())
        self._max_bytes = max_bytes

    def check(self, call: Call, requests: Sequence[GenerateRequest | PoolRequest]) -> Call:
        """Return the call, with those of its models that take the media of its requests. A document that is still to be
        fetched may be a text, which all take. Raises NotSupported."""
        media: dict[str, Medium] = {
            one.kind: one for request in requests for one in request.media if not _may_be_text(one)
        }
        if not media:
            return call
        workers = self._fleet.snapshot.workers
        models = [model for model in (call.model, *call.fallbacks) if _takes_all(workers.get(model, ()), media)]
        if not models:
            raise _unseen(call, media, workers.get(call.model, ()))
        if models[0] != call.model:
            call = call.on_model(models[0])
        return replace(call, fallbacks=tuple(models[1:]))

    async def prepare(self, asked: RequestT, call: Call, hold: Hold, receive: Receive | None) -> tuple[RequestT, Call]:
        """Return a request and its call with its media checked and fetched. `receive`: tells when the client leaves,
        which ends the fetching; None: others watch for that.

        Raises ClientGone, and what `check` and `load` raise."""
        if not any(request.media for request in asked.requests):
            return asked, call
        call = self.check(call, asked.requests)
        if receive is None:
            requests = await self.load(call, asked.requests, hold)
        else:
            async with until_disconnect(receive):
                requests = await self.load(call, asked.requests, hold)
        # A document may have turned out to be a picture or a sound.
        return replace(cast(Any, asked), requests=requests), self.check(call, requests)

    async def prepare_pooled(self, request: PoolRequest, call: Call, hold: Hold) -> tuple[PoolRequest, Call]:
        """Return a request for pooled work and its call as `prepare` does; others watch whether the client leaves."""
        if not request.media:
            return request, call
        request = await self._with_files(self.check(call, (request,)), request, hold)
        return request, self.check(call, (request,))

    async def load(self, call: Call, requests: Sequence[GenerateRequest], hold: Hold) -> tuple[GenerateRequest, ...]:
        """Return the requests with all files that their media link to. `hold` counts the bytes that are fetched.

        Raises NotSupported, InvalidRequest, and what `hold` raises."""
        done: dict[int, GenerateRequest] = {}
        ready: list[GenerateRequest] = []
        for request in requests:
            if not request.media:
                ready.append(request)
                continue
            same = done.get(id(request.media))
            if same is None:
                same = done[id(request.media)] = await self._with_files(call, request, hold)
            parts = {"messages": same.messages, "media": same.media, "prompt": same.prompt}
            ready.append(request if same is request else replace_struct(request, **parts))
        return tuple(ready)

    async def _with_files(self, call: Call, request: MediaRequestT, hold: Hold) -> MediaRequestT:
        linked = {n: one for n, one in enumerate(request.media) if isinstance(one, LinkedMedium)}
        num_bytes = sum(len(one.data) for one in request.media)

        def hold_within(num_more: int) -> None:
            nonlocal num_bytes
            num_bytes += num_more
            self._check_all(num_bytes, request)
            hold(num_more)

        self._check_all(num_bytes, request)
        if linked:
            try:
                async with asyncio.TaskGroup() as tasks:
                    team = call.principal.team
                    coming = {n: tasks.create_task(self._file(one, team, hold_within)) for n, one in linked.items()}
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
            loaded = {n: task.result() for n, task in coming.items()}
            num_chars = sum(len(one) for one in loaded.values() if isinstance(one, str))
            check_length(num_chars, self._max_text_chars, next(iter(linked.values())).param)
            if num_chars:
                hold(WIDEST_CHAR * num_chars)
            request = _with_loaded(request, loaded)
            self.check(call, (request,))
        return request

    def _check_all(self, num_bytes: int, request: GenerateRequest | PoolRequest) -> None:
        """Raise TakesTooMuch if a request's files are too large together."""
        if num_bytes > self._max_bytes:
            raise TakesTooMuch(
                f"The pictures and sounds have {num_bytes} bytes together; one request may have {self._max_bytes}. "
                "Send fewer or smaller ones, or have the operator raise PADDOCK_MAX_MEDIA_BODY_MIB.",
                param=request.media[-1].param,
            )

    async def _file(self, linked: LinkedMedium, team: str, hold: Hold) -> str | Medium:
        """Fetch a file. Return it as a medium, or, where a document may be, as the text that it is."""
        fetched = await self._fetcher.fetch(linked.url, linked.param, team, hold)
        if linked.is_document:
            check_length(0 if kind_of(fetched.data) else len(fetched.data), self._max_text_chars, linked.param)
        return await _medium_of(fetched, linked)


async def _medium_of(fetched: Fetched, linked: LinkedMedium) -> str | Medium:
    param, data = linked.param, fetched.data
    check_size(data, len(data), param)
    kind = kind_of(data) or kind_of_type(fetched.content_type)
    if linked.is_document and kind is None:
        if len(data) <= LONG_BYTES:
            return text_of(data, fetched.content_type, param)
        return await asyncio.to_thread(text_of, data, fetched.content_type, param)
    if kind is None or (kind != linked.kind and not linked.is_document):
        wanted = KNOWN if linked.is_document else NAME_OF[linked.kind]
        raise InvalidRequest(f"`{param}`: the file at its URL is not what belongs there: {wanted}.", param=param)
    digest = await asyncio.to_thread(sha256, data) if len(data) > LONG_BYTES else sha256(data)
    return Medium(kind, data, param, digest.digest())


def _with_loaded(request: MediaRequestT, loaded: Loaded) -> MediaRequestT:
    """Return the request with the files in their places: media, or texts within the messages or inputs."""
    media: list[Medium] = []
    for number, medium in enumerate(request.media):
        found = loaded.get(number, medium)
        if isinstance(found, Medium):
            media.append(found)
    files = _Files(loaded)
    if isinstance(request, GenerateRequest):
        return replace_struct(request, messages=tuple(map(files.message, request.messages)), media=tuple(media))
    inputs = [files.input(one) if isinstance(one, PoolPrompt) else one for one in request.inputs]
    return replace_struct(request, inputs=tuple(inputs), media=tuple(media))


class _Files:
    """Puts the files that were fetched for a request into its texts, one after the other."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._first = 0
        """Number of the next text's first medium."""

    def message(self, message: Message) -> Message:
        content, places = self._text(message.content or "", message.media)
        return message if places == message.media else replace_struct(message, content=content, media=places)

    def input(self, one: PoolPrompt) -> PoolPrompt:
        text, places = self._text(one.text, one.media)
        return replace_struct(one, text=text, media=places, messages=tuple(map(self.message, one.messages)))

    def _text(self, text: str, media: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return a text with those of its media that turned out to be documents in it, and the places of the others."""
        numbers = range(self._first, self._first + len(media))
        self._first = numbers.stop
        parts: list[str] = []
        places: list[int] = []
        start = num_more = 0
        for number, place in zip(numbers, media, strict=True):
            parts.append(text[start:place])
            start = place
            found = self._loaded.get(number)
            if isinstance(found, str):
                parts.append(found)
                num_more += len(found)
            else:
                places.append(place + num_more)
        return "".join((*parts, text[start:])), tuple(places)


def _may_be_text(medium: Medium) -> bool:
    return isinstance(medium, LinkedMedium) and medium.is_document


def _takes_all(beats: Iterable[Heartbeat], kinds: Iterable[str]) -> bool:
    """Return whether a model takes media of all these kinds. Without workers, nobody knows: they may come."""
    inputs = [beat.facts.inputs for beat in beats]
    wanted = {MODALITY_OF[kind] for kind in kinds}
    return not inputs or any(wanted.issubset(one) for one in inputs)


def _unseen(call: Call, media: Mapping[str, Medium], beats: Iterable[Heartbeat]) -> NotSupported:
    """Return the error for media that none of the call's models takes."""
    inputs = {modality for beat in beats for modality in beat.facts.inputs}
    lacking = [one for one in media.items() if MODALITY_OF[one[0]] not in inputs]
    kind, medium = next(iter(lacking or media.items()))
    reads = "text only" if inputs <= {"text"} else " and ".join(sorted(inputs))
    return NotSupported(
        f"`{medium.param}` is a {kind}; the model `{call.alias}` reads {reads}. Send text parts, or name a model that "
        f"{VERBS[kind]} (see GET /v1/models).",
        param=medium.param,
    )
