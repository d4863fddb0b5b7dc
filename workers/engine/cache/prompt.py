"""The input of a call, the path of a conversation through the prefix index, and the names of saved blocks and states.

A scope is the trust boundary of all KV that is shared, kept or written to disk. A block is named by a chain of digests
over its scope (team, salt, adapters) and all tokens up to its end: everything its KV was computed from. A whole
state (of memory that can't be cut) can end at any token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.llama.memory import CellPositions

BLOCK_TOKENS = 64
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Scope:
    """The trust boundary of cached KV: only calls with an equal scope use it again."""

    tenant: str | None
    """Team; None: all teams, for tokens of a prompt from the catalog's `shared_prompts`."""
    salt: str = ""
    """The caller's `cache_salt`."""
    adapters: bytes = b""
    """Hashes and scales of the adapters that the KV was computed with (`AdapterSet.key`); empty: no adapter."""
    own: str = ""
    """Name of the one call that may use this KV, which never goes to disk; empty: not bound to a call."""

    @property
    def seed(self) -> bytes:
        return _scope_digest(
            b"public" if self.tenant is None else b"tenant",
            (self.tenant or "").encode("utf-8", "surrogatepass"),
            self.salt.encode("utf-8", "surrogatepass"),
            self.adapters,
        )

    @property
    def public(self) -> Scope:
        """Return the scope of the conversation's first tokens, those that all teams may share (`shared_prompts`)."""
        return Scope(None, "", self.adapters)


class TokenArray(Protocol):
    """The methods of a one-dimensional `numpy.int32` array that are needed to make names from its tokens."""

    def __len__(self) -> int: ...
    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class BlockName:
    """The name of one saved block of a conversation, or of its whole state after `end` tokens."""

    tenant: str | None
    digest: bytes
    start: int
    end: int
    stem: bytes = b""
    """For a whole state: digest of scope and tokens up to the end of its last full block. For a block: empty."""


