"""What is measured once and everything else is worked out of."""

from __future__ import annotations

from msgspec import Struct


class Costs(Struct, frozen=True):
    """CPU time of one core, in microseconds, and bytes of resident memory."""

    gateway_token_us: float
    gateway_step_us: float
    """More for each step of a worker that brings this gateway any tokens, however many."""
    gateway_call_us: float
    gateway_news_us: float
    gateway_idle_us_per_s: float
    gateway_bytes: float
    stream_bytes: float
    redis_call_us: float
    redis_news_us: float
    redis_read_us: float
    """For each gateway that reads an entry."""
    redis_gateway_us_per_s: float


def gateway_cpu(costs: Costs, *, tokens: float, steps: float, calls: float, news: float) -> float:
    """Cores, of rates per second."""
    work = (
        tokens * costs.gateway_token_us
        + steps * costs.gateway_step_us
        + calls * costs.gateway_call_us
        + news * costs.gateway_news_us
        + costs.gateway_idle_us_per_s
    )
    return work / 1e6


def redis_cpu(costs: Costs, *, calls: float, records: float, news: float, gateways: float) -> float:
    """Cores, of rates per second. A worker's record without news is counted as one with: no more than it costs."""
    work = (
        calls * costs.redis_call_us
        + (records + news) * costs.redis_news_us
        + news * gateways * costs.redis_read_us
        + gateways * costs.redis_gateway_us_per_s
    )
    return work / 1e6
