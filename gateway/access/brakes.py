"""Slows failed authentication per address, without locking anybody else out.

A key has 256 random bits, so that nobody finds one by trying; the brake keeps those who try from costing others
anything. A valid key is never delayed or refused, whatever else comes from its address.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from time import monotonic

from gateway.back_pressure import too_many_failures
from workers.http_server.connections import network_of

log = logging.getLogger(__name__)

NUM_FREE = 10
"""Number of failures of an address that are answered at once."""
FORGIVEN_S = 6.0
"""Seconds after which one failure of an address is forgotten."""
MAX_FAILURES = 20
"""Maximum failures of an address that are remembered: after MAX_FAILURES * FORGIVEN_S all are forgotten."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 2.0
"""Delay of the first answer that is delayed; each further one takes twice as long, up to the longest."""
MAX_DELAYED_PER_ADDRESS, MAX_DELAYED = 4, 256
"""Maximum answers delayed at once, of an address and in all. Further ones are 429, at once."""
MAX_ADDRESSES = 100_000
"""Maximum addresses that are remembered, IPv6 by /64; the one that failed longest ago makes room."""
ROUNDING = 1e-6
TELL_EVERY_S = 10.0
"""Minimum seconds between two log lines about addresses that are slowed."""


class Brakes:
    """Remembers failures by address."""

    def __init__(self, max_delayed: int = MAX_DELAYED) -> None:
        self._max_delayed = max_delayed
        self._clear_at: OrderedDict[str, float] = OrderedDict()
        """Address -> time.monotonic() at which all its failures are forgotten; the one that failed last is the last."""
        self._delayed: Counter[str] = Counter()
        """Address -> its answers that are delayed now."""
        self._num_delayed = 0
        self._told_at = float("-inf")

    def __len__(self) -> int:
        return len(self._clear_at)

    @property
    def num_delayed(self) -> int:
        """Return the number of answers that are delayed now."""
        return self._num_delayed

    def failed(self, address: str) -> float:
        """Note a failure of the address, and return the seconds by which its answer is to be delayed.

        `address`: empty for whoever connects by a Unix socket."""
        network = network_of(address)
        num_failures = self._count(network, monotonic())
        if num_failures <= NUM_FREE:
            return 0.0
        self._tell(network, num_failures)
        return min(LONGEST_DELAY_S, math.ldexp(FIRST_DELAY_S, num_failures - NUM_FREE - 1))

    async def delay(self, address: str, delay_s: float) -> None:
        """Wait before the address is answered. Raises TooManyFailures if too many answers are delayed already."""
        network = network_of(address)
        if self._delayed[network] >= MAX_DELAYED_PER_ADDRESS or self._num_delayed >= self._max_delayed:
            raise too_many_failures(LONGEST_DELAY_S)
        self._delayed[network] += 1
        self._num_delayed += 1
        try:
            await asyncio.sleep(delay_s)
        finally:
            self._num_delayed -= 1
            self._delayed[network] -= 1
            if not self._delayed[network]:
                del self._delayed[network]

    def _count(self, network: str, now: float) -> int:
        """Return the failures of the network with this one, less those that are forgotten."""
        clear_at = max(now, self._clear_at.pop(network, now)) + FORGIVEN_S
        clear_at = self._clear_at[network] = min(clear_at, now + MAX_FAILURES * FORGIVEN_S)
        while len(self._clear_at) > MAX_ADDRESSES or next(iter(self._clear_at.values())) <= now:
            self._clear_at.popitem(last=False)
        return math.ceil((clear_at - now) / FORGIVEN_S - ROUNDING)

    def _tell(self, network: str, num_failures: int) -> None:
        now = monotonic()
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            fields = {"address": network, "failures": num_failures, "delayed": self._num_delayed}
            log.warning("API keys that are not known come from an address", extra={"fields": fields})
