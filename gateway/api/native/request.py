"""Reads bodies of `/completion` and `/infill` into canonical requests. A prompt may be `{"prompt_string": "..."}`.

Source of the prompts' forms: "POST /completion" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.intake.body import read_object
from gateway.api.intake.intake import attachments_of
from gateway.api.media.attachments import MAX_MEDIA, Attachments
from gateway.api.native.body import IGNORED, REFUSED, CompletionBody, GenerationBody, InfillBody, Trigger
from gateway.api.parameters.media_parts import Gallery
from gateway.api.parameters.options import (
    add_hints,
    read_lora,
    read_notices,
    read_stop,
    repeat_request,
    share_prompt_chars,
)
from gateway.api.parameters.prompts import read_prompt_object, read_prompts
from gateway.api.parameters.response_format import read_constraint
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.unsupported import read_body
from gateway.api.request_headers import named_model
from gateway.errors import InvalidRequest, NotSupported, UnsupportedParameter
from gateway.telemetry.request_log import Ignored
from workers.protocol.requests import Constraint, GenerateRequest, Infill, InfillFile, Medium, Notice, Prompt


@dataclass(frozen=True, slots=True)
class NativePrompt:
    """One prompt. With media it is a text, in which they have their places (`GenerateRequest.prompt_media`)."""

    prompt: Prompt
    media: tuple[Medium, ...] = ()
    places: tuple[int, ...] = ()


def read_native_prompts(given: Any, path: str, attachments: Attachments) -> tuple[NativePrompt, ...]:
    """Return one prompt or several. Raises InvalidRequest, NotSupported."""
    if isinstance(given, dict):
        return (_with_media(given, path, attachments),)
    # Objects are rare, and there can be a million tokens: a generator over them takes twice as long as this test.
    if not isinstance(given, list) or dict not in set(map(type, given)):
        return tuple(NativePrompt(prompt) for prompt in read_prompts(given, path))
    objects = {n: _with_media(one, f"{path}.{n}", attachments) for n, one in enumerate(given) if isinstance(one, dict)}
    prompts = read_prompts([objects[n].prompt if n in objects else one for n, one in enumerate(given)], path)
    return tuple(objects.get(n) or NativePrompt(prompt) for n, prompt in enumerate(prompts))


def read_native_prompt(given: Any, path: str) -> Prompt:
    """Return one prompt; an array is always one prompt of tokens and texts. Raises InvalidRequest, NotSupported."""
    if isinstance(given, dict) and given.get("multimodal_data"):
        message = f"`{path}.multimodal_data` is not supported: tokens are made of texts only. Leave it out."
        raise NotSupported(message, param=f"{path}.multimodal_data")
    if isinstance(given, dict):
        return _with_media(given, path, Attachments()).prompt
    return read_prompts([given] if isinstance(given, list) else given, path)[0]


def _with_media(given: dict[str, Any], path: str, attachments: Attachments) -> NativePrompt:
    """Return the prompt of an object. Raises InvalidRequest, NotSupported."""
    gallery = Gallery(attachments.max_text_chars)
    writer = read_prompt_object(given, path, attachments, gallery)
    return NativePrompt(writer.content, gallery.media, writer.places)


MAX_ANSWERS = 128
"""Maximum number of answers to one request, its prompts times `n_cmpl`; more are refused."""

WORD_TRIGGERS = (0, 1)
"""Accepted values of `type` in `grammar_triggers`: token (0) and word (1). Other types are patterns. Source:
`common_grammar_trigger_type` in common/common.h of llama.cpp."""

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed request for completions, and how its answers are to be written."""

    model: str
    requests: tuple[GenerateRequest, ...]
    """One request per answer; those with the same prompt follow each other."""
    stream: bool
    response_fields: tuple[str, ...] = ()
    """Paths of the fields that the caller wants; empty: all."""


