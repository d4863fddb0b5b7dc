"""The settings of drafts: where guesses at an answer's next tokens come from. The docstrings of the structs here are
texts of docs/catalog.schema.json.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

HF_PATTERN = r"^[^/\s:@]+/[^/\s:@]+(:[^/\s:@]+)?(@[^\s:@]+)?$"
HF_TEXT = "Hugging Face REPO[:QUANT][@REVISION]; a commit as revision always means the same files"


class DraftSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A second, smaller model of the same vocabulary, whose guesses a model's workers verify."""

    path: Annotated[str, Meta(min_length=1, description="GGUF file, relative to the catalog file")] | None = None
    hf: Annotated[str, Meta(pattern=HF_PATTERN, description=HF_TEXT)] | None = None
    n_gpu_layers: Annotated[int, Meta(ge=-1, description="its layers on the GPU; -1: all")] = -1
    n_max: Annotated[int, Meta(ge=1, le=32, description="most tokens that it guesses at once")] = 16

    def __post_init__(self) -> None:
        if (self.path is None) == (self.hf is None):
            raise ValueError("`draft`: give exactly one source: `path` (a GGUF file) or `hf` (REPO[:QUANT][@REVISION])")


class SpeculationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where drafts of answers come from. They make answers quicker and never change them, and are used only as far as
    they are measured to pay."""

    ngram: Annotated[
        bool,
        Meta(description="text that stood before: in the conversation, a `prediction`, earlier answers of the team"),
    ] = True
    form: Annotated[bool, Meta(description="text that an answer's schema or grammar leaves as the only one")] = True
    rollback: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="most tokens of a draft for models with recurrent layers that llama.cpp can take back, for "
            "which each slot has memory for as many states more; 0: nothing is drafted for them",
        ),
    ] = 0
    draft: DraftSpec | None = None
    """A draft model: a second, smaller one of the same vocabulary."""
