"""OpenAI's routes for the text of a sound, by OpenAI's own client, with a true worker that hears."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import openai
import pytest

from gateway.client import AsyncClient, BadRequest, Client, NotSupported
from tests.support.media_files import corners, picture_file, sound_file
from tests.support.projectors import SAMPLE_RATE, sound, write_pair
from tests.support.sent_forms import BOUNDARY, CONTENT_TYPE, form
from tests.support.stack import Process, Stack

HEARS, SEES = "hears", "sees"
MORE = {"max_tokens": 12}
"""The models' weights are random: they would go on to the end of their context."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        for alias, name in ((HEARS, "ultravox"), (SEES, "gemma3")):
            pair = write_pair(running.folder, name)
            running.worker(pair.model, alias, slots=2, ctx=1024, projector=pair.projector, wait=False)
        for alias, process in zip((HEARS, SEES), running.workers, strict=True):
            running.wait_for_worker(alias, process.name, process)
        running.gateway(max_media_mib=1)
        yield running


@pytest.fixture(scope="module")
def gateway(stack: Stack) -> Process:
    return stack.gateways[0]


@pytest.fixture
def client(stack: Stack, gateway: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=stack.key, max_retries=0) as opened:
        yield opened


def wav(seed: int = 1, seconds: float = 1.5) -> bytes:
    return sound_file(sound(seed, seconds), SAMPLE_RATE)


def named(data: bytes, name: str = "speech.wav") -> tuple[str, io.BytesIO]:
    return name, io.BytesIO(data)


def posted(stack: Stack, body: bytes, path: str = "/v1/audio/transcriptions") -> tuple[int, str, bytes]:
    """Send a form by hand. Return the status, the content type and the answer."""
    headers = {"content-type": CONTENT_TYPE.decode(), "authorization": f"Bearer {stack.key}"}
    request = urllib.request.Request(stack.gateways[0].url + path, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["content-type"], error.read()


def test_json(client: openai.OpenAI) -> None:
    answer = client.audio.transcriptions.create(file=named(wav()), model=HEARS, extra_body=MORE)
    again = client.audio.transcriptions.create(file=named(wav()), model=HEARS, extra_body=MORE)
    other = client.audio.transcriptions.create(file=named(wav(2)), model=HEARS, extra_body=MORE)
    assert answer.text == again.text != other.text, "the temperature is 0 unless given"
    usage: Any = answer.usage
    assert (usage.type, usage.output_tokens) == ("tokens", 12)
    assert usage.input_tokens > 20
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_what_a_chat_would_say(client: openai.OpenAI, stack: Stack) -> None:
    """The route is a chat of one message: the instruction, and the sound behind it."""
    answer = client.audio.transcriptions.create(file=named(wav()), model=HEARS, language="de", extra_body=MORE)
    prompt = "Transcribe audio to text (language: de)"
    fields = (("file", wav()), ("model", HEARS), ("prompt", prompt), ("max_tokens", "12"))
    status, _, body = posted(stack, form(*fields), "/audio/transcriptions")
    assert (status, json.loads(body)["text"]) == (200, answer.text)


def test_text(client: openai.OpenAI, stack: Stack) -> None:
    whole = client.audio.transcriptions.create(file=named(wav()), model=HEARS, extra_body=MORE)
    text = client.audio.transcriptions.create(file=named(wav()), model=HEARS, response_format="text", extra_body=MORE)
    assert text == whole.text
    fields = (("file", wav()), ("model", HEARS), ("response_format", "text"), ("max_tokens", "12"))
    assert posted(stack, form(*fields)) == (200, "text/plain; charset=utf-8", whole.text.encode())


def test_verbose_json(client: openai.OpenAI) -> None:
    answer: Any = client.audio.transcriptions.create(
        file=named(wav()), model=HEARS, response_format="verbose_json", language="de", extra_body=MORE
    )
    told = answer.to_dict()
    assert set(told) == {"task", "language", "text", "usage"}, "no times are known"
    assert (told["task"], told["language"]) == ("transcribe", "de")


def test_a_translation(client: openai.OpenAI, stack: Stack) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"):
        answer = client.audio.translations.create(file=named(wav()), model=HEARS, extra_body=MORE)
    heard = client.audio.transcriptions.create(file=named(wav()), model=HEARS, extra_body=MORE)
    assert answer.text
    assert answer.text != heard.text, "the instruction is another"
    fields = (("file", wav()), ("model", HEARS), ("response_format", "verbose_json"), ("max_tokens", "12"))
    for path in ("/v1/audio/translations", "/audio/translations"):
        status, _, body = posted(stack, form(*fields), path)
        told = json.loads(body)
        assert (status, told["task"], told["language"], told["text"]) == (200, "translate", "english", answer.text)


def test_streamed(client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(file=named(wav()), model=HEARS, extra_body=MORE)
    stream = client.audio.transcriptions.create(file=named(wav()), model=HEARS, stream=True, extra_body=MORE)
    *deltas, done = list(stream)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta") == done.text == whole.text
    assert done.usage is not None
    assert done.usage.output_tokens == 12


def test_probabilities(client: openai.OpenAI) -> None:
    whole = client.audio.transcriptions.create(file=named(wav()), model=HEARS, include=["logprobs"], extra_body=MORE)
    assert whole.logprobs
    assert b"".join(bytes(map(int, one.bytes or [])) for one in whole.logprobs).decode(errors="replace") == whole.text
    assert all(one.logprob is not None and one.logprob <= 0 for one in whole.logprobs)
    stream = client.audio.transcriptions.create(
        file=named(wav()), model=HEARS, include=["logprobs"], stream=True, extra_body=MORE
    )
    streamed = [one for event in stream if event.type == "transcript.text.delta" for one in event.logprobs or []]
    assert [one.token for one in streamed] == [one.token for one in whole.logprobs]


@pytest.mark.parametrize("form_of_answer", ["srt", "vtt"])
def test_subtitles_are_refused(client: openai.OpenAI, form_of_answer: Literal["srt", "vtt"]) -> None:
    with pytest.raises(openai.BadRequestError, match=r"json, text or verbose_json") as caught:
        client.audio.transcriptions.create(file=named(wav()), model=HEARS, response_format=form_of_answer)
    assert caught.value.param == "response_format"


def test_times_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="timestamp_granularities"):
        client.audio.transcriptions.create(
            file=named(wav()), model=HEARS, response_format="verbose_json", timestamp_granularities=["word"]
        )


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no sound at all, but some text" * 40, "file"),
        (wav()[:30], "file"),
        (picture_file(corners(), "PNG"), "a sound belongs there"),
        (b"", "empty"),
    ],
    ids=["text", "a cut head", "a picture", "nothing"],
)
def test_a_file_that_is_no_sound(client: openai.OpenAI, data: bytes, told: str) -> None:
    with pytest.raises(openai.BadRequestError, match=told) as caught:
        client.audio.transcriptions.create(file=named(data), model=HEARS, extra_body=MORE)
    assert caught.value.param == "file"


