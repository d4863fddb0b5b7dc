"""Reads sampling parameters, a pydantic model, into the canonical `Sampling`.

The limits are those of a catalog's default sampling. Source of names and defaults: llama-server
(tools/server/README.md of llama.cpp). Synonyms: `repetition_penalty` is vLLM's, `mirostat_mode` llama-cpp-python's,
`typ_p` that of llama.cpp's own settings.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Also, Body, parts_or_object, quote, text_or_parts
from gateway.errors import InvalidRequest
from workers.protocol.requests import Bias, SamplerName, Sampling

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


NUM_SEEDS = 2**32 - 1
"""Number of seeds that can be drawn: 0 to NUM_SEEDS - 1. The seed NUM_SEEDS itself tells llama.cpp to draw one."""

MAX_BIAS = 100
LEAST_BIAS = 1e-45
"""A bias nearer to 0 than this becomes 0, as in a worker's 32-bit floats: numbers so small can be slow to parse."""
MAX_BIAS_CHARS = 512
MAX_ALL_BIAS_CHARS = 16_384
"""Maximum characters, in all, of the texts in `logit_bias`; more are refused. A worker tokenises each text."""

MAX_ALL_BREAKER_CHARS = 128
"""Maximum characters of all `dry_sequence_breakers`; more are refused. A worker searches its vocabulary for each one:
10 ms for 150,000 tokens."""

INITIALS: dict[str, SamplerName] = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
"""llama-server's letter -> sampler, from common_sampler_type_to_chr in common/sampling.cpp of llama.cpp."""

NAMES: tuple[SamplerName, ...] = get_args(SamplerName)
_ALIASES: dict[str, SamplerName] = {
    **{name: name for name in NAMES},
    **{name.replace("_", "-"): name for name in NAMES},
    **{name.replace("_", ""): name for name in NAMES},
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
}
_LISTS = frozenset({"dry_sequence_breakers", "samplers", "logit_bias", "seed"})
_PLAIN = tuple(name for name in Sampling.__struct_fields__ if name not in _LISTS)


def read_sampling(body: SamplingBody) -> Sampling:
    """Return the sampling parameters. Raises InvalidRequest."""
    breakers = body.dry_sequence_breakers
    return Sampling(
        **{name: getattr(body, name) for name in _PLAIN},
        dry_sequence_breakers=None if breakers is None else _breakers(breakers),
        samplers=None if body.samplers is None else _stages(body.samplers),
        logit_bias=_check_lengths(_biases(body.logit_bias)) if body.logit_bias else None,
        # -1 asks for a random seed even if the catalog has a default seed, which None would select.
        seed=secrets.randbelow(NUM_SEEDS) if body.seed == -1 else body.seed,
    )


def _stages(asked: str | list[str]) -> tuple[SamplerName, ...]:
    known: dict[str, SamplerName] = INITIALS if isinstance(asked, str) else _ALIASES
    stages: list[SamplerName] = []
    for n, word in enumerate(asked):
        stage = known.get(word if isinstance(asked, str) else word.lower())
        if stage is None:
            path, those = ("samplers", INITIALS) if isinstance(asked, str) else (f"samplers.{n}", NAMES)
            message = f"`{path}` has {quote(word)}, which is no sampler. Send some of: {', '.join(those)}."
            raise InvalidRequest(message, param=path)
        if stage in stages:
            path = "samplers" if isinstance(asked, str) else f"samplers.{n}"
            message = f"`{path}` names {stage} a second time. Name each sampler once."
            raise InvalidRequest(message, param=path)
        stages.append(stage)
    return tuple(stages)


def _breakers(asked: list[str]) -> tuple[str, ...]:
    """Return `dry_sequence_breakers` without repeats. Raises InvalidRequest if they have too many characters in all."""
    num_chars = sum(map(len, set(asked)))
    if num_chars > MAX_ALL_BREAKER_CHARS:
        message = f"`dry_sequence_breakers` have {num_chars} characters. Send at most {MAX_ALL_BREAKER_CHARS} in all."
        raise InvalidRequest(message, param="dry_sequence_breakers")
    return tuple(dict.fromkeys(asked))


def _biases(asked: dict[str, Any] | list[Any]) -> tuple[Bias, ...]:
    if isinstance(asked, dict):
        pairs = [
            (f"logit_bias.{key}", int(key) if re.fullmatch(r"\d{1,10}", key) else key, asked[key]) for key in asked
        ]
        return tuple(_bias(path[:100], what, value) for path, what, value in pairs)
    for n, pair in enumerate(asked):
        if not isinstance(pair, list) or len(pair) != 2:
            message = f"`logit_bias.{n}` is {quote(pair)}. Send a pair: a token or a text, and a number or false."
            raise InvalidRequest(message, param=f"logit_bias.{n}")
    return tuple(_bias(f"logit_bias.{n}", what, value) for n, (what, value) in enumerate(asked))


def _check_lengths(biases: tuple[Bias, ...]) -> tuple[Bias, ...]:
    """Return the biases unchanged. Raises InvalidRequest if their texts have too many characters together."""
    num_chars = sum(len(what) for what, _ in biases if isinstance(what, str))
    if num_chars > MAX_ALL_BIAS_CHARS:
        message = f"`logit_bias` has texts of {num_chars} characters. Send at most {MAX_ALL_BIAS_CHARS} in all."
        raise InvalidRequest(message, param="logit_bias")
    return biases


def _bias(path: str, what: Any, value: Any) -> Bias:
    is_token = isinstance(what, int) and not isinstance(what, bool) and 0 <= what <= 2**31 - 1
    if not is_token and not (isinstance(what, str) and 0 < len(what) <= MAX_BIAS_CHARS):
        message = f"`{path}` is for {quote(what)}. Send a token's number or a text of 1 to {MAX_BIAS_CHARS} characters."
        raise InvalidRequest(message, param=path)
    if value is False:
        return what, None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_BIAS <= value <= MAX_BIAS:
        message = f"`{path}` is {quote(value)}. Send a number from -{MAX_BIAS} to {MAX_BIAS}, or false to rule it out."
        raise InvalidRequest(message, param=path)
    return what, float(value) if abs(value) >= LEAST_BIAS else 0.0
