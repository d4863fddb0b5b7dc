"""Keeps the prefix hashes (heads, see `workers.protocol.prefixes`) of the conversations cached here, for the gateways.

A request's heads are entered when its call starts. Those of the answer are added when the call ends, since the next
request of the conversation will begin with it. The number of tokens before a head (its place) is known where a request
or answer ended; elsewhere it is estimated from bytes. The engine reports what is left of each conversation; heads whose
prefix is gone are dropped. Use it on one event loop.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workers.chat.tools import CallPiece, ContentPiece, Piece, ReasoningPiece
from workers.engine.cache.report import Found
from workers.protocol.events import Usage
from workers.protocol.heartbeat import MAX_HEADS
from workers.protocol.prefixes import Chain, Prefix, prefix_after
from workers.protocol.requests import GenerateRequest, ToolCall

LEAST_SHARE = 0.5
"""Minimum share of a prefix's tokens beyond the next shorter kept prefix that must be cached to keep its hash."""

NEWS_SHARE = 1 / 16
"""A prefix's number of cached tokens is published again if the published number is off by more than this share."""


class CacheReport(Protocol):
    """The part of `workers.engine.cache.report.CacheReportProxy` that is needed here."""

    def take(self) -> Iterable[Found]: ...
    def forget(self, keys: Iterable[int]) -> None: ...


@dataclass(slots=True, eq=False)
class _Conversation:
    key: int
    heads: list[int]
    """Prefix hashes, shortest prefix first. Some may be dropped, or belong to a conversation that used them later."""
    places: list[int]
    """Number of tokens in the prefix of each of `heads`."""
    num_own: int = 0
    found: Found | None = None


@dataclass(slots=True, eq=False)
class _Head:
    owner: _Conversation
    """The conversation that used this prefix hash last. In all conversations that have it, the prefix is the same."""
    place: int
    is_exact: bool
    num_cached: int


class PrefixAdverts:
    """Keeps up to `max_heads` heads (prefix hashes) of this worker; beyond that, those used longest ago are dropped."""

    def __init__(self, report: CacheReport, max_heads: int = MAX_HEADS) -> None:
        """`report` tells how much of each conversation is cached; until it does, the whole of it counts as cached."""
        self.max_heads = max_heads
        self._report = report
        self._heads: OrderedDict[int, _Head] = OrderedDict()
        """Prefix hashes, those used longest ago first. Of those used together, the longest prefix comes first."""
        self._conversations: dict[int, _Conversation] = {}
        self._changed: set[int] = set()
        self._published: dict[int, int] = {}

    @property
    def published(self) -> Mapping[int, int]:
        """Hash of a prefix (head) -> how many of its tokens are cached, as of the last `take`."""
        return self._published

    def take(self) -> tuple[dict[int, int], tuple[int, ...]]:
        """Return what changed since the last `take`: prefix hash -> its number of cached tokens; and dropped hashes."""
        gone = [found.key for found in self._report.take() if not self._hear(found)]
        if gone:
            self._report.forget(gone)
        added: dict[int, int] = {}
        dropped: list[int] = []
        for digest in self._changed:
            head, before = self._heads.get(digest), self._published.get(digest)
            if head is None:
                if before is not None:
                    dropped.append(digest)
                    del self._published[digest]
            elif before is None or abs(head.num_cached - before) > before * NEWS_SHARE:
                added[digest] = self._published[digest] = head.num_cached
        self._changed.clear()
        return added, tuple(dropped)

    def enter(self, key: int, prefix: Prefix, points: Sequence[tuple[int, int]], *, guessed: bool = False) -> None:
        """Enter a conversation, or add to the one that has this key. `prefix`: the conversation's prefix hashes so far.

        `points`: for some beginnings of the conversation, (number of bytes, number of tokens), ascending. The last pair
        is for the whole conversation; `guessed`: it is an estimate, which later estimates must not be based on."""
        exact = {at for at, _ in (points[:-1] if guessed else points)}
        heads, places = list(prefix.digests), self._places(prefix, points)
        known = self._conversations.get(key)
        if known is None:
            known = self._conversations[key] = _Conversation(key, heads, places)
        else:
            known.heads, known.places = _merged(known, heads, places)
        for digest, end, place in zip(reversed(heads), reversed(prefix.ends), reversed(places), strict=True):
            self._own(digest, known, place, is_exact=end in exact)
        self._settle(known)
        while len(self._heads) > self.max_heads:
            self._drop(next(iter(self._heads)))
        if not known.num_own:
            self._forget(known)

    def check_integrity(self) -> None:
        """Raise AssertionError if the records of prefix hashes and of conversations contradict each other."""
        owned: dict[int, int] = {}
        for digest, head in self._heads.items():
            owned[head.owner.key] = owned.get(head.owner.key, 0) + 1
            if digest not in head.owner.heads or self._conversations.get(head.owner.key) is not head.owner:
                raise AssertionError(f"head {digest:x} is not its owner's")
        if owned != {key: one.num_own for key, one in self._conversations.items()}:
            raise AssertionError(f"heads are counted wrongly: {owned}")
        if len(self._heads) > self.max_heads:
            raise AssertionError(f"{len(self._heads)} heads, {self.max_heads} may be")

    def _hear(self, found: Found) -> bool:
        """Take a report of how much of a conversation is cached; return False if no more reports on it are wanted."""
        conversation = self._conversations.get(found.key)
        if conversation is None:
            return False
        conversation.found = found
        self._settle(conversation)
        if not conversation.num_own:
            self._conversations.pop(conversation.key, None)
        return conversation.num_own > 0

    def _places(self, prefix: Prefix, points: Sequence[tuple[int, int]]) -> list[int]:
        """Return the number of tokens before each head: exact where a request or answer ended, interpolated by bytes
        elsewhere."""
        known = {0: 0, **dict(points)}
        end = points[-1][0]
        for digest, at in zip(prefix.digests, prefix.ends, strict=True):
            head = self._heads.get(digest)
            if head is not None and head.is_exact and at < end:
                known.setdefault(at, head.place)
        fitting: list[tuple[int, int]] = []
        for at, tokens in sorted(known.items()):
            if not fitting or fitting[-1][1] <= tokens <= points[-1][1]:
                fitting.append((at, tokens))
        table = np.array(fitting, dtype=np.float64)
        return [int(place) for place in np.interp(np.array(prefix.ends), table[:, 0], table[:, 1])]

    def _own(self, digest: int, owner: _Conversation, place: int, *, is_exact: bool) -> None:
        head = self._heads.get(digest)
        if head is None:
            self._heads[digest] = _Head(owner, place, is_exact, 0)
            self._changed.add(digest)
            owner.num_own += 1
            return
        if head.owner is not owner:
            head.owner.num_own -= 1
            owner.num_own += 1
            if not head.owner.num_own:
                self._forget(head.owner)
        head.owner, head.place, head.is_exact = owner, place, is_exact
        self._heads.move_to_end(digest)

    def _settle(self, conversation: _Conversation) -> None:
        """Update the cached tokens of each of the conversation's heads; drop heads that add too few (`LEAST_SHARE`)."""
        found, deepest, before = conversation.found, 0, 0
        for digest, place in zip(conversation.heads, conversation.places, strict=True):
            num_cached = _cached(found, place)
            new = num_cached - deepest
            is_kept = new > 0 and new >= LEAST_SHARE * (place - before)
            if is_kept:
                deepest, before = num_cached, place
            head = self._heads.get(digest)
            if head is None or head.owner is not conversation:
                continue
            if not is_kept:
                self._drop(digest)
            elif head.num_cached != num_cached:
                head.num_cached = num_cached
                self._changed.add(digest)

    def _drop(self, digest: int) -> None:
        owner = self._heads.pop(digest).owner
        self._changed.add(digest)
        owner.num_own -= 1
        if not owner.num_own:
            self._forget(owner)

    def _forget(self, conversation: _Conversation) -> None:
        """Forget a conversation that owns no head any more."""
        if self._conversations.pop(conversation.key, None) is not None:
            self._report.forget((conversation.key,))


