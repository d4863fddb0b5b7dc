"""The sampler of a call: a llama.cpp sampler chain in llama-server's order and with its defaults.

Source of the stages and their settings: common/sampling.cpp of llama.cpp. Stages that would change nothing are left
out. The gateway checks ranges, except where a value would crash the process.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.native import gil_calls
from workers.llama.sampling.candidates import Words, without
from workers.llama.sampling.stages import (
    COLDEST,
    MAX_SEED,
    PENALTIES,
    Settings,
    draw_s,
    is_greedy,
    looks_far,
    sorts_all,
    working_stages,
)
from workers.llama.sampling.top_k import MOST_K
from workers.llama.tokens.vocab import NO_TOKEN, Vocab
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.requests import SamplerName, Sampling

MAX_KEPT = 4
"""Maximum number of DRY stages that are kept: those used last. Each takes up to some megabytes."""

USUAL = frozenset(Settings().dry_sequence_breakers)

_Key = tuple[float, float, int, int, tuple[str, ...]]


class DryStages:
    """Keeps the DRY stages that were used last, and copies them for each call. Any thread may use it; close it after
    the last use.

    Making a stage walks the whole vocabulary once per sequence breaker (50 ms at 152k tokens and four breakers);
    copying one takes 0.3 ms."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._kept: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def stage(self, settings: Settings) -> Any:
        """Return a stage that belongs to the caller: a copy of a kept one or of a new one.

        Making a new one releases the interpreter lock. Raises CallFailed for breakers that occur in too many tokens."""
        check_breakers(self._vocab, settings)
        key = (
            settings.dry_multiplier,
            settings.dry_base,
            settings.dry_allowed_length,
            settings.dry_penalty_last_n,
            settings.dry_sequence_breakers,
        )
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return c.llama_sampler_clone(kept)
        stage = new_dry_stage(self._vocab, settings)
        copy = c.llama_sampler_clone(stage)
        with self._lock:
            unwanted = [self._kept[key]] if key in self._kept else []
            self._kept[key] = stage
            while len(self._kept) > MAX_KEPT:
                unwanted.append(self._kept.popitem(last=False)[1])
        for one in unwanted:
            gil_calls().sampler_free(one)
        return copy

    def close(self) -> None:
        """Free the kept stages. Calling it again does nothing."""
        with self._lock:
            while self._kept:
                gil_calls().sampler_free(self._kept.popitem()[1])


def check_breakers(vocab: Vocab, settings: Settings) -> None:
    """Raise CallFailed if a caller's own breakers occur in more tokens, added up, than the vocabulary has. For each
    breaker llama.cpp stores every token that has it: sixteen single letters took 19 MiB a call, and 42 ms to free."""
    own = set(settings.dry_sequence_breakers) - USUAL
    num_tokens = sum(vocab.num_met_by(breaker.encode("utf-8", "replace")) for breaker in own if breaker)
    if num_tokens > vocab.num_tokens:
        message = (
            f"`dry_sequence_breakers` stand in {num_tokens} tokens together, and this model has {vocab.num_tokens}; "
            "leave out single letters and spaces"
        )
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "dry_sequence_breakers"))


def new_dry_stage(vocab: Vocab, settings: Settings) -> Any:
    breakers = [
        breaker.encode("utf-8", "replace") for breaker in dict.fromkeys(settings.dry_sequence_breakers) if breaker
    ]
    array = (ctypes.c_char_p * len(breakers))(*breakers)
    return c.llama_sampler_init_dry(
        vocab.pointer,
        settings.dry_multiplier,
        settings.dry_base,
        settings.dry_allowed_length,
        settings.dry_penalty_last_n,
        array,
        len(breakers),
    )


MAX_INFILL = 256
"""Maximum candidates of the `infill` stage, which compares every candidate with every other one."""

MIROSTAT_M = 100
"""Tokens from which Mirostat 1 estimates the distribution's shape; llama-server's number."""

