"""Builds the requests of all calls that generate no text. The functions' keywords are those of the clients' methods.

`model` names one of a server's models; a server with only one model needs no name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

import gateway.client.answers as answers
import gateway.client.server_answers as server_answers
from gateway.client.answers import EmbeddingsResponse, RerankResponse, TextEmbedding, TokenizeResponse, Transcription
from gateway.client.errors import (
    AuthenticationFailed,
    ConnectionFailed,
    NotFound,
    NotReady,
    Timeout,
    Unavailable,
)
from gateway.client.parameters import EncodingFormat, Lora, Messages
from gateway.client.request import Pause, Request, Script, encode_body, encode_form
from gateway.client.server_answers import (
    HealthStatus,
    LoraAdapter,
    Model,
    Props,
    SlotErased,
    SlotInfo,
    SlotRestored,
    SlotSaved,
)

PROBE_S = 5.0
"""A request for health or readiness fails after this many seconds without a byte: a healthy server answers at once."""


def health() -> Request[HealthStatus]:
    """Ask whether the server is up. A 503 is an answer, not an error."""
    return Request("GET", "/health", server_answers.read_health, read_at=frozenset({503}), patience_s=PROBE_S)


def readiness() -> Request[None]:
    """Ask Paddock's `/ready`, which answers 503 as long as the gateway can't serve calls."""
    return Request("GET", "/ready", server_answers.read_nothing, patience_s=PROBE_S)


def metrics(*, model: str | None = None) -> Request[str]:
    """Get the metrics, as Prometheus text."""
    return Request("GET", "/metrics", server_answers.read_text, _model_query(model))


def props(*, model: str | None = None) -> Request[Props]:
    """Get the properties of the server, or of a model."""
    return Request("GET", "/props", server_answers.read_props, _model_query(model))


def set_props(properties: Mapping[str, Any] | None = None, *, model: str | None = None) -> Request[None]:
    """Change properties, if the server allows it."""
    return _post("/props", server_answers.read_nothing, {**(properties or {}), "model": model})


def list_models() -> Request[tuple[Model, ...]]:
    """List the models that the key may use."""
    return Request("GET", "/v1/models", server_answers.read_models)


def retrieve_model(model: str) -> Request[Model]:
    """Get one model that the key may use. Paddock only."""
    return Request("GET", f"/v1/models/{quote(model)}", server_answers.read_model)


def load_model(model: str) -> Request[None]:
    """Ask the server to start workers for a model."""
    return _post("/models/load", server_answers.read_nothing, {"model": model})


def unload_model(model: str) -> Request[None]:
    """Ask the server to drain a model's workers."""
    return _post("/models/unload", server_answers.read_nothing, {"model": model})


def download_model(model: str, *, machine: str | None = None) -> Request[None]:
    """Have a model of the Hugging Face hub, OWNER/NAME[:QUANT], downloaded to a machine's models folder. The answer
    comes once the machine has taken the order. `machine`: only needed where several have such folders."""
    return _post("/models", server_answers.read_nothing, {"model": model, "machine": machine})


def remove_model(model: str, *, machine: str | None = None) -> Request[None]:
    """Stop a model's download, or else remove its files from a machine's models folder. Raises NotFound if the machine
    has downloaded no such model."""
    query = {"model": model} | ({} if machine is None else {"machine": machine})
    return Request("DELETE", "/models", server_answers.read_nothing, query)


def list_slots(*, model: str | None = None, fail_on_no_slot: bool = False) -> Request[tuple[SlotInfo, ...]]:
    """List the slots. With `fail_on_no_slot`, raises Unavailable if no slot is free."""
    query = _model_query(model) | ({"fail_on_no_slot": "1"} if fail_on_no_slot else {})
    return Request("GET", "/slots", server_answers.read_slots, query)


def save_slot(id_slot: int, filename: str, *, model: str | None = None) -> Request[SlotSaved]:
    """Write the conversation in a slot to a file of the server."""
    return _slot(id_slot, "save", server_answers.read_slot_saved, filename, model)


def restore_slot(id_slot: int, filename: str, *, model: str | None = None) -> Request[SlotRestored]:
    """Read a saved conversation back into a slot."""
    return _slot(id_slot, "restore", server_answers.read_slot_restored, filename, model)


def erase_slot(id_slot: int, filename: str | None = None, *, model: str | None = None) -> Request[SlotErased]:
    """Erase the conversation in a slot; with `filename`, delete this saved file on the slot's worker instead."""
    return _slot(id_slot, "erase", server_answers.read_slot_erased, filename, model)


def list_adapters(*, model: str | None = None) -> Request[tuple[LoraAdapter, ...]]:
    """List the LoRA adapters that are loaded, with their scales."""
    return Request("GET", "/lora-adapters", server_answers.read_adapters, _model_query(model))


def set_scales(scales: Lora, *, model: str | None = None) -> Request[None]:
    """Set the adapters' default scales, for calls that name no adapters. An adapter that is left out gets scale 0."""
    body = msgspec.json.encode(list(scales))
    return Request("POST", "/lora-adapters", server_answers.read_nothing, _model_query(model), body)


def load_adapter(name: str, path: str, *, model: str | None = None) -> Request[None]:
    """Load an adapter; then calls can use its name as `model`. Paddock and vLLM only."""
    values = {"lora_name": name, "lora_path": path, "model": model}
    return _post("/v1/load_lora_adapter", server_answers.read_nothing, values)


def unload_adapter(name: str, *, model: str | None = None) -> Request[None]:
    """Unload an adapter. Paddock and vLLM only."""
    return _post("/v1/unload_lora_adapter", server_answers.read_nothing, {"lora_name": name, "model": model})


