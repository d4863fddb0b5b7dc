"""The records of API keys in Redis, found by the hash of a key. They stay as they were read, so that many take little
memory, and Python's collector has nothing to look through.
"""

from __future__ import annotations

from collections.abc import Collection

from accounts.protocol.records import AccessRecord, opened_record


class KeyIndex:
    """The values of the Redis hash of keys by their fields, and of those that are valid the hashes of their keys."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        """Name of a key -> its sealed record, or whatever else Redis has there."""
        self._invalid: set[bytes] = set()
        """The names whose fields have no valid record."""
        self._names: dict[bytes, bytes] = {}
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

    @property
    def names(self) -> Collection[bytes]:
        return self._values.keys()

    def value(self, name: bytes) -> bytes | None:
        """Return what Redis has in the field; None: nothing."""
        return self._values.get(name)

    def is_valid(self, name: bytes) -> bool:
        """Return whether there is a valid record in the field."""
        return name in self._values and name not in self._invalid

    def find(self, sha256: bytes) -> AccessRecord | None:
        """Return the record of a key. Of several with this key it is one whose present key it is rather than the one
        before a rotation, and of these the first by name: the same at all gateways."""
        name = self._names.get(sha256)
        return None if name is None else opened_record(self._values[name])

    def put(self, name: bytes, value: bytes, record: AccessRecord | None) -> list[bytes]:
        """Keep a field's new value. `record`: the record in it; None: it is not valid. Return the hashes of all keys
        for which `find` may return another record now."""
        changed = self.remove(name)
        self._values[name] = value
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
        hashes = _hashes(opened_record(self._values[name])) if self.is_valid(name) else []
        for sha256 in hashes:
            self._disclaim(sha256, name)
        self._values.pop(name, None)
        self._invalid.discard(name)
        return hashes

    def _claim(self, sha256: bytes, name: bytes) -> None:
        there = self._names.setdefault(sha256, name)
        if there != name:
            self._shared.setdefault(sha256, {there}).add(name)
            self._names[sha256] = self._first_of(sha256)

    def _disclaim(self, sha256: bytes, name: bytes) -> None:
        sharing = self._shared.get(sha256)
        if sharing is None:
            if self._names.get(sha256) == name:
                del self._names[sha256]
            return
        sharing.discard(name)
        self._names[sha256] = self._first_of(sha256)
        if len(sharing) == 1:
            del self._shared[sha256]

    def _first_of(self, sha256: bytes) -> bytes:
        present = sha256.hex()
        return min(self._shared[sha256], key=lambda name: (opened_record(self._values[name]).sha256 != present, name))


def _hashes(record: AccessRecord) -> list[bytes]:
    return [bytes.fromhex(each) for each in (record.sha256, record.previous_sha256) if each]