Biases = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Tokens, and the numbers that are added to their logits."""


class SamplerChain:
    """The sampler chain of one call; made on any thread, then used and closed by one."""

    __slots__ = ("_num_remembered", "biases", "draw_s", "greedy", "permitted", "pointer", "ruled_out", "slow", "top_k")

    def __init__(
        self,
        vocab: Vocab,
        sampling: Sampling,
        *,
        n_ctx: int,
        banned: Sequence[int] = (),
        masked: bool = False,
        dry: DryStages | None = None,
    ) -> None:
        """Make the chain. Raises CallFailed (INVALID_REQUEST).

        `banned` tokens are never drawn. `n_ctx`: what -1 means for `repeat_last_n` and the like. `masked`: whether the
        chain's user will leave out candidates; the user then also applies `biases` and `permitted`, since the chain's
        own bias stage is slow with candidates left out. `dry`: the store of DRY stages; None: each is made anew."""
        settings = Settings.of(sampling, n_ctx)
        stages = working_stages(settings)
        _check_infill(vocab, settings, stages)
        biases = _added(vocab, settings.logit_bias, banned)
        self.greedy = is_greedy(settings, stages)
        self.draw_s = draw_s(settings, stages, vocab.num_tokens)
        """Expected seconds that it takes to draw a token."""
        self.slow = looks_far(settings, stages) or (not self.greedy and sorts_all(settings, stages))
        """Whether drawing takes so long that other threads should run meanwhile."""
        simple = self.greedy and PENALTIES.isdisjoint(stages) and all(bias == -math.inf for bias in biases.values())
        self.ruled_out: frozenset[int] | None = frozenset(biases) if simple else None
        """Banned tokens. The likeliest token, if not banned, is drawn without the chain. None: always run the chain."""
        is_first = stages[:1] == ("top_k",) and not (biases or self.greedy or settings.mirostat)
        self.top_k = settings.top_k if is_first and settings.top_k <= MOST_K else 0
        """Number of likeliest tokens that the first stage keeps (`Context.sample_top`); 0: another stage comes first,
        or it keeps more than `MOST_K`."""
        self.biases: Biases | None = None
        """If made with `masked`: the biases to add to the logits before the chain runs. None: there are none."""
        self.permitted: Words | None = None
        """If made with `masked`: the tokens that may be drawn at all, as bits. None: all tokens."""
        self._num_remembered = 0
        if masked:
            self.biases, self.permitted = _split(vocab, biases)
        params = c.llama_sampler_chain_default_params()
        params.no_perf = True
        self.pointer: int = c.llama_sampler_chain_init(params)
        try:
            if biases and not masked:
                pairs = (c.llama_logit_bias * len(biases))(*biases.items())
                self._add(c.llama_sampler_init_logit_bias(vocab.num_tokens, len(biases), pairs))
            self._build(vocab, settings, stages, dry)
        except BaseException:
            self.close()  # nobody else can; this also frees the stages that were added before
            raise

    def accept_prompt(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Let the penalties and DRY see the prompt, as llama-server does, but no more of it than they can remember."""
        if not self._num_remembered:
            return
        accept, pointer = gil_calls().sampler_accept, self.pointer
        for token in np.asarray(tokens[-self._num_remembered :]).tolist():
            accept(pointer, token)

    def close(self) -> None:
        if self.pointer:
            gil_calls().sampler_free(self.pointer)
            self.pointer = 0

    def _add(self, stage: Any) -> None:
        c.llama_sampler_chain_add(self.pointer, stage)

    def _build(self, vocab: Vocab, settings: Settings, stages: Sequence[SamplerName], dry: DryStages | None) -> None:
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        seed = min(seed, MAX_SEED)
        for name in stages:
            if name == "penalties":
                self._num_remembered = max(self._num_remembered, settings.repeat_last_n)
            elif name == "dry":
                self._num_remembered = max(self._num_remembered, settings.dry_penalty_last_n)
                self._add(dry.stage(settings) if dry is not None else new_dry_stage(vocab, settings))
                continue
            if name in PENALTIES or not self.greedy:
                stage = _stage(name, vocab, settings, seed)
                if stage:
                    self._add(stage)
        self._add(c.llama_sampler_init_greedy() if self.greedy else _drawing_stage(vocab, settings, stages, seed))