def test_a_cut_file(stack: Stack) -> None:
    """What is there of it is heard, or it is refused: nothing breaks."""
    data = sound_file(sound(1), SAMPLE_RATE, "FLAC", "PCM_16")
    for kept in (len(data) // 2, len(data) - 1):
        status, _, body = posted(stack, form(("file", data[:kept]), ("model", HEARS), ("max_tokens", "3")))
        told = json.loads(body)
        assert (status == 200 and told["text"]) or (status, told["error"]["param"]) == (400, "file"), told


def test_a_sound_that_is_too_long(client: openai.OpenAI) -> None:
    """Silence takes few bytes, so that the file is allowed: its cells don't fit the context, or its seconds are too
    many to be decoded."""
    for seconds, told in ((300, "context"), (3000, "seconds|s long|longer")):
        long = sound_file(np.zeros(seconds * SAMPLE_RATE, np.float32), SAMPLE_RATE, "FLAC", "PCM_16")
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            client.audio.transcriptions.create(file=named(long), model=HEARS, extra_body=MORE)
        assert caught.value.param == "file"


def test_a_file_of_too_many_bytes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="PADDOCK_MAX_MEDIA_MIB") as caught:
        client.audio.transcriptions.create(file=named(wav(1, 60.0)), model=HEARS, extra_body=MORE)
    assert (caught.value.status_code, caught.value.param) == (413, "file")


def test_a_model_that_does_not_hear(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match=SEES) as caught:
        client.audio.transcriptions.create(file=named(wav()), model=SEES, extra_body=MORE)
    assert (caught.value.status_code, caught.value.param) == (501, "file")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.audio.transcriptions.create(file=named(wav()), model="nobody")


def test_what_a_client_should_have_sent(stack: Stack) -> None:
    for fields, param in (
        ([("model", HEARS)], "file"),
        ([("file", wav()), ("model", HEARS), ("temperature", "hot")], "temperature"),
        ([("file", wav()), ("model", HEARS), ("stream", "perhaps")], "stream"),
        ([("file", wav()), ("model", HEARS), ("language", "de; and sing")], "language"),
        ([("file", wav()), ("model", HEARS), ("response_format", "yaml")], "response_format"),
        ([("file", wav()), ("model", HEARS), ("include[]", "logprobs"), ("response_format", "text")], "include"),
        ([("file", wav()), ("model", HEARS), ("chunking_strategy[type]", "server_vad")], "chunking_strategy"),
        ([("file", wav()), ("model", HEARS), ("model", SEES)], "model"),
    ):
        status, _, body = posted(stack, form(*fields))
        assert (status, json.loads(body)["error"]["param"]) == (400, param), body
    status, _, body = posted(stack, form(("file", wav()), ("model", HEARS))[: -len(BOUNDARY)])
    assert status == 400
    assert "whole form" in json.loads(body)["error"]["message"]


def test_the_log_has_neither_files_nor_their_names(stack: Stack, gateway: Process) -> None:
    body = form(("file", wav()), ("model", HEARS), ("max_tokens", "3"), ("prompt", "a-secret-prompt"))
    body = body.replace(b'filename="sound"', b'filename="a-secret-name.wav"')
    assert posted(stack, body)[0] == 200
    assert posted(stack, body.replace(b"max_tokens", b"a-secret-field"))[0] == 200
    assert "a-secret" not in gateway.text()
    assert "Traceback" not in gateway.text()


async def test_paddocks_own_client(stack: Stack, gateway: Process) -> None:
    with Client(gateway.url, stack.key) as paddock:
        heard = paddock.transcribe(wav(), model=HEARS, language="de", temperature=0.0, max_tokens=12)
        with pytest.raises(NotSupported, match=SEES):
            paddock.transcribe(wav(), model=SEES)
        with pytest.raises(BadRequest, match="response_format"):
            paddock.transcribe(wav(), model=HEARS, extra_body={"response_format": "srt"})
    assert heard.text
    assert heard.usage.total_tokens == heard.usage.input_tokens + heard.usage.output_tokens > 12
    async with AsyncClient(gateway.url, stack.key) as paddock_too:
        translated = await paddock_too.translate(wav(), model=HEARS, max_tokens=12)
        again = await paddock_too.transcribe(wav(), model=HEARS, language="de", max_tokens=12)
    assert (again.text, again.usage.output_tokens) == (heard.text, 12)
    assert translated.text != heard.text
