"""Reads inputs to embed: a text, tokens, both in turn, an object with one of them, or several of these.

Source: OpenAI's API reference, `input` of "Create embeddings"; `tokenize_input_subprompt` in server-common.cpp of
llama.cpp, and its tests of embeddings for objects with `content`.
"""

from __future__ import annotations

from typing import Any

from gateway.api.parameters.faults import shown
from gateway.api.parameters.messages import MEDIA
from gateway.api.parameters.prompts import read_tokens
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.pooled import PoolInput

MAX_INPUTS = 2048
FORMS = "a string, an array of tokens, an object with `prompt_string` or `content`, or an array of such inputs"


def read_pool_inputs(value: Any, path: str) -> tuple[PoolInput, ...]:
    """Return one input or several; an array with a token in it is one. Raises InvalidRequest, NotSupported."""
    if value is None:
        raise InvalidRequest(f"`{path}` is missing. Send {FORMS}.", param=path)
    if not isinstance(value, list):
        return (_one(value, path),)
    if not value:
        raise InvalidRequest(f"`{path}` is empty. Send {FORMS}.", param=path)
    if any(type(item) is int for item in value):
        return (read_tokens(value, path),)
    if len(value) > MAX_INPUTS:
        message = f"`{path}` has {len(value)} items; one request takes {MAX_INPUTS}. Send several requests."
        raise InvalidRequest(message, param=path)
    return tuple(_one(item, f"{path}.{n}") for n, item in enumerate(value))


def _one(value: Any, path: str) -> PoolInput:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _of_object(value, path)
    if not isinstance(value, list) or not value:
        given = "an empty array" if value == [] else shown(value)
        raise InvalidRequest(f"`{path}` is {given}. Send {FORMS}.", param=path)
    return read_tokens(value, path)


def _of_object(value: dict[str, Any], path: str) -> PoolInput:
    if value.get("multimodal_data"):
        message = f"`{path}.multimodal_data` is not supported: the models here read text. Leave it out."
        raise NotSupported(message, param=f"{path}.multimodal_data")
    if "prompt_string" in value:
        text = value["prompt_string"]
        if not isinstance(text, str):
            message = f"`{path}.prompt_string` is {shown(text)}. Send a string."
            raise InvalidRequest(message, param=f"{path}.prompt_string")
        return text
    parts = value.get("content")
    if not isinstance(parts, list) or not parts:
        message = f"`{path}` has no text. Send `prompt_string`, or `content` with parts of type `text`."
        raise InvalidRequest(message, param=path)
    return "".join(_text_of(part, f"{path}.content.{n}") for n, part in enumerate(parts))


def _text_of(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA:
        raise NotSupported(f"`{path}` is of type {shown(kind)}; the models here read text only.", param=path)
    if kind != "text" or not isinstance(part.get("text"), str):
        message = f'`{path}` is not a text part. Send parts such as {{"type": "text", "text": "..."}}.'
        raise InvalidRequest(message, param=path)
    return str(part["text"])
