"""What a connection remembers: responses that are stored nowhere else, as long as it may go on from them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.responses.records import Record, encode_record
from gateway.api.responses.shelf import Store

MAX_CONVERSATIONS = 100


class Memory:
    """A store (`gateway.api.responses.shelf.Store`) of one connection, over that of all.

    The conversation that nobody went on from for longest makes room for the others.
    """

    def __init__(self, store: Store, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._records: dict[tuple[str, str], bytes] = {}
        """By team and id: a key may become another team's while its connection lasts."""
        self._conversations: dict[str, frozenset[str]] = {}
        """Id of its last response -> ids of all of them; the latest one comes last."""

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        return await self._store.keep(team, id, record, before, again=again)

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        stored: dict[str, bytes | None] = {}
        if missing := [id_ for id_ in ids if (team, id_) not in self._records]:
            stored = dict(zip(missing, await self._store.find(team, missing), strict=True))
        return [self._records.get((team, id_)) or stored.get(id_) for id_ in ids]

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        stored: dict[str, int] = {}
        if missing := [id_ for id_ in ids if (team, id_) not in self._records]:
            stored = dict(zip(missing, await self._store.sizes(team, missing), strict=True))
        return [len(self._records.get((team, id_), b"")) or stored.get(id_, 0) for id_ in ids]

    async def drop(self, team: str, id: str) -> bool:
        return await self._store.drop(team, id)

    def note(self, team: str, record: Record, *, is_stored: bool) -> None:
        """A response that is complete. Only what is not stored is remembered."""
        id_ = str(record.response["id"])
        if not is_stored:
            self._records[team, id_] = encode_record(record)
        if record.chain:
            self._conversations.pop(record.chain[-1], None)
        self._conversations[id_] = frozenset((*record.chain, id_))
        while len(self._conversations) > MAX_CONVERSATIONS or self._num_bytes() > self._max_bytes:
            del self._conversations[next(iter(self._conversations))]
            self._forget()

    def _num_bytes(self) -> int:
        return sum(map(len, self._records.values()))

    def _forget(self) -> None:
        known = frozenset().union(*self._conversations.values())
        self._records = {key: record for key, record in self._records.items() if key[1] in known}
