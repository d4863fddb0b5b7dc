"""The settings of how a model generates: the sampling of callers who do not say, and where drafts of answers come from.

The docstrings of the structs of drafts are texts of docs/catalog.schema.json.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from workers.protocol.requests import SamplerName, Sampling

HF_PATTERN = r"^[^/\s:@]+/[^/\s:@]+(:[^/\s:@]+)?(@[^\s:@]+)?$"
HF_TEXT = "Hugging Face REPO[:QUANT][@REVISION]; a commit as revision always means the same files"

Breaker = Annotated[str, Meta(min_length=1, max_length=40)]


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling for callers who do not say, by llama.cpp's names; the bounds are those of a caller's request."""

    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    dynatemp_range: Annotated[float, Meta(ge=0, le=100, description="0 is off")] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 or below keeps all tokens")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(ge=0, le=1, description="1 is off")] | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100, description="0 or below is off")] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1, description="0 is off")] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1, description="above 0.5 is off")] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=10, description="1 is off")] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 is off, -1 the whole context")] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100, description="0 is off")] | None = None
    dry_base: Annotated[float, Meta(ge=0, le=10, description="below 1 stands for 1.75")] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    dry_penalty_last_n: (
        Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 is off, -1 the whole context")] | None
    ) = None
    dry_sequence_breakers: (
        Annotated[tuple[Breaker, ...], Meta(min_length=1, max_length=16, description="runs do not reach across these")]
        | None
    ) = None
    mirostat: Annotated[int, Meta(ge=0, le=2, description="0 is off, else the version")] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] | None = None
    adaptive_target: Annotated[float, Meta(ge=-1, le=1, description="below 0 is off")] | None = None
    adaptive_decay: Annotated[float, Meta(ge=0, le=0.99)] | None = None
    min_keep: Annotated[int, Meta(ge=0, le=2**31 - 1, description="filters leave at least so many")] | None = None
    samplers: (
        Annotated[tuple[SamplerName, ...], Meta(max_length=32, description="the stages and their order, each once")]
        | None
    ) = None
    seed: Annotated[int, Meta(ge=-1, le=2**32 - 1, description="-1 draws one at random for each call")] | None = None

    def __post_init__(self) -> None:
        names = self.samplers or ()
        if twice := next((name for n, name in enumerate(names) if name in names[:n]), None):
            raise ValueError(f"`samplers` names {twice} a second time; name each sampler once")

    def sampling(self) -> Sampling:
        """Return the parameters for the engine. A seed of -1 is left out: then the engine draws a random seed."""
        values = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        if self.seed == -1:
            del values["seed"]
        return Sampling(**values)


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
