"""Remembers, per connection, responses that are stored nowhere else, as long as it may go on from them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.responses.records import NewRecord, Record, written
from gateway.api.responses.response_store import RecordStore

MAX_CONVERSATIONS = 100
"""Most conversations of one connection."""
MAX_TEAMS_SHARE = 4
"""All teams together may have this many times the bytes of one."""

Conversation = tuple["Memory", str]
"""The memory that has it, and the id of its last response."""


class Memories:
    """Counts what all connections of this process remember, by team.

    Where a team has too much, the conversation that nobody went on from for longest is forgotten, on whichever
    connection; where all have, one of the team with most.
    """

    def __init__(self, max_bytes_per_team: int) -> None:
        self._max_bytes_per_team = max_bytes_per_team
        self._bytes: Counter[str] = Counter()
        self._conversations: defaultdict[str, OrderedDict[Conversation, None]] = defaultdict(OrderedDict)
        """Conversations by team; the one that nobody went on from for longest comes first."""

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def bytes_of(self, team: str) -> int:
        return self._bytes[team]

    def add(self, team: str, num_bytes: int) -> None:
        """Count bytes that a connection remembers now or, if negative, has forgotten."""
        self._bytes[team] += num_bytes
        if not self._bytes[team]:
            del self._bytes[team]

    def went_on(self, team: str, conversation: Conversation) -> None:
        """Note that the conversation is the latest of its team now."""
        self._conversations[team][conversation] = None
        self._conversations[team].move_to_end(conversation)

    def ended(self, team: str, conversation: Conversation) -> None:
        """Note that nobody can go on from the conversation any more."""
        left = self._conversations[team]
        left.pop(conversation, None)
        if not left:
            del self._conversations[team]

    def keep_bounds(self, team: str) -> None:
        """Have the oldest conversations forgotten, as far as the bounds need it."""
        while self._bytes[team] > self._max_bytes_per_team and self._forget_oldest(team):
            pass
        while self._bytes.total() > self._max_bytes_per_team * MAX_TEAMS_SHARE:
            if not self._forget_oldest(max(self._bytes, key=self._bytes.__getitem__)):
                return

    def _forget_oldest(self, team: str) -> bool:
        if not self._conversations.get(team):
            return False
        memory, id_ = next(iter(self._conversations[team]))
        memory.forget(id_)
        return True


@dataclass(slots=True)
class _Remembered:
    """A response that is remembered: as long as a conversation ends with it, or another one goes on from it."""

    record: bytes
    before: str | None
    """Id of the latest one before it that is remembered as well."""
    num_users: int = 0


class Memory:
    """The records of one connection (a `RecordStore`), before those of Redis. Close it with the connection.

    The conversation that nobody went on from for longest makes room for the others.
    """

    def __init__(self, store: RecordStore, memories: Memories, max_bytes: int) -> None:
        self._store = store
        self._memories = memories
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: dict[tuple[str, str], _Remembered] = {}
        """Records by team and id: a key may become another team's while its connection lasts."""
        self._conversations: dict[str, tuple[str, str]] = {}
        """Id of its last response -> its team, and id of the last one that is remembered here; the latest one comes
        last."""

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        return await self._store.keep(team, id, record, before, again=again)

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        stored: dict[str, bytes | None] = {}
        if missing := [id_ for id_ in ids if (team, id_) not in self._records]:
            stored = dict(zip(missing, await self._store.find(team, missing), strict=True))
        return [known.record if (known := self._records.get((team, id_))) else stored.get(id_) for id_ in ids]

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        stored: dict[str, int] = {}
        if missing := [id_ for id_ in ids if (team, id_) not in self._records]:
            stored = dict(zip(missing, await self._store.sizes(team, missing), strict=True))
        return [len(known.record) if (known := self._records.get((team, id_))) else stored.get(id_, 0) for id_ in ids]

    async def drop(self, team: str, id: str) -> bool:
        return await self._store.drop(team, id)

    async def note(self, team: str, record: Record | NewRecord, *, is_stored: bool) -> None:
        """Remember a complete response, unless it is stored; its conversation is the latest one now."""
        id_ = str(record.response["id"])
        raw = None if is_stored else await written(record)
        # What is stored is found by its record's chain: ids of it, hundreds for each conversation, are not kept here.
        last = next((one for one in reversed(record.chain) if (team, one) in self._records), None)
        if raw is not None:
            self._add(team, id_, raw, last)
            last = id_
        if last is not None:
            self._records[team, last].num_users += 1
            self._conversations[id_] = (team, last)
            self._memories.went_on(team, (self, id_))
        if record.chain and record.chain[-1] in self._conversations:
            self.forget(record.chain[-1])
        while self._conversations and (
            len(self._conversations) > MAX_CONVERSATIONS or self._num_bytes > self._max_bytes
        ):
            self.forget(next(iter(self._conversations)))
        self._memories.keep_bounds(team)

    def forget(self, id_: str) -> None:
        """Forget the conversation that ends with this response, but for what others go on from as well.

        It takes as long as what is forgotten is: thousands of them may have to make room at once.
        """
        team, last = self._conversations.pop(id_)
        self._memories.ended(team, (self, id_))
        left: str | None = last
        while left is not None:
            known = self._records[team, left]
            known.num_users -= 1
            if known.num_users:
                return
            self._drop(team, left)
            left = known.before

    def close(self) -> None:
        """Forget everything."""
        for id_ in [*self._conversations]:
            self.forget(id_)

    def _add(self, team: str, id_: str, record: bytes, before: str | None) -> None:
        self._records[team, id_] = _Remembered(record, before)
        if before is not None:
            self._records[team, before].num_users += 1
        self._num_bytes += len(record)
        self._memories.add(team, len(record))

    def _drop(self, team: str, id_: str) -> None:
        num_bytes = len(self._records.pop((team, id_)).record)
        self._num_bytes -= num_bytes
        self._memories.add(team, -num_bytes)
