"""Keeps the latest answers of each scope, from which later answers of the same scope are drafted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from workers.engine.cache.prompt import Scope
from workers.engine.speculation.token_index import MIN_MATCH, TokenIndex

MAX_SCOPES = 32
"""Maximum number of scopes with a pool."""

GENERATION_TOKENS = 8_192
"""Number of tokens after which a pool starts a new generation; it keeps the one before. Each takes some 230 KiB."""

MAX_ANSWER_TOKENS = 4_096
"""Maximum number of tokens that a pool keeps of one answer, its last ones: no answer displaces all others."""

NO_TOKEN = -1
"""Stands between two answers in a pool. No draft goes beyond it."""


class Pool:
    """The latest answers of one scope, in two generations: when the newer one is full, the older one is forgotten."""

    def __init__(self) -> None:
        self.generations = [_generation()]
        """The newer generation first."""

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer's tokens. Takes a tenth of a microsecond for each of many."""
        if len(answer) <= MIN_MATCH:
            return
        if len(self.generations[0].tokens) >= GENERATION_TOKENS:
            self.generations = [_generation(), self.generations[0]]
        self.generations[0].extend([*answer[-MAX_ANSWER_TOKENS:], NO_TOKEN])


class Pools:
    """The pools of all scopes. No scope's text is ever drafted from another's: a draft that is right makes an answer
    quicker, which would tell a caller what others were answered."""

    def __init__(self) -> None:
        self._pools: OrderedDict[Scope, Pool] = OrderedDict()

    def find(self, scope: Scope) -> Pool | None:
        """Return the pool of `scope`, if there is one."""
        pool = self._pools.get(scope)
        if pool is not None:
            self._pools.move_to_end(scope)
        return pool

    def add(self, scope: Scope, answer: Sequence[int]) -> None:
        """Add an answer to the pool of its scope. Where that is one too many, the team that has the most loses the one
        that it used longest ago: whoever has many salts displaces his own."""
        pool = self.find(scope)
        if pool is None:
            if len(self._pools) >= MAX_SCOPES:
                (most, _), *_ = Counter(other.tenant for other in self._pools).most_common(1)
                del self._pools[next(other for other in self._pools if other.tenant == most)]
            pool = self._pools[scope] = Pool()
        pool.add(answer)


def _generation() -> TokenIndex:
    return TokenIndex(np.empty(0, np.int32), GENERATION_TOKENS)