def chain(
    seed: bytes, tokens: TokenArray, block: int = BLOCK_TOKENS, *, public_seed: bytes = b"", num_public: int = 0
) -> list[bytes]:
    """Return, for each full block, a digest of the seed and of all tokens up to the block's end.

    For blocks wholly within the first `num_public` tokens, `public_seed` is used instead. 64 tokens take about 1 us."""
    return list(links(seed, memoryview(tokens.tobytes()), block * 4, public_seed, num_public // block))


def block_names(tokens: TokenArray, scope: Scope, num_public: int = 0) -> list[BlockName]:
    """Return the names of a conversation's full blocks, in order. `tokens`: `numpy.int32`."""
    digests = chain(scope.seed, tokens, public_seed=scope.public.seed, num_public=num_public)
    return [block_name(scope, num_public, k * BLOCK_TOKENS, digest) for k, digest in enumerate(digests, 1)]


class StateNames:
    """Computes the names of a conversation's whole states, for any length."""

    __slots__ = ("_data", "_digests", "_num_public", "_scope")

    def __init__(self, tokens: TokenArray, scope: Scope, num_public: int = 0) -> None:
        self._scope = scope
        self._num_public = num_public
        self._data = memoryview(tokens.tobytes())
        self._digests = list(
            links(scope.seed, self._data, BLOCK_TOKENS * 4, scope.public.seed, num_public // BLOCK_TOKENS)
        )

    def stem(self, end: int) -> tuple[str | None, bytes]:
        """Return team (None: public) and stem of the state of `end` tokens. All that end in one block share a stem."""
        number = end // BLOCK_TOKENS
        return _stem(self._scope, self._num_public, end, self._digests[number - 1] if number else b"")

    def name(self, end: int) -> BlockName:
        """Return the name of the state of length `end`. Takes about 3 us."""
        tail = self._data[end // BLOCK_TOKENS * BLOCK_TOKENS * 4 : end * 4]
        return _state_name(*self.stem(end), end, tail)


def block_name(scope: Scope, num_public: int, end: int, digest: bytes) -> BlockName:
    """Return the name of the whole block that ends at `end`, as `block_names` does, from its digest in the chain."""
    return BlockName(None if end <= num_public else scope.tenant, digest, end - BLOCK_TOKENS, end)


def state_name(scope: Scope, num_public: int, end: int, digest: bytes, tail: TokenArray) -> BlockName:
    """Return the name of a whole state, as `StateNames` does. `digest`: of its last full block, empty if it has none.
    `tail`: the tokens after that block."""
    return _state_name(*_stem(scope, num_public, end, digest), end, tail.tobytes())


def links(
    seed: bytes,
    data: memoryview,
    step: int,
    public_seed: bytes,
    num_open: int,
    *,
    first: int = 0,
    digest: bytes = b"",
) -> Iterator[bytes]:
    """Yield a chain of digests: for every `step` bytes of `data`, the digest of these bytes and the previous digest.

    The first `num_open` digests of the chain depend on `public_seed`, not on `seed`; all others depend on `seed`.
    `first`: number of digests that the chain has before `data`; `digest`: the last of those."""
    if not first:
        digest = public_seed if num_open else seed
    for number, at in enumerate(range(0, len(data) - step + 1, step), first):
        if num_open and number == num_open:
            digest = _linked(digest, seed)
        digest = _linked(data[at : at + step], digest)
        yield digest


def _stem(scope: Scope, num_public: int, end: int, digest: bytes) -> tuple[str | None, bytes]:
    """Return a whole state's team and stem (see `BlockName`). `digest`: of its last full block; empty: it has none."""
    if end <= num_public:
        return None, digest or scope.public.seed
    if not digest or end // BLOCK_TOKENS > num_public // BLOCK_TOKENS:
        return scope.tenant, digest or scope.seed
    return scope.tenant, _linked(digest, scope.seed)


def _state_name(tenant: str | None, stem: bytes, end: int, tail: bytes | memoryview) -> BlockName:
    digest = hashlib.blake2b(tail, key=stem, digest_size=DIGEST_BYTES, person=b"whole state").digest()
    return BlockName(tenant, digest, 0, end, stem)


def _linked(data: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=DIGEST_BYTES).digest()


def _scope_digest(*parts: bytes) -> bytes:
    """Return a digest of the parts and of their lengths: the same bytes cut into other parts have another digest."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"paddock cache")
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


Tokens = NDArray[np.int32]


class MediaCells(Protocol):
    """A picture, or a slice of one, or up to half a minute of sound, as a projector has read it."""

    @property
    def num_cells(self) -> int: ...
    @property
    def num_positions(self) -> int:
        """Return how many positions the next token is further: fewer than cells if positions have several parts."""

    @property
    def digest(self) -> bytes:
        """Return a hash of the contents, and of all else that its cells are computed from."""

    @property
    def is_causal(self) -> bool:
        """Return whether a cell sees only those before it. If not, all are computed in one micro-batch."""

    def positions(self, first: int) -> Tokens:
        """Return the positions of the cells if the first position is `first`: int32 [sections, cells]."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of cells in a prompt that have no tokens, because they are of a picture or a sound. A shared prefix
    contains all of them or none."""

    start: int
    """Number of the first cell."""
    cells: MediaCells

    @property
    def num_cells(self) -> int:
        return self.cells.num_cells

    @property
    def end(self) -> int:
        """Return the number of the first cell after the span."""
        return self.start + self.num_cells

    @property
    def is_at_one_position(self) -> bool:
        """Return whether all cells have the first one's position in time, as a picture's with M-RoPE: also one that is
        a single cell wide, and so takes as many positions as cells. A sound's have one each, with M-RoPE too."""
        return self.num_cells > 1 and not self.cells.positions(0)[0, -1]

    def ids(self) -> Tokens:
        """Return a number, made from the contents, for each cell; it is negative, which no token is."""
        drawn = hashlib.shake_256(self.cells.digest).digest(4 * self.num_cells)
        return np.frombuffer(drawn, dtype="<i4").astype(np.int32) | np.int32(-(1 << 31))


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of a call, as a row of KV cells."""

    tokens: Sequence[int]
    """One token for each cell, with the begin token if the model uses one; meaningless numbers in cells of spans."""
    spans: tuple[Span, ...] = ()
    """Pictures and sounds in order."""

    @classmethod
    def of(cls, parts: Iterable[Sequence[int] | MediaCells]) -> Prompt:
        """Return the prompt made of these runs of tokens, and pictures and sounds."""
        tokens: list[int] = []
        spans: list[Span] = []
        for part in parts:
            if isinstance(part, Sequence):
                tokens.extend(part)
            else:
                spans.append(Span(len(tokens), part))
                tokens.extend(repeat(0, part.num_cells))
        return cls(tokens, tuple(spans))

    @classmethod
    def placed(cls, tokens: Sequence[int], media: Iterable[tuple[int, MediaCells]]) -> Prompt:
        """Return the prompt with these tokens and media, each of which comes with the number of its first cell."""
        return cls(tokens, tuple(Span(start, cells) for start, cells in media))

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self.tokens)

    @property
    def num_media_cells(self) -> int:
        """Return how many of the cells are of pictures and sounds."""
        return sum([one.num_cells for one in self.spans])

    def ids(self) -> Tokens:
        """Return the numbers that stand for the cells in the prefix index and in the names of saved blocks."""
        ids = np.array(self.tokens, dtype=np.int32) if self.spans else np.asarray(self.tokens, dtype=np.int32)
        for one in self.spans:
            ids[one.start : one.start + one.num_cells] = one.ids()
        return ids

    def position(self, cell: int) -> int:
        """Return the position of a cell of text, of a span's first cell, or of a cell after the prompt."""
        return cell - sum(one.num_cells - one.cells.num_positions for one in self.spans if one.start < cell)

    def positions(self) -> CellPositions | None:
        """Return the positions of the cells; None: they are the cells' numbers."""
        pictures = [one for one in self.spans if one.is_at_one_position]
        if not pictures:
            return None
        return CellPositions((one.start, one.num_cells, one.cells.num_positions) for one in pictures)

    def floor(self, cell: int) -> int:
        """Return `cell`, or the start of the span that it lies inside: spans are shared as a whole."""
        return next((one.start for one in self.spans if one.start < cell < one.end), cell)

    def texts(self) -> Sequence[int]:
        """Return the tokens, without the cells of spans."""
        if not self.spans:
            return self.tokens
        starts, ends = (0, *(one.end for one in self.spans)), (*(one.start for one in self.spans), len(self.tokens))
        runs = [self.tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        return [token for run in runs for token in run]


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens of one conversation, with their scope."""

    tokens: Tokens
    scope: Scope
    num_public: int = 0
    """Number of first tokens whose KV all teams may use: those of a prompt from the catalog's `shared_prompts`."""
    positions: CellPositions | None = None
    """Positions of the cells; None: they are the cells' numbers."""

    def scope_at(self, position: int) -> Scope:
        return self.scope.public if position < self.num_public else self.scope

    def run_end(self, position: int) -> int:
        """Return the end of the run of tokens around `position` that have the same scope."""
        return min(self.num_public, len(self.tokens)) if position < self.num_public else len(self.tokens)


def common(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two runs have in common at their beginning."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
