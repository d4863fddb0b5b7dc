"""Sampling parameters as pydantic models: types and limits. The bounds are those of a catalog's default sampling.

Source of names and defaults: llama-server (tools/server/README.md of llama.cpp). Other names: `repetition_penalty` is
vLLM's, `mirostat_mode` llama-cpp-python's, `typ_p` that of llama.cpp's own settings.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Also, Body, parts_or_object, text_or_parts

MAX_BIASES = 1024
MAX_STAGES = 32
MAX_BREAKERS = 16
MAX_BREAKER_CHARS = 40
MAX_INT = 2**31 - 1
MAX_TEMPERATURE = 100

Share = Annotated[float, Field(ge=0, le=1)]
Recent = Annotated[int, Field(ge=-1, le=MAX_INT)]
Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]


class SamplingBody(Body):
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0, le=10)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Annotated[Share | None, Also("typ_p")] = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=100)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    repeat_penalty: Annotated[Annotated[float, Field(ge=0.01, le=10)] | None, Also("repetition_penalty")] = None
    repeat_last_n: Recent | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=0, le=10)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    dry_penalty_last_n: Recent | None = None
    dry_sequence_breakers: (
        Annotated[list[Breaker], Field(min_length=1, max_length=MAX_BREAKERS, fail_fast=True)] | None
    ) = None
    mirostat: Annotated[Annotated[int, Field(ge=0, le=2)] | None, Also("mirostat_mode")] = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Share | None = None
    adaptive_target: Annotated[float, Field(ge=-1, le=1)] | None = None
    adaptive_decay: Annotated[float, Field(ge=0, le=0.99)] | None = None
    min_keep: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    samplers: (
        Annotated[
            Annotated[str, Field(max_length=MAX_STAGES), Tag("<text>")]
            | Annotated[list[str], Field(max_length=MAX_STAGES, fail_fast=True), Tag("<parts>")],
            Discriminator(text_or_parts),
        ]
        | None
    ) = None
    logit_bias: (
        Annotated[
            Annotated[dict[str, Any], Field(max_length=MAX_BIASES), Tag("<object>")]
            | Annotated[list[Any], Field(max_length=MAX_BIASES, fail_fast=True), Tag("<parts>")],
            Discriminator(parts_or_object),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
