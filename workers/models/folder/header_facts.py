"""What is asked of each GGUF file of a folder, as the process that reads their headers answers it."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["model", "projector", "adapter", "control vector", "importance matrix", "vocabulary"]


class HeaderFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The kind of one GGUF file, or why it can't be told."""

    kind: Kind = "model"
    fault: str = ""
    """What is wrong with the file; empty: nothing, as far as its header and its length tell."""


encode_facts = msgspec.json.Encoder().encode
decode_facts = msgspec.json.Decoder(HeaderFacts).decode
