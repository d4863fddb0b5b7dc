"""Makes several answers to one prompt: as many requests, which differ in their seeds."""

from __future__ import annotations

from msgspec.structs import replace

from workers.protocol.requests import GenerateRequest

MAX_ANSWERS = 32
MAX_SEED = 2**32 - 1


def requests_of(request: GenerateRequest, n: int) -> tuple[GenerateRequest, ...]:
    """Return `n` requests. If there is a seed, each further answer has the one that follows, as with llama-server."""
    seed = request.sampling.seed
    if seed is None:
        return (request,) * n
    return tuple(
        replace(request, sampling=replace(request.sampling, seed=(seed + number) & MAX_SEED)) for number in range(n)
    )
