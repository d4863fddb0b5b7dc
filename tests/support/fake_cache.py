"""What an engine without a model remembers of prompts: blocks of tokens, least recently used first to go."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from workers.engine.cache.report import Found
from workers.engine.request import EngineRequest

BLOCK_TOKENS = 32


class FakeCache:
    """Answers live nowhere in it: a next turn finds the prompt. Used under its engine's lock."""

    def __init__(self, num_tokens: int) -> None:
        self._max_blocks = max(1, num_tokens // BLOCK_TOKENS)
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._ended: dict[int, Found] = {}
        self._names: dict[int, list[int]] = {}
        self._has_lost = False

    def enter(self, request: EngineRequest) -> int:
        """The call's prompt is there from now on -> how many of its tokens were before, one less than all at most."""
        if not request.asked.cache_prompt:
            return 0
        names = list(_names(request))
        known = self._num_known(names)
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)
            self._has_lost = True
        self._names[request.key] = names
        return min(known, len(request.prompt) - 1)

    def ended(self, key: int) -> None:
        if key in self._names:
            self._ended[key] = Found(key, self._num_known(self._names[key]))

    def forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._names.pop(key, None)
            self._ended.pop(key, None)

    def take(self) -> list[Found]:
        """What there is of calls that ended, where it has changed."""
        if self._has_lost:
            self._has_lost = False
            for key, names in self._names.items():
                self._ended[key] = Found(key, self._num_known(names))
        found, self._ended = list(self._ended.values()), {}
        return found

    def _num_known(self, names: Sequence[int]) -> int:
        return BLOCK_TOKENS * len(list(itertools.takewhile(self._blocks.__contains__, names)))


def _names(request: EngineRequest) -> Iterator[int]:
    name = hash((request.tenant, request.asked.cache_salt, request.asked.adapters))
    for start in range(0, len(request.prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = hash((name, *request.prompt.tokens[start : start + BLOCK_TOKENS]))
        yield name
