"""Decides from a call's settings which stages its sampler has, in which order, and how long a draw takes. Pure.

Source of names, order and defaults: common/common.h and common/sampling.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from msgspec.structs import asdict

from workers.protocol.requests import SamplerName, Sampling

ORDER: tuple[SamplerName, ...] = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

PENALTIES = frozenset({"penalties", "dry"})
NARROWING = frozenset({"top_n_sigma", "top_k", "top_p", "min_p"})
"""Stages that drop tokens, but never the likeliest one."""

FEW = 4096
"""Maximum candidates that can be sorted so quickly that other calls do not notice."""

FAR, FAR_BROKEN = 4096, 512
"""Numbers of recent tokens beyond which the DRY penalty takes milliseconds per draw. `FAR`: with the default sequence
breakers. `FAR_BROKEN`: with breakers of a caller's own; then each token is compared with up to 112 others."""

PENALTY_S, PASS_S, SORT_S, FAR_S = 1e-8, 3e-8, 1e-7, 7e-7
"""Maximum seconds of a draw per token of the vocabulary: `PENALTY_S` for penalties; for other stages `SORT_S` if they
sort the vocabulary, else `PASS_S`. `FAR_S`: per recent token, if the DRY penalty looks back over many. Measured with
vocabularies of 152k and 262k tokens and a context of 32k."""

COLDEST = 1e-20
"""A temperature up to this counts as 0, which is greedy: logits divided by so small a number could overflow."""

DEFAULT_DRY_BASE = 1.75

MAX_SEED = 0xFFFFFFFE
"""Maximum seed; higher ones are lowered to it. The next higher number would tell llama.cpp to choose a seed itself."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A caller's `Sampling`, with llama-server's defaults for values that are not set."""

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = DEFAULT_DRY_BASE
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    min_keep: int = 0
    samplers: tuple[SamplerName, ...] = ORDER
    logit_bias: tuple[tuple[int | str, float | None], ...] = ()
    seed: int | None = None

    @classmethod
    def of(cls, sampling: Sampling, n_ctx: int) -> Self:
        """Return the settings. `n_ctx` replaces -1 and larger numbers in settings that count recent tokens."""
        asked = {name: value for name, value in asdict(sampling).items() if value is not None}
        for name in ("repeat_last_n", "dry_penalty_last_n"):
            if name in asked:
                asked[name] = n_ctx if asked[name] < 0 else min(asked[name], n_ctx)
        if asked.get("dry_base", 1.0) < 1.0:
            asked["dry_base"] = DEFAULT_DRY_BASE
        return cls(**asked)

    @property
    def penalises(self) -> bool:
        neutral = self.repeat_penalty == 1 and self.presence_penalty == 0 and self.frequency_penalty == 0
        return self.repeat_last_n > 0 and not neutral

    @property
    def dries(self) -> bool:
        return self.dry_multiplier != 0 and self.dry_penalty_last_n > 0


def settled(sampling: Sampling, n_ctx: int) -> Sampling:
    """Return the parameters with all defaults filled in, as a call runs with them; a missing `seed` stays None."""
    settings = Settings.of(sampling, n_ctx)
    every = {field.name: getattr(settings, field.name) for field in fields(settings)}
    if settings.seed is not None:
        every["seed"] = min(settings.seed, MAX_SEED)
    return Sampling(**every)


def working_stages(settings: Settings) -> tuple[SamplerName, ...]:
    """Return the stages that change something, in order and without repeats, except the stage that draws the token."""
    if settings.mirostat:
        return ("temperature",)
    at_work: dict[SamplerName, bool] = {
        "penalties": settings.penalises,
        "dry": settings.dries,
        "top_n_sigma": settings.top_n_sigma > 0,
        "top_k": settings.top_k > 0,
        "typ_p": settings.typical_p < 1,
        "top_p": settings.top_p < 1,
        "min_p": settings.min_p > 0,
        "xtc": settings.xtc_probability > 0 and settings.xtc_threshold <= 0.5,
        "temperature": settings.temperature != 1 or settings.dynatemp_range > 0,
        "infill": True,
        "adaptive_p": True,
    }
    return tuple(name for name in dict.fromkeys(settings.samplers) if at_work[name])


def is_greedy(settings: Settings, stages: Sequence[SamplerName]) -> bool:
    """Return whether these stages can only draw the token that is likeliest after the penalties."""
    if settings.temperature > COLDEST or "temperature" not in stages:
        return False
    if settings.mirostat:
        return True
    if settings.dynatemp_range > 0 or set(stages) - PENALTIES - NARROWING - {"temperature"}:
        return False
    num_penalties = sum(name in PENALTIES for name in stages)
    return all(name in PENALTIES for name in stages[:num_penalties])


def looks_far(settings: Settings, stages: Sequence[SamplerName]) -> bool:
    """Return whether the DRY penalty takes so long per draw that other calls would notice: 24 ms at 32k tokens."""
    if "dry" not in stages:
        return False
    is_usual = set(settings.dry_sequence_breakers) <= set(Settings().dry_sequence_breakers)
    return settings.dry_penalty_last_n > (FAR if is_usual else FAR_BROKEN)


def sees_all(settings: Settings, stages: Sequence[SamplerName]) -> bool:
    """Return whether stages other than penalties go through the whole vocabulary per draw: 1 to 8 ms at 152k tokens."""
    others = [name for name in stages if name not in PENALTIES]
    return bool(settings.mirostat) or not others or others[0] != "top_k"


def draw_s(settings: Settings, stages: Sequence[SamplerName], num_tokens: int) -> float:
    """Return the seconds that drawing from a vocabulary of `num_tokens` can take: an estimate until a draw is timed."""
    seconds = PENALTY_S * num_tokens if "penalties" in stages else 0.0
    if looks_far(settings, stages):
        seconds += FAR_S * settings.dry_penalty_last_n
    if is_greedy(settings, stages):
        return seconds
    if sorts_all(settings, stages):
        return seconds + SORT_S * num_tokens
    return seconds + (PASS_S * num_tokens if sees_all(settings, stages) else 0.0)


def sorts_all(settings: Settings, stages: Sequence[SamplerName]) -> bool:
    """Return whether the whole vocabulary is sorted for each token: 10 to 50 ms at 152k tokens."""
    if settings.mirostat:
        return True
    for name in stages:
        if name == "top_k":
            return settings.top_k > FEW
        if name in ("typ_p", "xtc", "top_p") or (name == "temperature" and settings.dynatemp_range > 0):
            return True
    return False
