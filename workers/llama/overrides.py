"""Puts the metadata of the setting `override_kv` in place of a model file's: as llama.cpp takes it, and in the header
that the worker reads itself, so that both see the same model.

Source: `llama_model_kv_override` in llama.h, and `GGUFMeta` in llama-model-loader.cpp of llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.gguf import GgufHeader
from workers.llama.native import ModelError
from workers.models.overrides import MetadataValue
from workers.models.spec import MAX_CTX

Overrides = Mapping[str, MetadataValue]

_INT, _FLOAT, _BOOL, _STR = range(4)
"""`llama_model_kv_override_type`."""

_TAGS = {bool: _BOOL, int: _INT, float: _FLOAT, str: _STR}
_FIELDS = ("val_i64", "val_f64", "val_bool", "val_str")
_WORDS = ("a whole number", "a number with a fraction", "true or false", "a text")

_GGUF_FLOATS, _GGUF_BOOL, _GGUF_STRING, _GGUF_ARRAY = (6, 12), 7, 8, 9


def native_overrides(values: Overrides) -> ctypes.Array[Any] | None:
    """Return the overrides as llama.cpp takes them, an entry without a key ending the list; None: there are none. Keep
    the array until the model is loaded."""
    if not values:
        return None
    entries: Any = (c.llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(entries, values.items(), strict=False):
        tag = _TAGS[type(value)]
        entry.tag, entry.key = tag, key.encode()
        setattr(entry.value, _FIELDS[tag], value.encode() if isinstance(value, str) else value)
    return entries  # type: ignore[no-any-return]


def fitted_overrides(header: GgufHeader, values: Overrides) -> Overrides:
    """Return the overrides with whole numbers as floats where the file has a float: Helm writes 10000.0 as 10000.

    Raises ModelError for a value of another type than the file's, which llama.cpp would leave out with a warning."""
    arch = header.text("general.architecture") or ""
    fitted: dict[str, MetadataValue] = {}
    for key, given in values.items():
        kind = header.types.get(key)
        value = float(given) if kind in _GGUF_FLOATS and type(given) is int else given
        if kind == _GGUF_ARRAY:
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is a list, and llama.cpp overrides single values only; "
                "remove it"
            )
        if kind is not None and _TAGS[type(value)] != (wanted := _tag_of(kind)):
            raise wrong_type(header, key, value, wanted)
        if key == f"{arch}.context_length" and not 0 < value <= MAX_CTX:  # type: ignore[operator]
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is {value} and may be 1 to {MAX_CTX:,} tokens; correct it"
            )
        fitted[key] = value
    return fitted


def wrong_type(header: GgufHeader, key: str, value: MetadataValue, wanted: int) -> ModelError:
    """Return the error for a value whose type is not the one, by its tag, that llama.cpp reads under this key."""
    return ModelError(
        f"{header.path}: llama.override_kv: {key} must be {_WORDS[wanted]}, and {json.dumps(value)} is "
        f"{_WORDS[_TAGS[type(value)]]}; write it as the other"
    )


def _tag_of(kind: int) -> int:
    if kind in _GGUF_FLOATS:
        return _FLOAT
    return {_GGUF_BOOL: _BOOL, _GGUF_STRING: _STR}.get(kind, _INT)


def overridden(header: GgufHeader, values: Overrides) -> GgufHeader:
    """Return the header with the overrides in place of the file's values."""
    return replace(header, metadata={**header.metadata, **values}) if values else header


def check_token_ids(header: GgufHeader, values: Overrides, num_tokens: int) -> None:
    """Raise ModelError for a special token that the vocabulary has not: llama.cpp would take its own instead."""
    for key, value in values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_id") and type(value) is int and value >= num_tokens:
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is {value}, and the vocabulary has tokens 0 to "
                f"{num_tokens - 1}; name one of them"
            )
