"""A store of DRY sampler stages, which are copied for each call.

Making one walks the whole vocabulary once per sequence breaker (50 ms at 152k tokens and four breakers); copying one
takes 0.3 ms.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.native import held
from workers.llama.stages import Settings
from workers.llama.vocab import Vocab
from workers.protocol.failures import CallFailed, Failure, FailureCode

MAX_KEPT = 4
"""Most stages that are kept; each has up to some megabytes."""

USUAL = frozenset(Settings().dry_sequence_breakers)

_Key = tuple[float, float, int, int, tuple[str, ...]]


class DryStages:
    """The DRY stages that were used last. Any thread may call it; close it when none does any more."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._kept: OrderedDict[_Key, Any] = OrderedDict()
        self._lock = threading.Lock()

    def stage(self, settings: Settings) -> Any:
        """Return a new stage that belongs to the caller. Releases the interpreter lock where it must be made anew.

        Raises CallFailed for breakers that occur in too many tokens.
        """
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
            held().sampler_free(one)
        return copy

    def close(self) -> None:
        """Free the kept stages. Calling it again does nothing."""
        with self._lock:
            while self._kept:
                held().sampler_free(self._kept.popitem()[1])


def check_breakers(vocab: Vocab, settings: Settings) -> None:
    """Raise CallFailed where the breakers occur in more tokens than the vocabulary has: llama.cpp keeps each token for
    each breaker in it. Sixteen single letters took 19 MiB a call, and 42 ms to free.
    """
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