class CallAdverts:
    """Enters a call's prefix hashes into `PrefixAdverts`: the prompt's when it starts, the answer's when it ends."""

    __slots__ = ("_book", "_chain", "_key", "_num_tokens", "_pieces", "_prefix", "_request", "add")

    def __init__(self, book: PrefixAdverts, key: int, request: GenerateRequest, chain: Chain, num_tokens: int) -> None:
        """`chain`: the request's hash chain. `num_tokens`: tokens of the prompt."""
        self._book = book
        self._key = key
        self._request = request
        self._chain = chain
        self._prefix = chain.ended()
        self._num_tokens = num_tokens
        self._pieces: list[Piece] = []
        self.add: Callable[[Piece], None] = self._pieces.append
        """Adds a piece of the answer. It is the list's own `append`, so that it takes only 50 ns per token."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the request's conversation, as it is written out to hash its prefixes."""
        return self._prefix.num_bytes

    def started(self) -> None:
        """Enter the prompt. It is being computed now, so calls that come from now on can share it."""
        self._book.enter(self._key, self._prefix, [(self._prefix.num_bytes, self._num_tokens)])

    def finished(self, usage: Usage) -> None:
        """Enter prompt and answer, with which the conversation's next request will begin. Thoughts are left out: few
        templates show them again."""
        text = "".join(piece.text for piece in self._pieces if isinstance(piece, ContentPiece))
        has_thought = any(isinstance(piece, ReasoningPiece) for piece in self._pieces)
        prefix = prefix_after(self._chain, self._request, text, _calls(self._pieces))
        points = [(self._prefix.num_bytes, self._num_tokens)]
        if prefix.num_bytes > self._prefix.num_bytes:
            points.append((prefix.num_bytes, self._num_tokens + (0 if has_thought else usage.completion_tokens)))
        self._book.enter(self._key, prefix, points, guessed=has_thought)


def _calls(pieces: Iterable[Piece]) -> tuple[ToolCall, ...]:
    found: dict[int, tuple[str, list[str]]] = {}
    for piece in pieces:
        if isinstance(piece, CallPiece):
            found.setdefault(piece.number, (piece.name, []))[1].append(piece.arguments)
    return tuple(ToolCall("", name, "".join(parts)) for name, parts in found.values())


def _merged(known: _Conversation, heads: list[int], places: list[int]) -> tuple[list[int], list[int]]:
    """Merge a conversation's new heads and places with the old ones, some of which may be from another continuation."""
    new = set(heads)
    left = [(place, head) for head, place in zip(known.heads, known.places, strict=True) if head not in new]
    if not left:
        return heads, places
    pairs = sorted(itertools.chain(zip(places, heads, strict=True), left), key=lambda pair: pair[0])
    return [head for _, head in pairs], [place for place, _ in pairs]


def _cached(found: Found | None, place: int) -> int:
    """Return how many of the first `place` tokens are cached. `found` None: no report yet, so all count as cached."""
    if found is None:
        return place
    if found.stops is None:
        return min(place, found.num_known)
    # A place is an estimate, so a stop slightly after it counts as reached.
    number = bisect_right(found.stops, place + place // 32 + 8)
    return found.stops[number - 1] if number else 0
