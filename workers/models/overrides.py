"""Declares what settings can put in place of a model file's metadata, and of llama.cpp's choice where tensors lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

MetadataKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,127}$")]
MetadataValue = (
    bool
    | Annotated[int, Meta(ge=0, le=2**32 - 1)]
    | Annotated[float, Meta(ge=0, le=3.4e38)]
    | Annotated[str, Meta(max_length=127)]
)
"""A value of a GGUF file's metadata that llama.cpp can override: it reads whole numbers as 32 bits without a sign,
fractions as single precision (and asserts, while it computes, that some are not below 0), and texts of up to 127
bytes."""

MAX_TEXT_BYTES = 127

FIXED_METADATA = {
    "general.architecture": "the weights are of one architecture; convert the model again",
    "general.alignment": "it says where the weights lie in the file; convert the model again",
    "split.": "it says of which files the model consists; split the model again",
    "tokenizer.chat_template": "llama.cpp would not read it; set the model's `chat_template` instead",
    "tokenizer.ggml.model": "the vocabulary's texts are of one kind; convert the model again",
}
"""Beginnings of metadata's keys that `override_kv` can't have, with the reason and the remedy."""


class TensorOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Tensors that go into a type of buffer that llama.cpp would not choose for them."""

    pattern: Annotated[
        str,
        Meta(min_length=1, max_length=256, description="regular expression (ECMAScript) that a tensor's name contains"),
    ]
    buffer: Annotated[
        str, Meta(min_length=1, max_length=64, description="type of buffer, such as CPU or CUDA0; by llama.cpp's names")
    ]


def metadata_faults(override_kv: Mapping[str, MetadataValue]) -> Iterator[str]:
    """Yield which metadata can't be overridden as the setting says."""
    for key, value in override_kv.items():
        if isinstance(value, str) and (len(value.encode()) > MAX_TEXT_BYTES or "\0" in value):
            yield f"`override_kv`: the text of {key} may have {MAX_TEXT_BYTES} bytes and no NUL; shorten it"
        for begin, remedy in FIXED_METADATA.items():
            if key.startswith(begin):
                yield f"`override_kv`: {key} can't be overridden: {remedy}"
