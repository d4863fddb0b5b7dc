"""Checks the inputs of pooled work before a call is taken, so that nothing of it is computed in vain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workers.engine.cache.prompt import Prompt
from workers.engine.pooled.jobs import PooledInput, tokens_of
from workers.llama.pooling import PooledContext, Pooling
from workers.protocol.events import CallFailed, Failure, FailureCode

MAX_RESULT_BYTES = 64 << 20
"""Maximum bytes of one answer before it is encoded; a call that would have more is refused with INVALID_REQUEST."""


def check_inputs(context: PooledContext, inputs: Sequence[PooledInput], *, takes_media: bool = False) -> None:
    """Raise CallFailed if the context can't read the inputs, or if one answer can't hold all their vectors."""
    if not inputs:
        raise CallFailed(_invalid("there is no input; send at least one"))
    n_vocab = context.model.vocab.num_tokens
    for number, one in enumerate(inputs):
        tokens = tokens_of(one)
        if not tokens:
            raise CallFailed(_invalid(f"input {number} has no tokens; send some text"))
        if not takes_media and isinstance(one, Prompt) and one.spans:
            message = f"input {number} has pictures or sounds; this model reads text only"
            raise CallFailed(Failure(FailureCode.UNSUPPORTED, message, "input"))
        if len(tokens) > context.longest:
            raise CallFailed(_overflow(number, len(tokens), context))
        ids = np.asarray(tokens)  # no copy of an array; Python's own min and max would take 30 ns for each token
        if ids.min() < 0 or ids.max() >= n_vocab:
            wrong = next(token for token in tokens if not 0 <= token < n_vocab)
            raise CallFailed(_invalid(f"input {number} has token {wrong}; this model has tokens 0 to {n_vocab - 1}"))
    num_rows = sum(map(len, inputs)) if context.pooling is Pooling.NONE else len(inputs)
    size = num_rows * context.width * 4
    if size > MAX_RESULT_BYTES:
        raise CallFailed(
            _invalid(
                f"the answer would have {num_rows} vectors of {context.width} numbers, {size:,} bytes, and may have "
                f"{MAX_RESULT_BYTES:,}; send fewer inputs at a time"
            )
        )


def _invalid(message: str) -> Failure:
    return Failure(FailureCode.INVALID_REQUEST, message, "input")


def _overflow(number: int, num_tokens: int, context: PooledContext) -> Failure:
    remedy = f"input {number} is too large: shorten it"
    if context.longest < context.n_ctx:
        remedy += f" or raise n_ubatch ({context.n_ubatch}) in the model's `llama` settings"
    elif context.n_ctx < context.model.facts.n_ctx_train:
        remedy += " or serve the model with a larger --ctx"
    message = f"input {number} has {num_tokens} tokens and this model reads {context.longest} at once; {remedy}"
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, "input", num_tokens, context.longest, remedy)
