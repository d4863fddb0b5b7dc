"""Reads inputs to embed: one or several texts, tokens or mixtures of both, and texts with pictures or sounds in them.

Sources: OpenAI's API reference, `input` of "Create embeddings"; for mixtures and for objects with `prompt_string`
`tokenize_input_subprompt` in server-common.cpp of llama.cpp, and for objects with `content` its tests of embeddings.
"""

from __future__ import annotations

from array import array
from typing import Any

from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import quote
from gateway.api.parameters.media_parts import MEDIA, ContentWriter, Gallery, read_media_part, refuse_unseen
from gateway.api.parameters.messages import Part
from gateway.api.parameters.prompts import read_prompt_object, read_tokens
from gateway.errors import InvalidRequest
from workers.protocol.pooled import PoolInput, PoolPrompt
from workers.protocol.requests import Medium

MAX_INPUTS = 2048
INPUT_FORMS = (
    "a string, an array of tokens, an object with `prompt_string` (and `multimodal_data`) or `content`, or an array of "
    "such inputs"
)


def read_pool_inputs(
    value: Any, path: str, attachments: Attachments
) -> tuple[tuple[PoolInput, ...], tuple[Medium, ...]]:
    """Return the inputs and their media. An array with a token in it is one input.

    Raises InvalidRequest, NotSupported."""
    if value is None:
        raise InvalidRequest(f"`{path}` is missing. Send {INPUT_FORMS}.", param=path)
    reader = _Reader(attachments)
    if not isinstance(value, list):
        return (reader.input(value, path),), reader.gallery.media
    if not value:
        raise InvalidRequest(f"`{path}` is empty. Send {INPUT_FORMS}.", param=path)
    if any(type(item) is int for item in value):
        return (read_tokens(value, path),), ()
    if len(value) > MAX_INPUTS:
        message = f"`{path}` has {len(value)} items; one request takes {MAX_INPUTS}. Send several requests."
        raise InvalidRequest(message, param=path)
    inputs = tuple(reader.input(item, f"{path}.{n}") for n, item in enumerate(value))
    return inputs, reader.gallery.media


class _Reader:
    """Reads the inputs of one request, one after the other."""

    def __init__(self, attachments: Attachments) -> None:
        self.gallery = Gallery(attachments.max_text_chars)
        self._attachments = attachments

    def input(self, value: Any, path: str) -> PoolInput:
        """Return one input. Raises InvalidRequest, NotSupported."""
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            writer = self._written(value, path)
            places = writer.places
            return PoolPrompt(text=writer.content, media=places) if places else writer.content
        if not isinstance(value, list | array) or not value:
            given = "an empty array" if value == [] else quote(value)
            raise InvalidRequest(f"`{path}` is {given}. Send {INPUT_FORMS}.", param=path)
        return read_tokens(value, path)

    def _written(self, value: dict[str, Any], path: str) -> ContentWriter:
        if "prompt_string" in value:
            return read_prompt_object(value, path, self._attachments, self.gallery)
        parts = value.get("content")
        if not isinstance(parts, list) or not parts:
            message = f"`{path}` has no text. Send `prompt_string`, or `content` with parts of type `text` or others."
            raise InvalidRequest(message, param=path)
        writer = ContentWriter(self.gallery, joint="")
        for n, part in enumerate(parts):
            writer.add(self._part(part, f"{path}.content.{n}"))
        return writer

    def _part(self, part: Any, path: str) -> str | Medium:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in MEDIA:
            fields = Part.model_construct(**{name: part.get(name) for name in Part.model_fields})
            return self.gallery.counted(read_media_part(fields, path, self._attachments), path)
        if isinstance(kind, str):
            refuse_unseen(kind, path)
        if kind != "text" or not isinstance(part.get("text"), str):
            message = f'`{path}` is not a text part. Send parts such as {{"type": "text", "text": "..."}}.'
            raise InvalidRequest(message, param=path)
        return str(part["text"])
