"""Declares the keyword parameters of the methods that generate, and makes parts of messages from files. A parameter
that is None is not sent.

Sources: llama-server (tools/server/README.md and server-schema.cpp of llama.cpp) for names, defaults and meaning of the
sampling parameters; OpenAI's API reference, "Create chat completion". `cache_salt`, `priority`, `context_shift` and
`special` are Paddock's own. Paddock refuses parameters that it does not have, llama-server ignores them.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from gateway.client.answers import Message
from gateway.client.server_answers import LoraScale

Prompt = str | Sequence[int | str] | Mapping[str, Any]
"""Text, token ids, a mix of both, or llama-server's object with `prompt_string`."""

Messages = Sequence[Mapping[str, Any] | Message]
"""Turns of a conversation: dictionaries, or `Message` objects of earlier answers."""

Lora = Sequence[LoraScale | Mapping[str, Any]]
LogitBias = Mapping[str, float | bool] | Mapping[str, float] | Sequence[Sequence[Any]]


class SamplingParameters(TypedDict, total=False):
    """The parameters of sampling."""

    temperature: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    adaptive_target: float | None
    adaptive_decay: float | None
    min_keep: int | None
    samplers: Sequence[str] | str | None
    logit_bias: LogitBias | None
    seed: int | None
    n_probs: int | None
    post_sampling_probs: bool | None
    backend_sampling: bool | None


class GenerationParameters(SamplingParameters, total=False):
    """The parameters that chat and completion have in common."""

    model: str | None
    stop: Sequence[str] | str | None
    n_predict: int | None
    """Maximum number of tokens of the answer. -1: until the model ends it; 0: the prompt is only read into the cache.
    """
    ignore_eos: bool | None
    special: bool | None
    grammar: str | None
    grammar_lazy: bool | None
    grammar_triggers: Sequence[Mapping[str, Any]] | None
    preserved_tokens: Sequence[str] | None
    json_schema: Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    structured_outputs: Mapping[str, Any] | None
    cache_prompt: bool | None
    cache_salt: str | None
    id_slot: int | None
    lora: Lora | None
    priority: int | None
    speculation: bool | Literal["auto"] | None
    context_shift: bool | None
    n_keep: int | None
    n_discard: int | None
    n_cache_reuse: int | None
    n_indent: int | None
    t_max_predict_ms: int | None
    timings_per_token: bool | None
    return_tokens: bool | None
    return_progress: bool | None
    sse_ping_interval: int | None
    verbose: bool | None
    reasoning_budget_tokens: int | None
    reasoning_budget_start_tag: str | None
    reasoning_budget_end_tag: str | None
    reasoning_budget_end_tags: Sequence[str] | None
    reasoning_budget_message: str | None
    reasoning_control: bool | None
    extra_body: Mapping[str, Any] | None
    """Further parameters, which are sent as they are."""


class CompletionParameters(GenerationParameters, total=False):
    """The parameters of `complete` and `infill`."""

    n_cmpl: int | None
    response_fields: Sequence[str] | None
    """Names of the fields that the answer should have. `a/b`: field b of object a, which comes in `extra`."""


class ChatParameters(GenerationParameters, total=False):
    """The parameters of `chat.completions.create`."""

    max_tokens: int | None
    max_completion_tokens: int | None
    prediction: Mapping[str, Any] | None
    n: int | None
    stream_options: Mapping[str, bool] | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    parse_tool_calls: bool | None
    functions: Sequence[Mapping[str, Any]] | None
    function_call: str | Mapping[str, Any] | None
    reasoning_effort: str | None
    thinking_budget_tokens: int | None
    enable_thinking: bool | None
    thinking: bool | Mapping[str, Any] | None
    reasoning_format: str | None
    generation_prompt: str | None
    continue_final_message: bool | str | None
    add_generation_prompt: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: Sequence[Mapping[str, Any]] | None
    user: str | None
    metadata: Mapping[str, str] | None
    store: bool | None


_TYPES = {
    ".bmp": "image/bmp",
    ".flac": "audio/flac",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".webp": "image/webp",
}
"""Content types of endings that `mimetypes` knows only where the system has a table of its own, which images lack."""

Part = dict[str, Any]
"""A part of a message's `content`."""


def text_part(text: str) -> Part:
    """Return a part with a text."""
    return {"type": "text", "text": text}


def picture_part(source: bytes | Path | str, content_type: str = "") -> Part:
    """Return a part with a picture: its bytes, its file (a `Path`), or its URL. `content_type`: of bytes; empty: as the
    file's name says. Raises OSError."""
    if isinstance(source, str):
        return {"type": "image_url", "image_url": {"url": source}}
    data, named = _file(source)
    url = f"data:{content_type or named or 'application/octet-stream'};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def sound_part(source: bytes | Path, format: str = "") -> Part:
    """Return a part with a sound: its bytes or its file. `format`: `wav` or `mp3`; empty: as the file's name says.
    Servers that tell sounds by their first bytes, as Paddock, ignore it. Raises OSError."""
    data, _ = _file(source)
    named = source.suffix[1:].lower() if isinstance(source, Path) else ""
    sent = {"data": base64.b64encode(data).decode(), "format": format or named or "wav"}
    return {"type": "input_audio", "input_audio": sent}


def file_part(path: Path) -> Part:
    """Return a part with a file of any kind: a picture or a sound by the ending of its name, else a text.

    Raises OSError; ValueError if it is none of these."""
    kind = _type_of(path).partition("/")[0]
    if kind == "image":
        return picture_part(path)
    if kind == "audio":
        return sound_part(path)
    try:
        return text_part(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no picture, no sound and no text in UTF-8") from None


def _file(source: bytes | Path) -> tuple[bytes, str]:
    """Return a file's bytes, and the content type that its name stands for; empty: not known."""
    if isinstance(source, bytes):
        return source, ""
    return source.read_bytes(), _type_of(source)


def _type_of(path: Path) -> str:
    return _TYPES.get(path.suffix.lower()) or mimetypes.guess_type(path.name)[0] or ""


EncodingFormat = Literal["float", "base64"]
