"""How the next token is drawn: a llama.cpp sampler chain in llama-server's order and with its defaults.

Source of order and defaults: tools/server/README.md and common/common.h of llama.cpp. Stages that would change nothing
are left out; ranges are checked at the gateway's door, not here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from llama_cpp import llama_cpp as c

from workers.llama.native import held
from workers.llama.vocab import Vocab
from workers.protocol.requests import Sampling

DEFAULTS = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repeat_penalty=1.0,
    repeat_last_n=64,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp takes this seed as "choose one"; a caller who asks for it means it, and gets its neighbour."""


def _or(value: float | None, default: float | None) -> float:
    chosen = default if value is None else value
    assert chosen is not None  # noqa: S101 - for the type checker: DEFAULTS has every field
    return chosen


class SamplerChain:
    """One call's sampler; made and used by any one thread, closed once."""

    __slots__ = ("_num_penalised", "pointer")

    def __init__(self, vocab: Vocab, sampling: Sampling, *, n_ctx: int, banned: Sequence[int] = ()) -> None:
        """`banned` tokens are never drawn. `n_ctx` is what a `repeat_last_n` of -1 stands for."""
        params = c.llama_sampler_chain_default_params()
        params.no_perf = True
        self.pointer: int = c.llama_sampler_chain_init(params)
        self._num_penalised = 0
        if banned:
            biases = (c.llama_logit_bias * len(banned))(*((token, float("-inf")) for token in banned))
            self._add(c.llama_sampler_init_logit_bias(vocab.num_tokens, len(banned), biases))
        self._add_penalties(vocab, sampling, n_ctx)
        temperature = _or(sampling.temperature, DEFAULTS.temperature)
        if temperature <= 0:
            self._add(c.llama_sampler_init_greedy())
        else:
            self._add_draw(sampling, temperature)

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Let the penalties see the end of the prompt, as llama-server does."""
        accept = held().sampler_accept
        for token in tokens[-self._num_penalised :] if self._num_penalised else ():
            accept(self.pointer, token)

    def close(self) -> None:
        if self.pointer:
            held().sampler_free(self.pointer)
            self.pointer = 0

    def _add(self, stage: int) -> None:
        c.llama_sampler_chain_add(self.pointer, stage)

    def _add_penalties(self, vocab: Vocab, sampling: Sampling, n_ctx: int) -> None:
        last_n = int(_or(sampling.repeat_last_n, DEFAULTS.repeat_last_n))
        repeat = _or(sampling.repeat_penalty, DEFAULTS.repeat_penalty)
        frequency = _or(sampling.frequency_penalty, DEFAULTS.frequency_penalty)
        presence = _or(sampling.presence_penalty, DEFAULTS.presence_penalty)
        if last_n == 0 or (repeat == 1 and frequency == 0 and presence == 0):
            return
        self._num_penalised = n_ctx if last_n < 0 else min(last_n, n_ctx)
        self._add(c.llama_sampler_init_penalties(vocab.num_tokens, self._num_penalised, repeat, frequency, presence))

    def _add_draw(self, sampling: Sampling, temperature: float) -> None:
        top_k = int(_or(sampling.top_k, DEFAULTS.top_k))
        top_p = _or(sampling.top_p, DEFAULTS.top_p)
        min_p = _or(sampling.min_p, DEFAULTS.min_p)
        if top_k > 0:
            self._add(c.llama_sampler_init_top_k(top_k))
        if top_p < 1:
            self._add(c.llama_sampler_init_top_p(top_p, 0))
        if min_p > 0:
            self._add(c.llama_sampler_init_min_p(min_p, 0))
        self._add(c.llama_sampler_init_temp(temperature))
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._add(c.llama_sampler_init_dist(seed if seed != _RANDOM_SEED else _RANDOM_SEED - 1))
