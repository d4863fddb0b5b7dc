"""The index of prefix hashes: which workers of a pool have which prefix cached. It is the largest table of a gateway.

Workers are numbers here (`WorkerState.number`). Most hashes have one holder (a worker that has the prefix), which costs
a dictionary entry and the hash itself. Lengths of prefixes are not kept: the place of a hash in a prompt gives its
length.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

Holders = int | tuple[int, ...] | set[int]
"""Numbers of the workers that have a prefix cached: one number, a tuple of a few, or a set of many."""

FEW = 8
"""Up to this many holders of a hash are kept as a tuple, more as a set: a set of two takes 4 times the memory."""
SHARDS = 256
"""Number of dictionaries that the index consists of. A single dictionary with millions of entries would block the
process for a tenth of a second when it grows; small ones do not."""
_BITS = 60
"""Bits kept of a hash: a Python int of 60 bits takes 32 bytes, of 64 bits 48. Equal hashes make a cost look too low."""
_MASK = (1 << _BITS) - 1
_SHARD = _BITS - 8
"""Number of bits to shift a hash right by to get the number of its shard. The highest bits choose the shard, since
inside a dictionary the lowest bits choose an entry's place."""
_LEAST_LOG = 64
_WRITTEN_ANEW = 6
"""A shard is copied to a new dictionary each time about a sixth of its entries has been replaced. Without copying, a
dictionary that loses as many entries as it gains doubles in size once its spare room is used up."""


class PrefixHashIndex:
    """Maps a prefix hash to the workers that have it (its holders), and a worker to its hashes. For use by one thread.

    A worker's hashes are kept in a log. Dropped hashes stay in it until they make up a third of the log."""

    def __init__(self) -> None:
        self._shards: list[dict[int, Holders]] = [{} for _ in range(SHARDS)]
        self._logs: dict[int, array[int]] = {}
        self._counts: dict[int, int] = {}
        self._dropped = 0
        """Number of dropped hashes for which no shard has been copied yet: each copy lowers it (`_write_anew`)."""
        self._turn = 0

    def holders(self, prefix_hash: int) -> Holders:
        """Return the holders of a prefix hash. A set belongs to the index: read it at once, never change it."""
        key = prefix_hash & _MASK
        return self._shards[key >> _SHARD].get(key, ())

    def levels(self, hashes: Sequence[int]) -> list[tuple[int, Holders]]:
        """Return (place, holders) for each place in `hashes` at which the number of holders changes, deepest first.
        `hashes`: the prefix hashes of one prompt, from shallow to deep. A worker that has a prefix also has all shorter
        ones. So if two hashes have equally many holders, the hashes between them are not looked up."""
        if not hashes:
            return []
        found: dict[int, tuple[int, Holders]] = {}
        last = len(hashes) - 1
        spans = [(0, last)]
        for place in {0, last}:
            found[place] = self._sized(hashes[place])
        while spans:
            low, high = spans.pop()
            if high - low > 1 and found[low][0] != found[high][0]:
                middle = (low + high) // 2
                found[middle] = self._sized(hashes[middle])
                spans += (low, middle), (middle, high)
        levels, most = [], 0
        for place in sorted(found, reverse=True):
            size, holders = found[place]
            if size > most:
                most = size
                levels.append((place, holders))
        return levels

    def _sized(self, prefix_hash: int) -> tuple[int, Holders]:
        key = prefix_hash & _MASK
        holders = self._shards[key >> _SHARD].get(key, ())
        return 1 if isinstance(holders, int) else len(holders), holders

    def count(self, number: int) -> int:
        """Return the number of prefix hashes that the worker has."""
        return self._counts.get(number, 0)

    def add(self, number: int, hashes: Iterable[int]) -> None:
        log, shards, added = self._logs.setdefault(number, array("Q")), self._shards, 0
        for prefix_hash in hashes:
            key = prefix_hash & _MASK
            shard = shards[key >> _SHARD]
            size = len(shard)
            there = shard.setdefault(key, number)  # one look-up, since each costs much in a large table
            if len(shard) == size:
                if _has(there, number):
                    continue
                _join(shard, key, there, number)
            log.append(key)
            added += 1
        self._counts[number] = self._counts.get(number, 0) + added
        if len(log) > _LEAST_LOG + self._counts[number] * 3 // 2:
            self._tidy(number)

    def drop(self, number: int, hashes: Iterable[int]) -> None:
        """Remove prefix hashes of a worker; hashes that it does not have are ignored."""
        shards, dropped = self._shards, 0
        for prefix_hash in hashes:
            key = prefix_hash & _MASK
            shard = shards[key >> _SHARD]
            there = shard.pop(key, None)
            if there == number:
                dropped += 1
            elif there is not None:
                dropped += _leave(shard, key, there, number)
        self._counts[number] = self._counts.get(number, 0) - dropped
        self._write_anew(dropped)

    def forget(self, number: int) -> None:
        """Remove all prefix hashes of a worker."""
        self.drop(number, self._logs.pop(number, ()))
        self._counts.pop(number, None)

    def _write_anew(self, dropped: int) -> None:
        """Add `dropped` to the count of removed hashes, and copy each shard that is now due, so that none grows."""
        self._dropped += dropped
        while self._dropped > (due := len(self._shards[self._turn]) // _WRITTEN_ANEW + 1):
            self._dropped -= due
            anew: dict[int, Holders] = {}
            anew.update(self._shards[self._turn])
            self._shards[self._turn] = anew
            self._turn = (self._turn + 1) % SHARDS

    def _tidy(self, number: int) -> None:
        """Rewrite a worker's log without the dropped hashes and without repeats: a hash that was dropped and came back
        is in it twice."""
        live = {key for key in self._logs[number] if _has(self._shards[key >> _SHARD].get(key, ()), number)}
        self._logs[number] = array("Q", live)


def _join(shard: dict[int, Holders], key: int, there: Holders, number: int) -> None:
    if isinstance(there, int):
        shard[key] = (there, number)
    elif isinstance(there, set):
        there.add(number)
    elif len(there) < FEW:
        shard[key] = (*there, number)
    else:
        shard[key] = {*there, number}


def _leave(shard: dict[int, Holders], key: int, there: Holders, number: int) -> bool:
    """Put back a hash with its holders `there`, less worker `number`. Return False if `number` was none of them."""
    if isinstance(there, int) or number not in there:
        shard[key] = there
        return False
    if isinstance(there, set):
        there.discard(number)
        shard[key] = there if len(there) > FEW // 2 else tuple(there)
    else:
        left = tuple(holder for holder in there if holder != number)
        shard[key] = left if len(left) > 1 else left[0]
    return True


def _has(holders: Holders, number: int) -> bool:
    return number == holders if isinstance(holders, int) else number in holders
