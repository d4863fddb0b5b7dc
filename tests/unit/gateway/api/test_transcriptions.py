"""What is read from the form of a transcription, and how its text is written."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from gateway.api.media.attachments import Attachments
from gateway.api.media.sieve import Cut
from gateway.api.openai.transcription import (
    INSTRUCTIONS,
    Task,
    TranscriptionDialect,
    TranscriptionRequest,
    TranscriptionStreamWriter,
    TranscriptionWholeWriter,
    read_transcription,
)
from gateway.errors import InvalidRequest, PaddockError, UnsupportedParameter, WorkerLost
from gateway.telemetry.request_log import Ignored
from tests.support.sent_media import PNG, WAV
from workers.protocol.events import Finished, FinishReason, Logprobs, Reasoning, Text, Timings, TokenLogprob, Usage
from workers.protocol.requests import Message

TOKEN = "@0123456789abcdef.0@"
END = Finished(1, FinishReason.STOP, Usage(30, 4, 8), Timings(8, 22, 1.0, 4, 1.0))


def asked(
    data: bytes = WAV, task: Task = "transcribe", ignored: Ignored | None = None, **fields: Any
) -> TranscriptionRequest:
    body = json.dumps({"file": TOKEN, "model": "m", **fields}).encode()
    files = Attachments({TOKEN: Cut(data, sha256(data).digest(), b"")})
    read = read_transcription(body, task, ignored or Ignored(), files)
    assert not files.num_chars_left, "the file is taken, whatever else is wrong"
    return read


def test_a_sound_becomes_a_chat_of_one_message() -> None:
    [request] = asked().requests
    text = INSTRUCTIONS["transcribe"]
    assert request.messages == (Message("user", text, media=(len(text),)),)
    [sound] = request.media
    assert (sound.kind, sound.data, sound.param, sound.sha256) == ("sound", WAV, "file", sha256(WAV).digest())
    assert (request.sampling.temperature, request.max_tokens, request.n_probs) == (0.0, None, 0)
    assert request.thinking.enabled is False
    [other] = asked(task="translate").requests
    assert other.messages[0].content == INSTRUCTIONS["translate"]


def test_prompt_and_language() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "Write it down"}, "Write it down"),
        ({"prompt": "", "language": ""}, INSTRUCTIONS["transcribe"]),
        ({"prompt": "Löwe 😀", "language": "de"}, "Löwe 😀 (language: de)"),
    ]
    for fields, said in cases:
        [request] = asked(**fields).requests
        assert request.messages == (Message("user", said, media=(len(said),)),)


def test_texts_of_a_form_are_read_as_what_they_are() -> None:
    read = asked(temperature="0.5", stream="True", max_completion_tokens="7", include=["logprobs"])
    [request] = read.requests
    assert (request.sampling.temperature, read.stream, request.max_tokens, request.n_probs) == (0.5, True, 7, -1)
    assert asked(include="logprobs").requests[0].n_probs == -1
    assert asked(max_tokens="-1").requests[0].max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "2.1"}, "temperature"),
        ({"temperature": ["1", "1"]}, "temperature"),
        ({"max_tokens": "1e3"}, "max_tokens"),
        ({"max_tokens": "9" * 5000}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"language": "de\nen"}, "language"),
        ({"model": ["m"]}, "model"),
        ({"include": ["words"]}, "include.0"),
        ({"include": ["logprobs"], "response_format": "text"}, "include"),
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "yaml"}, "response_format"),
        ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
        ({"timestamp_granularities": "word"}, "timestamp_granularities"),
        ({"chunking_strategy": {"type": "server_vad"}}, "chunking_strategy"),
        ({"known_speaker_names": ["Ann"]}, "known_speaker_names"),
        ({"data": PNG}, "file"),
        ({"data": b""}, "file"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedParameter)) as caught:
        asked(**fields)
    assert caught.value.param == param


def test_a_form_without_a_file() -> None:
    with pytest.raises(InvalidRequest, match="`file` is missing"):
        read_transcription(b'{"model": "m"}', "transcribe", Ignored(), Attachments())
    with pytest.raises(InvalidRequest, match="`file`"):
        read_transcription(b'{"file": ["a"]}', "transcribe", Ignored(), Attachments())


def test_what_has_no_effect_is_told() -> None:
    ignored = Ignored()
    asked(ignored=ignored, chunking_strategy="auto", surprise="1", task="translate", language="de")
    assert ignored.header == "surprise, language"


def written(read: TranscriptionRequest, *events: Any) -> tuple[bytes, bytes]:
    writer = TranscriptionWholeWriter(read)
    for event in (*events, END):
        writer.add([event], 0)
    return writer.content_type, b"".join(writer.parts())


SAID = (Reasoning(1, "hm"), Text(1, "Guten "), Text(1, "Tag", 2))


def test_whole_texts() -> None:
    kind, body = written(asked(), *SAID)
    usage = {
        "type": "tokens",
        "input_tokens": 30,
        "input_token_details": {"cached_tokens": 8},
        "output_tokens": 4,
        "total_tokens": 34,
    }
    assert (kind, json.loads(body)) == (b"application/json", {"text": "Guten Tag", "usage": usage})
    assert written(asked(response_format="text"), *SAID) == (b"text/plain; charset=utf-8", b"Guten Tag")
    _, body = written(asked(response_format="verbose_json", language="de"), *SAID)
    assert json.loads(body) == {"task": "transcribe", "language": "de", "text": "Guten Tag", "usage": usage}
    _, body = written(asked(response_format="verbose_json"), *SAID)
    assert "language" not in json.loads(body), "it is not known"


def probability(token: int, piece: bytes) -> Logprobs:
    return Logprobs(1, TokenLogprob(token, piece, -0.5), ())


def test_probabilities() -> None:
    events = (probability(1, b"Gu"), Text(1, "Gu"), probability(2, b"\xc3"), probability(3, b"\xa4"), Text(1, "ä", 2))
    told = [
        {"token": "Gu", "logprob": -0.5, "bytes": [71, 117]},
        {"token": "\ufffd", "logprob": -0.5, "bytes": [195]},
        {"token": "\ufffd", "logprob": -0.5, "bytes": [164]},
    ]
    read = asked(include=["logprobs"])
    assert json.loads(written(read, *events)[1])["logprobs"] == told
    writer = TranscriptionStreamWriter(with_logprobs=True)
    deltas = [json.loads(chunk[6:]) for event in events if (chunk := writer.chunks([event], 0))]
    assert [delta["logprobs"] for delta in deltas] == [told[:1], told[1:]]


def test_a_stream() -> None:
    writer = TranscriptionStreamWriter(with_logprobs=False)
    assert writer.opening() == b""
    assert writer.chunks([SAID[0]], 0) == b""
    first, second, last = writer.chunks(list(SAID[1:]), 0).split(b"\n\n")
    assert json.loads(first[6:]) == {"type": "transcript.text.delta", "delta": "Guten "}
    assert (json.loads(second[6:])["delta"], last) == ("Tag", b"")
    assert writer.chunks([END], 0) == b""
    done, end, _ = writer.closing().split(b"\n\n")
    document = json.loads(done[6:])
    assert (document["type"], document["text"], end) == ("transcript.text.done", "Guten Tag", b"data: [DONE]")
    assert document["usage"]["total_tokens"] == 34


def test_a_stream_that_breaks_ends_with_the_error() -> None:
    error: PaddockError = WorkerLost("It is gone. Send it again.")
    told, end, _ = TranscriptionStreamWriter(with_logprobs=False).broken(error).split(b"\n\n")
    assert json.loads(told[6:])["error"]["message"] == error.message
    assert end == b"data: [DONE]"


def test_a_dialect_writes_by_what_was_asked() -> None:
    dialect, read = TranscriptionDialect("transcribe"), asked(response_format="text")
    whole = dialect.whole_writer(read, None, None)  # type: ignore[arg-type]
    assert whole.content_type.startswith(b"text/plain")
