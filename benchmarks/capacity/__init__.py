"""What one gateway, its Redis and a stream cost here, and how many of each a crowd of users needs.

    python -m benchmarks capacity            the unit costs, and the model held against runs that it was not made of
    python -m benchmarks.capacity.save       the same, kept in measured.json, from which docs/capacity.md is written

The gateway has core 0 for itself; load, fake workers and Redis share core 1. CPU time is that of the processes.
"""

from __future__ import annotations

from benchmarks.capacity.costs import Costs
from benchmarks.capacity.trial import Checked, Trial
from benchmarks.capacity.trial import measured as tried
from benchmarks.table import Row

MOST_OFF = 0.2
MOST_GENERATOR_US = 30.0


def measure(size: int) -> list[Row]:
    """`size` is not used: each run is as long as it must be for the clock ticks of CPU time."""
    return rows_of(tried())


def rows_of(trial: Trial) -> list[Row]:
    figure, reached = f"{trial.generator_us:.1f} us of CPU", trial.generator_us <= MOST_GENERATOR_US
    generator = Row(
        "`paddock bench`, a token, requests included", figure, "", f"<= {MOST_GENERATOR_US:.0f} us", reached
    )
    return [*_costs(trial.costs), generator, *(_checked(point) for point in trial.checked)]


def _costs(costs: Costs) -> list[Row]:
    figures = {
        "gateway, a token of a stream": f"{costs.gateway_token_us:.1f} us of CPU",
        "gateway, a worker's step that brings it tokens": f"{costs.gateway_step_us:.0f} us",
        "gateway, a call": f"{costs.gateway_call_us / 1e3:.2f} ms",
        "gateway, an entry of a worker's news": f"{costs.gateway_news_us:.0f} us",
        "gateway at rest": f"{costs.gateway_idle_us_per_s / 1e4:.2f} % of a core",
        "gateway, memory of a stream": f"{costs.stream_bytes / 1024:.0f} KiB",
        "gateway, memory without streams": f"{costs.gateway_bytes / 2**20:.0f} MiB",
        "Redis, a call (takes a slot, gives it back)": f"{costs.redis_call_us:.0f} us of CPU",
        "Redis, a worker's record and entry of news": f"{costs.redis_news_us:.0f} us",
        "Redis, that entry read by a gateway": f"{costs.redis_read_us:.1f} us",
        "Redis, a gateway at rest": f"{costs.redis_gateway_us_per_s / 1e4:.2f} % of a core",
    }
    return [Row(what, figure, "", "", True) for what, figure in figures.items()]


def _checked(point: Checked) -> Row:
    off = point.predicted_cpu / point.measured_cpu - 1
    return Row(
        f"gateway's CPU with {point.streams:,} streams, {point.tokens_per_s:,.0f} tokens/s",
        f"{point.measured_cpu:.1%} of a core; the model says {point.predicted_cpu:.1%}",
        f"{off:+.0%}",
        f"within {MOST_OFF:.0%}",
        abs(off) <= MOST_OFF,
    )
