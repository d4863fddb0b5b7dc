"""Reads and answers `POST /v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a sound, as text.

The sound goes to a model that hears, as a chat of one message: an instruction, and the sound behind it. Such a model
tells no times, so what needs times is refused (subtitles) or left out (segments, words, and the sound's duration).

Sources: OpenAI's API reference, "Create transcription", "Create translation" and their stream events; the message, and
that `prompt` takes the instruction's place: `convert_transcriptions_to_chatcmpl` in tools/server/server-chat.cpp of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.types import Scope

from gateway.api.http.answers import JSON, EncodedArray, in_parts
from gateway.api.http.diagnostics import ignored_of
from gateway.api.http.streaming import DONE, data
from gateway.api.intake.body import read_object
from gateway.api.intake.form import FILE
from gateway.api.intake.intake import attachments_of
from gateway.api.media.attachments import Attachments
from gateway.api.openai.bodies import LABELS
from gateway.api.openai.logprobs import LogprobsCollector
from gateway.api.openai.writing import error_body
from gateway.api.parameters.base import Also, Body, quote
from gateway.api.parameters.options import AnswerTokens
from gateway.api.parameters.unsupported import Refusal, read_body
from gateway.call import Call
from gateway.errors import InvalidRequest, PaddockError, UnsupportedParameter
from gateway.telemetry.request_log import Ignored, RequestLog
from workers.protocol.events import CallEvent, Finished, Logprobs, Text, Usage
from workers.protocol.requests import GenerateRequest, Message, Sampling, Thinking

Task = Literal["transcribe", "translate"]

INSTRUCTIONS: Mapping[Task, str] = {
    "transcribe": "Transcribe audio to text",
    "translate": "Translate what is said in the audio into English",
}
"""What the model is told if the caller sends no `prompt`; the first is llama-server's."""

TIMED = ("srt", "vtt", "diarized_json")
"""Response formats that tell when something was said."""

TEXT = b"text/plain; charset=utf-8"
MAX_TEMPERATURE = 2.0


class TranslationBody(Body):
    file: Annotated[str, Field(description="the file of the sound")]
    model: str = ""
    prompt: str = ""
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] = 0.0
    max_tokens: Annotated[AnswerTokens | None, Also("max_completion_tokens")] = None
    response_format: Literal["json", "text", "verbose_json"] = "json"
    include: tuple[Literal["logprobs"], ...] = ()
    stream: bool = False


class TranscriptionBody(TranslationBody):
    language: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z_ -]{0,31}$")] | None = None


TRANSCRIPTION_IGNORED = {**LABELS}
TRANSCRIPTION_REFUSED: dict[str, Refusal] = {
    "chunking_strategy": Refusal("A sound goes to the model whole; leave it out.", ("auto",)),
    "known_speaker_names": Refusal("No model here tells speakers apart; leave it out.", ([],)),
    "known_speaker_references": Refusal("No model here tells speakers apart; leave it out.", ([],)),
    "timestamp_granularities": Refusal("No model here tells when something was said; leave it out.", ([],)),
}


@dataclass(frozen=True, slots=True)
class TranscriptionRequest:
    """A parsed request for the text of a sound, and how it is to be written."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    task: Task
    response_format: str
    language: str | None
    """The language of the text, as far as the caller said it; None: it is not known."""


class TranscriptionDialect:
    """Reads and writes OpenAI's transcriptions, or its translations into English."""

    def __init__(self, task: Task) -> None:
        self._task: Task = task

    def read(self, raw: bytes, scope: Scope) -> TranscriptionRequest:
        return read_transcription(raw, self._task, ignored_of(scope), attachments_of(scope))

    def stream_writer(
        self, asked: TranscriptionRequest, call: Call, request_log: RequestLog
    ) -> TranscriptionStreamWriter:
        return TranscriptionStreamWriter(with_logprobs=bool(asked.requests[0].n_probs))

    def whole_writer(
        self, asked: TranscriptionRequest, call: Call, request_log: RequestLog
    ) -> TranscriptionWholeWriter:
        return TranscriptionWholeWriter(asked)


def read_transcription(raw: bytes, task: Task, ignored: Ignored, attachments: Attachments) -> TranscriptionRequest:
    """Return a parsed form. `raw`: its fields as a JSON object, whose values are strings. `attachments`: the file.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter."""
    document = {name: _typed(name, value) for name, value in read_object(raw).items() if value != ""}
    file = document.get(FILE)
    if not isinstance(file, str):
        raise InvalidRequest("`file` is missing. Send the sound as one part of the form.", param=FILE)
    # Taken before anything else can be refused: a file that nobody takes counts as text (`Attachments.num_chars_left`).
    sound = attachments.medium(file, FILE, "sound", FILE)
    if document.get("response_format") in TIMED:
        raise UnsupportedParameter(
            f"`response_format` is {quote(document['response_format'])}: the models here hear what is said, and do not "
            "tell when or who. Send json, text or verbose_json.",
            param="response_format",
        )
    kind = TranscriptionBody if task == "transcribe" else TranslationBody
    body = read_body(kind, document, (TRANSCRIPTION_IGNORED, TRANSCRIPTION_REFUSED), ignored)
    if body.include and body.response_format != "json":
        message = f"`include` asks for probabilities, which `{body.response_format}` has no room for. Send json."
        raise InvalidRequest(message, param="include")
    spoken = body.language if isinstance(body, TranscriptionBody) else None
    instruction = body.prompt or INSTRUCTIONS[task]
    if spoken is not None:
        instruction += f" (language: {spoken})"
    request = GenerateRequest(
        messages=(Message("user", instruction, media=(len(instruction),)),),
        media=(sound,),
        thinking=Thinking(enabled=False),
        sampling=Sampling(temperature=body.temperature),
        max_tokens=None if body.max_tokens is None or body.max_tokens < 0 else body.max_tokens,
        n_probs=-1 if body.include else 0,
    )
    language = "english" if task == "translate" else spoken
    return TranscriptionRequest(body.model, (request,), body.stream, task, body.response_format, language)


