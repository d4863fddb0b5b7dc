"""Reads raw prompts (to continue without a template) and inputs to embed: one or several texts, tokens or mixtures.

A mixture is an array of tokens and texts. An input to embed can also be an object with a text in it.

Sources: OpenAI's API reference, `prompt` of "Create completion" and `input` of "Create embeddings"; for mixtures
tools/server/README.md and `tokenize_input_subprompt` in server-common.cpp of llama.cpp, and for objects with `content`
its tests of embeddings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from gateway.api.intake.body import MAX_TOKEN, packed
from gateway.api.intake.decoding import let_loop_run
from gateway.api.parameters.base import quote
from gateway.api.parameters.media_parts import MEDIA, UNSEEN
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.pooled import PoolInput
from workers.protocol.requests import Prompt

MAX_PROMPTS = 128

FORMS = "a string, an array of tokens, or an array of such prompts"


def read_prompts(value: Any, path: str = "prompt") -> tuple[Prompt, ...]:
    """Return the prompts. An array with a token in it is one prompt, any other an array of prompts.

    As in llama-server, tokens of a mixture are taken as they are, and its texts tokenised. Raises InvalidRequest."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise InvalidRequest(f"`{path}` is {quote(value)}. Send {FORMS}.", param=path)
    if not value:
        raise InvalidRequest(f"`{path}` is empty. Send {FORMS}.", param=path)
    if any(type(item) is int for item in value):
        return (read_tokens(value, path),)
    if len(value) > MAX_PROMPTS:
        message = f"`{path}` has {len(value)} prompts; one request takes {MAX_PROMPTS}. Send several requests."
        raise InvalidRequest(message, param=path)
    return tuple(_one(item, f"{path}.{n}") for n, item in enumerate(value))


def _one(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | array) or not value:
        given = "an empty array" if value == [] else quote(value)
        raise InvalidRequest(f"`{path}` is {given}. Send a string or an array of tokens.", param=path)
    return read_tokens(value, path)


def read_tokens(items: Sequence[Any], path: str) -> Sequence[int | str]:
    """Return the items: an array of ints if all are tokens, else a tuple of tokens and texts. Raises InvalidRequest."""
    ids = packed(items)
    let_loop_run()
    if ids is not None:
        return ids
    for n, item in enumerate(items):
        if type(item) is int and 0 <= item <= MAX_TOKEN:
            continue
        if not isinstance(item, str):
            message = f"`{path}.{n}` is {quote(item)}. Send a token's number (0 to {MAX_TOKEN}) or a text."
            raise InvalidRequest(message, param=f"{path}.{n}")
    return tuple(items)


MAX_INPUTS = 2048
INPUT_FORMS = "a string, an array of tokens, an object with `prompt_string` or `content`, or an array of such inputs"


def read_pool_inputs(value: Any, path: str) -> tuple[PoolInput, ...]:
    """Return the inputs; an array with a token in it is one input. Raises InvalidRequest, NotSupported."""
    if value is None:
        raise InvalidRequest(f"`{path}` is missing. Send {INPUT_FORMS}.", param=path)
    if not isinstance(value, list):
        return (_one_input(value, path),)
    if not value:
        raise InvalidRequest(f"`{path}` is empty. Send {INPUT_FORMS}.", param=path)
    if any(type(item) is int for item in value):
        return (read_tokens(value, path),)
    if len(value) > MAX_INPUTS:
        message = f"`{path}` has {len(value)} items; one request takes {MAX_INPUTS}. Send several requests."
        raise InvalidRequest(message, param=path)
    return tuple(_one_input(item, f"{path}.{n}") for n, item in enumerate(value))


def _one_input(value: Any, path: str) -> PoolInput:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _of_object(value, path)
    if not isinstance(value, list | array) or not value:
        given = "an empty array" if value == [] else quote(value)
        raise InvalidRequest(f"`{path}` is {given}. Send {INPUT_FORMS}.", param=path)
    return read_tokens(value, path)


def _of_object(value: dict[str, Any], path: str) -> PoolInput:
    if value.get("multimodal_data"):
        message = f"`{path}.multimodal_data` is not supported: vectors are made of texts only. Leave it out."
        raise NotSupported(message, param=f"{path}.multimodal_data")
    if "prompt_string" in value:
        text = value["prompt_string"]
        if not isinstance(text, str):
            message = f"`{path}.prompt_string` is {quote(text)}. Send a string."
            raise InvalidRequest(message, param=f"{path}.prompt_string")
        return text
    parts = value.get("content")
    if not isinstance(parts, list) or not parts:
        message = f"`{path}` has no text. Send `prompt_string`, or `content` with parts of type `text`."
        raise InvalidRequest(message, param=path)
    return "".join(_text_of(part, f"{path}.content.{n}") for n, part in enumerate(parts))


def _text_of(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA or kind in UNSEEN:
        raise NotSupported(f"`{path}` is of type {quote(kind)}; vectors are made of texts only.", param=path)
    if kind != "text" or not isinstance(part.get("text"), str):
        message = f'`{path}` is not a text part. Send parts such as {{"type": "text", "text": "..."}}.'
        raise InvalidRequest(message, param=path)
    return str(part["text"])