def _stage(name: SamplerName, vocab: Vocab, settings: Settings, seed: int) -> Any:
    """Return a new stage for any name but `dry`; None for `adaptive_p`, which the drawing stage does."""
    s = settings
    match name:
        case "penalties":
            penalties = (s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)
            stage = c.llama_sampler_init_penalties(vocab.num_tokens, *penalties)
        case "top_n_sigma":
            stage = c.llama_sampler_init_top_n_sigma(s.top_n_sigma)
        case "top_k":
            stage = c.llama_sampler_init_top_k(s.top_k)
        case "typ_p":
            stage = c.llama_sampler_init_typical(s.typical_p, s.min_keep)
        case "top_p":
            stage = c.llama_sampler_init_top_p(s.top_p, s.min_keep)
        case "min_p":
            stage = c.llama_sampler_init_min_p(s.min_p, s.min_keep)
        case "xtc":
            stage = c.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, seed)
        case "temperature" if s.mirostat:
            stage = c.llama_sampler_init_temp(s.temperature)
        case "temperature":
            temperature = 0.0 if s.temperature <= COLDEST else s.temperature
            stage = c.llama_sampler_init_temp_ext(temperature, s.dynatemp_range, s.dynatemp_exponent)
        case "infill":
            stage = c.llama_sampler_init_infill(vocab.pointer)
        case _:
            stage = None
    return stage


def _drawing_stage(vocab: Vocab, settings: Settings, stages: Sequence[SamplerName], seed: int) -> Any:
    if settings.mirostat == 1:
        aim = (settings.mirostat_tau, settings.mirostat_eta, MIROSTAT_M)
        return c.llama_sampler_init_mirostat(vocab.num_tokens, seed, *aim)
    if settings.mirostat:
        return c.llama_sampler_init_mirostat_v2(seed, settings.mirostat_tau, settings.mirostat_eta)
    if "adaptive_p" in stages:
        return c.llama_sampler_init_adaptive_p(settings.adaptive_target, settings.adaptive_decay, seed)
    return c.llama_sampler_init_dist(seed)


def _check_infill(vocab: Vocab, settings: Settings, stages: Sequence[SamplerName]) -> None:
    """Raise CallFailed if `infill` would abort (no end token), or take minutes per token (too many candidates)."""
    if "infill" not in stages:
        return
    if vocab.eos == NO_TOKEN:
        message = "`samplers`: this model has no end token, which `infill` needs; leave `infill` out"
        raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "samplers"))
    before = stages[: stages.index("infill")]
    if "top_k" not in before or settings.top_k > MAX_INFILL:
        message = f"`samplers`: `infill` needs `top_k` before it, at most {MAX_INFILL}; top_k is {settings.top_k}"
        raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "samplers"))


def _added(vocab: Vocab, asked: Iterable[tuple[int | str, float | None]], banned: Sequence[int]) -> dict[int, float]:
    """Return the sum of what is added to the logit of each token. Raises CallFailed for a token that does not exist."""
    added: dict[int, float] = {}
    for what, bias in asked:
        tokens = [what] if isinstance(what, int) else vocab.tokenize(what, add_special=False, parse_special=False)
        for token in tokens:
            if not 0 <= token < vocab.num_tokens:
                message = f"`logit_bias`: there is no token {token}; this model's are 0 to {vocab.num_tokens - 1}"
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, message, "logit_bias"))
            added[token] = added.get(token, 0.0) + (float("-inf") if bias is None else bias)
    return added | dict.fromkeys(banned, float("-inf"))


def _split(vocab: Vocab, added: dict[int, float]) -> tuple[Biases | None, Words | None]:
    tokens = [token for token, bias in added.items() if bias != float("-inf")]
    values = [added[token] for token in tokens]
    biases = (np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32)) if tokens else None
    if len(tokens) == len(added):
        return biases, None
    return biases, without(vocab.num_tokens, None, added.keys() - set(tokens))
