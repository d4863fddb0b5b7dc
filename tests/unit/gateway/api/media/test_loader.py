"""Requests with media are made ready for their model: who takes them, and what their links turn out to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.api.media.attachments import LinkedMedium
from gateway.api.media.fetcher import Fetched
from gateway.api.media.loader import MediaLoader
from gateway.api.openai.bodies import StreamUsageOptions
from gateway.api.openai.requests import ChatRequest
from gateway.call import Call, Principal
from gateway.errors import InvalidRequest, NotSupported, TakesTooMuch
from tests.support.pool import heartbeat
from tests.support.sent_media import PNG, WAV, picture
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.pooled import PoolPrompt, PoolRequest
from workers.protocol.requests import GenerateRequest, Medium, Message

CALL = Call("id", Principal("key", "team", None, admin=False), "seer", "pool", 0.0, 0.0, 0.0, fallbacks=("other",))
SEES, HEARS, READS = ("text", "image"), ("text", "audio"), ("text",)


class Files:
    """Answers fetches, and notes them."""

    def __init__(self, *files: Fetched) -> None:
        self.files = dict(enumerate(files))
        self.asked: list[str] = []

    async def fetch(self, url: str, param: str, team: str, hold: Callable[[int], None]) -> Fetched:
        self.asked.append(url)
        found = self.files[int(url.rpartition("/")[2])]
        hold(len(found.data))
        return found


def loader(files: Files | None = None, max_bytes: int = 1 << 20, **inputs: tuple[tuple[str, ...], ...]) -> MediaLoader:
    """Return a loader in a fleet of these models: name -> what each of its workers takes."""
    workers = {model: tuple(beat(model, one) for one in each) for model, each in inputs.items()}
    fleet = SimpleNamespace(snapshot=SimpleNamespace(workers=workers))
    return MediaLoader(cast(Any, fleet), cast(Any, files), max_bytes)


def beat(model: str, inputs: tuple[str, ...]) -> Heartbeat:
    one = heartbeat(model)
    return msgspec.structs.replace(one, facts=msgspec.structs.replace(one.facts, inputs=cast(Any, inputs)))


def asking(*media: Medium, content: str = "abcd", places: tuple[int, ...] = ()) -> GenerateRequest:
    places = places or tuple(range(len(media)))
    return GenerateRequest(messages=(Message("user", content, media=places),), media=media)


PICTURE = Medium("picture", PNG, "messages.0.content.0", sha256(PNG).digest())
SOUND = Medium("sound", WAV, "messages.0.content.1", sha256(WAV).digest())


def link(number: int, **more: Any) -> LinkedMedium:
    return LinkedMedium("picture", b"", f"messages.0.content.{number}", url=f"https://h/{number}", **more)


def test_a_model_that_sees_takes_pictures() -> None:
    for inputs in ((SEES,), (READS, SEES), ()):
        assert loader(pool=inputs, other=(SEES,)).check(CALL, [asking(PICTURE)]) == CALL


def test_a_model_that_reads_refuses_them_by_name() -> None:
    with pytest.raises(NotSupported) as caught:
        loader(pool=(READS,), other=(HEARS,)).check(CALL, [asking(PICTURE)])
    assert caught.value.status == 501
    assert caught.value.param == PICTURE.param
    assert "`seer` reads text only" in caught.value.message
    assert "is a picture" in caught.value.message


def test_a_model_must_take_all_kinds() -> None:
    with pytest.raises(NotSupported, match="is a sound; the model `seer` reads image and text"):
        loader(pool=(SEES,), other=(READS,)).check(CALL, [asking(PICTURE, SOUND)])


def test_a_fallback_that_sees_stands_in() -> None:
    found = loader(pool=(READS,), other=(SEES,)).check(CALL, [asking(PICTURE)])
    assert (found.model, found.fallbacks) == ("other", ())
    found = loader(pool=(SEES,), other=(READS,)).check(CALL, [asking(PICTURE)])
    assert (found.model, found.fallbacks) == ("pool", ())


def test_text_is_for_all_models() -> None:
    assert loader(pool=(READS,)).check(CALL, [GenerateRequest(prompt="hi")]) is CALL


async def test_links_are_fetched_once_for_all_answers() -> None:
    files, held = Files(Fetched(PNG, "image/png")), list[int]()
    request = asking(link(0))
    one, other = await loader(files, pool=(SEES,)).load(
        CALL, (request, msgspec.structs.replace(request, n_probs=1)), held.append
    )
    assert one.media == other.media == (Medium("picture", PNG, "messages.0.content.0", sha256(PNG).digest()),)
    assert (files.asked, held, other.n_probs) == (["https://h/0"], [len(PNG)], 1)


async def test_requests_without_media_stay_as_they_are() -> None:
    requests = (GenerateRequest(prompt="a"), GenerateRequest(prompt="b"))
    assert await loader().load(CALL, requests, lambda _: None) == requests


async def test_documents_take_their_places_in_the_text() -> None:
    files = Files(Fetched(b"DOC", "text/plain"), Fetched(PNG, ""), Fetched(b'{"a":1}', "application/json"))
    media = (link(0, is_document=True), link(1, is_document=True), link(2, is_document=True), PICTURE)
    request = asking(*media, content="abcd", places=(1, 2, 2, 4))
    [found] = await loader(files, pool=(SEES,)).load(CALL, (request,), lambda _: None)
    assert found.messages[0].content == 'aDOCb{"a":1}cd'
    assert found.messages[0].media == (5, 14)
    assert [one.data for one in found.media] == [PNG, PNG]


@pytest.mark.parametrize(
    ("fetched", "is_document", "error"),
    [
        (Fetched(WAV, "audio/wav"), False, InvalidRequest),
        (Fetched(b"text", "text/plain"), False, InvalidRequest),
        (Fetched(b"", "image/png"), False, InvalidRequest),
        (Fetched(b"%PDF", "application/pdf"), True, NotSupported),
        (Fetched(b"\xff", "text/plain"), True, InvalidRequest),
    ],
)
async def test_a_link_to_something_else_is_refused(fetched: Fetched, is_document: bool, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        await loader(Files(fetched), pool=(SEES,)).load(
            CALL, (asking(link(0, is_document=is_document)),), lambda _: None
        )
    assert cast(Any, caught.value).param == "messages.0.content.0"


async def test_all_media_together_have_a_bound() -> None:
    files = Files(*(Fetched(picture(40_000, n), "image/png") for n in range(3)))
    request = asking(link(0), link(1), link(2))
    with pytest.raises(TakesTooMuch, match="PADDOCK_MAX_MEDIA_BODY_MIB"):
        await loader(files, max_bytes=100_000, pool=(SEES,)).load(CALL, (request,), lambda _: None)


async def test_no_more_is_fetched_than_all_may_have() -> None:
    files, held = Files(*(Fetched(picture(40_000, n), "image/png") for n in range(5))), list[int]()
    with pytest.raises(TakesTooMuch):
        await loader(files, max_bytes=100_000, pool=(SEES,)).load(CALL, (asking(*map(link, range(5))),), held.append)
    assert sum(held) <= 100_000


async def test_a_link_to_a_text_is_for_all_models() -> None:
    request = asking(link(0, is_document=True), places=(4,))
    files = Files(Fetched(b"DOC", "text/plain"))
    asked, call = await loader(files, pool=(READS,), other=(SEES,)).prepare(asking_of(request), CALL, ignore, None)
    assert (asked.requests[0].messages[0].content, call) == ("abcdDOC", CALL)


async def test_a_link_to_a_picture_goes_to_a_fallback_that_sees() -> None:
    request = asking(link(0, is_document=True))
    files = Files(Fetched(PNG, ""))
    asked, call = await loader(files, pool=(READS,), other=(SEES,)).prepare(asking_of(request), CALL, ignore, None)
    assert (asked.requests[0].media[0].data, call.model, call.fallbacks) == (PNG, "other", ())


def asking_of(request: GenerateRequest) -> ChatRequest:
    return ChatRequest("seer", (request,), False, StreamUsageOptions())


def ignore(_: int) -> None:
    """Count nothing."""


async def test_a_link_to_a_sound_needs_a_model_that_hears() -> None:
    asked, call = (asking(link(0, is_document=True)),), replace(CALL, fallbacks=())
    with pytest.raises(NotSupported, match="is a sound"):
        await loader(Files(Fetched(WAV, "")), pool=(SEES,)).load(call, asked, lambda _: None)


async def test_fetched_documents_are_no_longer_than_other_texts() -> None:
    files = Files(Fetched(b"x" * 600, "text/plain"), Fetched(b"x" * 600, "text/plain"))
    media = (link(0, is_document=True), link(1, is_document=True))
    for asked, most in ((asking(*media[:1]), 599), (asking(*media), 1000)):
        small = MediaLoader(cast(Any, None), cast(Any, files), max_text_chars=most)
        with pytest.raises(InvalidRequest, match="PADDOCK_MAX_BODY_BYTES"):
            await small.load(CALL, (asked,), lambda _: None)


async def test_inputs_to_embed_are_made_ready_as_messages_are() -> None:
    files = Files(Fetched(PNG, "image/png"), Fetched(b"DOC", "text/plain"))
    inputs = (
        "plain",
        PoolPrompt(text="ab", media=(1, 2)),
        PoolPrompt(messages=(Message("user", "cd", media=(0, 2)),)),
    )
    media = (link(0), PICTURE, link(1, is_document=True), SOUND)
    held: list[int] = []
    request = PoolRequest(inputs=inputs, media=media)
    found, call = await loader(files, pool=(READS,), other=(("text", "image", "audio"),)).prepare_pooled(
        request, CALL, held.append
    )
    assert call.model == "other"
    assert found.inputs == (*inputs[:2], PoolPrompt(messages=(Message("user", "DOCcd", media=(5,)),)))
    assert [one.data for one in found.media] == [PNG, PNG, WAV]
    assert sum(held) >= len(PNG) + len(b"DOC")
    with pytest.raises(NotSupported, match="the model `seer` reads text only"):
        await loader(files, pool=(READS,), other=(READS,)).prepare_pooled(request, CALL, held.append)
    with pytest.raises(TakesTooMuch):
        await loader(files, 10, pool=(("text", "image", "audio"),)).prepare_pooled(request, CALL, held.append)
    plain = PoolRequest(inputs=("a",))
    assert await loader(pool=(READS,)).prepare_pooled(plain, CALL, held.append) == (plain, CALL)
