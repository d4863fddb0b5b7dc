"""The records of API keys in Redis, found by the hash of a key. They stay as they were read, so that many take little
memory, and Python's collector has nothing to look through.
"""

from __future__ import annotations

from collections.abc import Iterator

from accounts.protocol.records import AccessRecord, opened_record

NUM_PARTS = 64


class _Parted:
    """A dict in parts: when one of 100,000 items grows, it moves all of them at once, which takes 5 ms and more."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, bytes]] = [{} for _ in range(NUM_PARTS)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __contains__(self, key: bytes) -> bool:
        return key in self.part(key)

    def part(self, key: bytes) -> dict[bytes, bytes]:
        """Return the part that has the key if any has it."""
        return self._parts[hash(key) % NUM_PARTS]

    def parts(self) -> Iterator[list[bytes]]:
        """Yield the keys of one part after the other, as they are then."""
        for part in self._parts:
            yield list(part)


class KeyIndex:
    """The values of the Redis hash of keys by their fields, and of those that are valid the hashes of their keys."""

    def __init__(self) -> None:
        self._values = _Parted()
        """Name of a key -> its sealed record, or whatever else Redis has there."""
        self._invalid: set[bytes] = set()
        """The names whose fields have no valid record."""
        self._names = _Parted()
        """SHA-256 of a key -> the name of its record."""
        self._shared: dict[bytes, set[bytes]] = {}
        """SHA-256 of a key that several records have -> their names."""

    def __len__(self) -> int:
        """Return the number of fields, those without a valid record included."""
        return len(self._values)

    @property
    def num_keys(self) -> int:
        """Return the number of keys that have a valid record."""
        return len(self._names)

    def names(self) -> Iterator[list[bytes]]:
        """Yield the names of all fields, some at a time; the index may change in between."""
        return self._values.parts()

    def value(self, name: bytes) -> bytes | None:
        """Return what Redis has in the field; None: nothing."""
        return self._values.part(name).get(name)

    def is_valid(self, name: bytes) -> bool:
        """Return whether there is a valid record in the field."""
        return name in self._values and name not in self._invalid

    def find(self, sha256: bytes) -> AccessRecord | None:
        """Return the record of a key. Of several with this key it is one whose present key it is rather than the one
        before a rotation, and of these the first by name: the same at all gateways."""
        name = self._names.part(sha256).get(sha256)
        return None if name is None else self._record(name)

    def put(self, name: bytes, value: bytes, record: AccessRecord | None) -> list[bytes]:
        """Keep a field's new value. `record`: the record in it; None: it is not valid. Return the hashes of all keys
        for which `find` may return another record now."""
        changed = self.remove(name)
        self._values.part(name)[name] = value
        if record is None:
            self._invalid.add(name)
        else:
            hashes = _hashes(record)
            for sha256 in hashes:
                self._claim(sha256, name)
            changed += hashes
        return changed

    def remove(self, name: bytes) -> list[bytes]:
        """Forget a field. Return the hashes of all keys for which `find` may return another record now."""
        hashes = _hashes(self._record(name)) if self.is_valid(name) else []
        for sha256 in hashes:
            self._disclaim(sha256, name)
        self._values.part(name).pop(name, None)
        self._invalid.discard(name)
        return hashes

    def _record(self, name: bytes) -> AccessRecord:
        return opened_record(self._values.part(name)[name])

    def _claim(self, sha256: bytes, name: bytes) -> None:
        names = self._names.part(sha256)
        there = names.setdefault(sha256, name)
        if there != name:
            self._shared.setdefault(sha256, {there}).add(name)
            names[sha256] = self._first_of(sha256)

    def _disclaim(self, sha256: bytes, name: bytes) -> None:
        names, sharing = self._names.part(sha256), self._shared.get(sha256)
        if sharing is None:
            if names.get(sha256) == name:
                del names[sha256]
            return
        sharing.discard(name)
        names[sha256] = self._first_of(sha256)
        if len(sharing) == 1:
            del self._shared[sha256]

    def _first_of(self, sha256: bytes) -> bytes:
        present = sha256.hex()
        return min(self._shared[sha256], key=lambda name: (self._record(name).sha256 != present, name))


def _hashes(record: AccessRecord) -> list[bytes]:
    return [bytes.fromhex(each) for each in (record.sha256, record.previous_sha256) if each]