PoolInput = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or an object: `{"content": [...]}` has parts as a message has them, also pictures and sounds."""


def create_embeddings(
    input: PoolInput | Sequence[PoolInput] | None = None,
    *,
    messages: Messages | None = None,
    model: str | None = None,
    encoding_format: EncodingFormat | None = None,
    dimensions: int | None = None,
    embd_normalize: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Request[EmbeddingsResponse]:
    """Compute the embeddings of texts, token ids or objects, in OpenAI's form. `messages`: a conversation in place of
    `input`, rendered by the model's chat template."""
    values: dict[str, Any] = {"input": input, "messages": messages, "model": model, "encoding_format": encoding_format}
    values |= {"dimensions": dimensions, "embd_normalize": embd_normalize, **(extra_body or {})}
    return _post("/v1/embeddings", answers.read_embeddings, values)


def embed(
    content: PoolInput | Sequence[PoolInput],
    *,
    model: str | None = None,
    embd_normalize: int | None = None,
) -> Request[tuple[TextEmbedding, ...]]:
    """Compute embeddings with llama-server's API. `embd_normalize`: -1 none, 0 by the largest value, 1 taxicab norm,
    2 Euclidean norm (default)."""
    values = {"content": content, "model": model, "embd_normalize": embd_normalize}
    return _post("/embedding", answers.read_text_embeddings, values)


def rerank(
    query: str,
    documents: Sequence[str],
    *,
    model: str | None = None,
    top_n: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Request[RerankResponse]:
    """Score how well each document fits the query. The results are sorted, best first."""
    values = {"query": query, "documents": documents, "model": model, "top_n": top_n, **(extra_body or {})}
    return _post("/v1/rerank", answers.read_ranks, values)


def transcribe(
    sound: bytes,
    *,
    model: str | None = None,
    language: str | None = None,
    prompt: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Request[Transcription]:
    """Write down what is said in a sound: the bytes of a file, WAV, MP3, FLAC or Ogg. The model must hear."""
    values = {"model": model, "language": language, "prompt": prompt, "temperature": temperature}
    return _post_form("/v1/audio/transcriptions", {**values, "max_tokens": max_tokens, **(extra_body or {})}, sound)


def translate(
    sound: bytes,
    *,
    model: str | None = None,
    prompt: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Request[Transcription]:
    """Write down in English what is said in a sound."""
    values = {"model": model, "prompt": prompt, "temperature": temperature, "max_tokens": max_tokens}
    return _post_form("/v1/audio/translations", {**values, **(extra_body or {})}, sound)


def tokenize(
    content: str,
    *,
    model: str | None = None,
    add_special: bool = False,
    parse_special: bool = True,
    with_pieces: bool = False,
) -> Request[TokenizeResponse]:
    """Turn text into token ids; `with_pieces` adds the text of each token."""
    values = {"content": content, "model": model, "add_special": add_special, "parse_special": parse_special}
    return _post("/tokenize", answers.read_tokens, values | {"with_pieces": with_pieces})


def detokenize(tokens: Sequence[int], *, model: str | None = None) -> Request[str]:
    """Turn token ids into text."""
    return _post("/detokenize", answers.read_content, {"tokens": tokens, "model": model})


def apply_template(
    messages: Messages,
    *,
    model: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    extra_body: Mapping[str, Any] | None = None,
) -> Request[str]:
    """Return the prompt that the model's chat template makes of a conversation."""
    values: dict[str, Any] = {"messages": messages, "model": model, "tools": tools}
    values |= {"add_generation_prompt": add_generation_prompt, "chat_template_kwargs": chat_template_kwargs}
    values |= {"reasoning_effort": reasoning_effort, **(extra_body or {})}
    return _post("/apply-template", answers.read_prompt, values)


def _post(path: str, read: Any, values: Mapping[str, Any]) -> Request[Any]:
    return Request("POST", path, read, body=encode_body(values))


def _post_form(path: str, values: Mapping[str, Any], sound: bytes) -> Request[Transcription]:
    body, content_type = encode_form(values, sound)
    return Request("POST", path, answers.read_transcription, body=body, content_type=content_type)


def _model_query(model: str | None) -> dict[str, str]:
    return {} if model is None else {"model": model}


def _slot(id_slot: int, action: str, read: Any, filename: str | None, model: str | None) -> Request[Any]:
    body = encode_body({"filename": filename, "model": model})
    return Request("POST", f"/slots/{id_slot}", read, {"action": action, **_model_query(model)}, body)


def is_ready() -> Script[bool]:
    """Return whether the server takes calls; False if nothing answers. Raises ClientError if waiting would not help."""
    return (yield from _obstacle()) is None


def wait_until_ready(timeout: float, poll_interval: float) -> Script[None]:
    """Wait until the server takes calls. Both parameters are in seconds.

    Raises NotReady after `timeout` and, at once, another ClientError if waiting would not help."""
    deadline = time.monotonic() + timeout
    while (obstacle := (yield from _obstacle())) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NotReady(f"not ready within {timeout:g} s: {obstacle}")
        yield Pause(min(poll_interval, left))


def _obstacle() -> Script[str | None]:
    """Return the reason why the server takes no calls now; None: it takes them."""
    try:
        try:
            yield readiness()
        except (NotFound, AuthenticationFailed):
            # A llama-server has no such route, and asks for a key before it says so.
            state = yield health()
            return None if state.ok else state.message or state.status
    except (ConnectionFailed, Timeout, Unavailable) as error:
        return error.message
    return None