_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def _typed(name: str, value: Any) -> Any:
    """Return a parameter as what it is; if its text is no such thing, as the text, which is then refused."""
    if not isinstance(value, str):
        return tuple(value) if name == "include" else value
    match name:
        case "stream":
            return _TRUTHS.get(value.lower(), value)
        case "include" | "timestamp_granularities" | "known_speaker_names" | "known_speaker_references":
            return (value,) if name == "include" else [value]
        case "temperature" | "max_tokens" | "max_completion_tokens":
            with suppress(ValueError):
                return float(value) if name == "temperature" else int(value)
    return value


class Probability(msgspec.Struct, frozen=True, gc=False):
    """A token of the text, and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


_encode = msgspec.json.Encoder().encode


class _Probabilities:
    """Holds the probabilities of tokens until their text is written."""

    def __init__(self) -> None:
        self._collector = LogprobsCollector(post_sampling=False)

    def add(self, event: Logprobs) -> None:
        self._collector.add(event)

    def take(self) -> list[Probability]:
        """Return the probabilities that are held, and hold them no longer."""
        return [Probability(one.token, one.logprob, one.bytes) for one in self._collector.take()]


class TranscriptionStreamWriter:
    """Writes a streamed text: a `transcript.text.delta` for each piece of it, and the whole in one
    `transcript.text.done`. Probabilities come with the pieces and are not repeated."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._probabilities = _Probabilities()
        self._texts: list[str] = []
        self._usage = Usage(0, 0, 0)

    def opening(self) -> bytes:
        return b""

    def chunks(self, events: list[CallEvent], choice: int) -> bytes:
        return b"".join([self._one(event) for event in events])

    def _one(self, event: CallEvent) -> bytes:
        match event:
            case Text():
                self._texts.append(event.text)
                return self._delta(event.text)
            case Logprobs():
                self._probabilities.add(event)
            case Finished():
                self._usage = event.usage
        return b""

    def _delta(self, text: str) -> bytes:
        document: dict[str, Any] = {"type": "transcript.text.delta", "delta": text}
        if self._with_logprobs:
            document["logprobs"] = self._probabilities.take()
        return data(_encode(document))

    def idle(self) -> bytes:
        return data(_encode({"type": "transcript.text.delta", "delta": ""}))

    def closing(self) -> bytes:
        text = "".join(self._texts)
        return data(_encode({"type": "transcript.text.done", "text": text, "usage": _usage_object(self._usage)})) + DONE

    def broken(self, error: PaddockError) -> bytes:
        return data(error_body(error)) + DONE


class TranscriptionWholeWriter:
    """Collects a text, and writes it in the form that the caller asked for."""

    def __init__(self, asked: TranscriptionRequest) -> None:
        self._asked = asked
        self._probabilities = _Probabilities()
        self._encoded: list[bytes] | None = [] if asked.requests[0].n_probs else None
        """The probabilities, encoded as they come; None: not wanted."""
        self._texts: list[str] = []
        self._usage = Usage(0, 0, 0)

    @property
    def content_type(self) -> bytes:
        return TEXT if self._asked.response_format == "text" else JSON

    def add(self, events: list[CallEvent], choice: int) -> None:
        for event in events:
            match event:
                case Text():
                    self._texts.append(event.text)
                    if self._encoded is not None:
                        self._encoded += map(_encode, self._probabilities.take())
                case Logprobs():
                    self._probabilities.add(event)
                case Finished():
                    self._usage = event.usage

    def parts(self) -> Iterator[bytes]:
        """Yield the answer: a JSON object, or the text alone."""
        text = "".join(self._texts)
        if self._asked.response_format == "text":
            return iter([text.encode()])
        document: dict[str, Any] = {"text": text}
        if self._asked.response_format == "verbose_json":
            language = {"language": self._asked.language} if self._asked.language else {}
            document = {"task": self._asked.task, **language, "text": text}
        if self._encoded is not None:
            document["logprobs"] = EncodedArray(self._encoded)
        return in_parts({**document, "usage": _usage_object(self._usage)})


def _usage_object(usage: Usage) -> dict[str, Any]:
    """Return the usage as transcriptions tell it. How many of the input's tokens are sound is not known here."""
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "input_token_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
