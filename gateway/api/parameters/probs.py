"""Reads how many probabilities a chat wants with each token, by the names of OpenAI and of llama-server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.api.parameters.base import Body
from gateway.errors import InvalidRequest

MAX_N_PROBS = 100
MAX_TOP_LOGPROBS = 20


class TokenProbsBody(Body):
    """llama-server's parameters."""

    n_probs: Annotated[int, Field(ge=0, le=MAX_N_PROBS)] = 0
    post_sampling_probs: bool = False


class ProbsBody(TokenProbsBody):
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def read_n_probs(body: ProbsBody) -> int:
    """Return how many likely tokens are told with each one; -1: only the chosen one's. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        message = f"`top_logprobs` is {body.top_logprobs}; it needs `logprobs: true`. Send both or neither."
        raise InvalidRequest(message, param="top_logprobs")
    if not body.logprobs:
        return body.n_probs
    wanted = body.n_probs if body.top_logprobs is None else body.top_logprobs
    return wanted or -1
