"""Reads raw prompts, to continue without a template: one or several texts, tokens or mixtures, or a text with media.

A mixture is an array of tokens and texts.

Sources: OpenAI's API reference, `prompt` of "Create completion"; for mixtures and for objects tools/server/README.md
and `tokenize_input_subprompt` in server-common.cpp of llama.cpp.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from gateway.api.intake.body import MAX_TOKEN, packed
from gateway.api.intake.decoding import let_loop_run
from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import quote
from gateway.api.parameters.media_parts import ContentWriter, Gallery
from gateway.errors import InvalidRequest
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


MARKER = "<__media__>"
"""The text in place of a picture or sound in a prompt: libmtmd's default, which `GET /props` tells as llama-server."""


def read_prompt_object(given: dict[str, Any], path: str, attachments: Attachments, gallery: Gallery) -> ContentWriter:
    """Return the prompt of an object: its `prompt_string`, with the media of `multimodal_data` at its markers.

    Raises InvalidRequest, NotSupported."""
    text = given.get("prompt_string")
    if not isinstance(text, str):
        message = f"`{path}.prompt_string` is {quote(text)}. Send a string."
        raise InvalidRequest(message, param=f"{path}.prompt_string")
    writer = ContentWriter(gallery, joint="")
    name, data = f"{path}.multimodal_data", given.get("multimodal_data")
    if not data:
        writer.add(text)
        return writer
    if not isinstance(data, list) or not all(isinstance(one, str) for one in data):
        raise InvalidRequest(f"`{name}` is {quote(data)}. Send an array of base64 strings.", param=name)
    num_markers = text.count(MARKER)
    if num_markers != len(data):
        message = f"`{name}` has {len(data)} files, and `prompt_string` {num_markers} markers ({MARKER}). Send as many."
        raise InvalidRequest(message, param=name)
    for n, piece in enumerate(text.split(MARKER)):
        if n:
            writer.add(attachments.medium(data[n - 1], f"{name}.{n - 1}", None, f"{name}.{n - 1}"))
        writer.add(piece)
    return writer