def read_completion(raw: bytes, scope: Scope) -> CompletionRequest:
    """Return the parsed body. Raises InvalidRequest, UnsupportedParameter, NotSupported, with the parameter's path."""
    body = _read_body(CompletionBody, raw, scope, ignored_of(scope))
    prompts = read_native_prompts(body.prompt, "prompt", attachments_of(scope))
    if len(prompts) * body.n_cmpl > MAX_ANSWERS:
        message = f"{len(prompts)} prompts times `n_cmpl` are more than {MAX_ANSWERS} answers. Ask for fewer at once."
        raise InvalidRequest(message, param="n_cmpl")
    if sum(len(one.media) for one in prompts) > MAX_MEDIA:
        message = f"The prompts have more than {MAX_MEDIA} pictures and sounds together. Send several requests."
        raise InvalidRequest(message, param="prompt")
    request = _request(body)
    asked = [replace(request, prompt=one.prompt, media=one.media, prompt_media=one.places) for one in prompts]
    requests = [one for each in asked for one in repeat_request(each, body.n_cmpl)]
    return _completion_request(body, requests)


def read_infill(raw: bytes, scope: Scope) -> CompletionRequest:
    """Return the parsed body. Raises InvalidRequest, UnsupportedParameter, each naming the parameter by its path."""
    body = _read_body(InfillBody, raw, scope, ignored_of(scope))
    files = tuple(InfillFile(one.filename, one.text) for one in body.input_extra or ())
    infill = Infill(body.input_prefix, body.input_suffix, body.prompt, files)
    return _completion_request(body, repeat_request(replace(_request(body), infill=infill), body.n_cmpl))


def _read_body(kind: type[BodyT], raw: bytes, scope: Scope, ignored: Ignored) -> BodyT:
    document = read_object(raw)
    return read_body(kind, document | {"model": named_model(document, scope)}, (IGNORED, REFUSED), ignored)


def _completion_request(body: GenerationBody, requests: Sequence[GenerateRequest]) -> CompletionRequest:
    return CompletionRequest(body.model, share_prompt_chars(requests), body.stream, tuple(body.response_fields or ()))


def _request(body: GenerationBody) -> GenerateRequest:
    """Return a request without the text to continue: the part that all answers share."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    request = GenerateRequest(
        constraint=_constraint(body),
        sampling=read_sampling(body),
        max_tokens=None if body.n_predict < 0 else body.n_predict,
        n_indent=body.n_indent,
        stop=read_stop([text for text in stops if text]),
        n_probs=body.n_probs,
        post_sampling_probs=body.post_sampling_probs,
        adapters=read_lora(body),
        tell=_notices(body),
    )
    return add_hints(request, body)


def _constraint(body: GenerationBody) -> Constraint | None:
    constraint = read_constraint(body)
    if constraint is None or not body.grammar_lazy:
        return constraint
    if not body.grammar_triggers:
        message = "`grammar_lazy` needs `grammar_triggers`. Send the words that switch the grammar on."
        raise InvalidRequest(message, param="grammar_triggers")
    return replace(constraint, triggers=tuple(map(_word, range(len(body.grammar_triggers)), body.grammar_triggers)))


def _word(number: int, trigger: Trigger) -> str:
    if trigger.type not in WORD_TRIGGERS:
        path = f"grammar_triggers.{number}.type"
        message = f"`{path}` is {trigger.type}: patterns are not supported. Send words, of type 1."
        raise UnsupportedParameter(message, param=path)
    return trigger.value


def _notices(body: GenerationBody) -> tuple[Notice, ...]:
    """Return what workers send besides text. As in llama-server, streams have tokens, the last object has settings."""
    notices = read_notices(body, stream=body.stream)
    if body.stream and "tokens" not in notices:
        notices = (*notices, "tokens")
    wanted = body.response_fields
    if wanted and not any(name.startswith(("generation_settings", "prompt")) for name in wanted):
        return notices
    return (*notices, "settings")
