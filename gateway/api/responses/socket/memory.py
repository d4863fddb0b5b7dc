"""Remembers a WebSocket connection's responses that are not stored, as long as the connection may continue them."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.api.responses.records import NewRecord, Record, written
from gateway.api.responses.response_store import RecordStore

MAX_CONVERSATIONS = 100
"""Maximum number of conversations that one connection remembers; then the least recently continued one is forgotten."""
MAX_TEAMS_SHARE = 4
"""Maximum bytes of all teams together, as a multiple of the maximum bytes of one team."""

Conversation = tuple["Memory", str]
"""A conversation: the memory that has it, and the id of its last response."""


class Memories:
    """Counts the bytes that all connections of this process remember, by team.

    If a team has too many bytes, its least recently continued conversation is forgotten, whichever connection has it.
    If all teams together have too many, the team with the most bytes loses a conversation in the same way."""

    def __init__(self, max_bytes_per_team: int) -> None:
        self._max_bytes_per_team = max_bytes_per_team
        self._bytes: Counter[str] = Counter()
        self._conversations: defaultdict[str, OrderedDict[Conversation, None]] = defaultdict(OrderedDict)
        """Team -> its conversations, the least recently continued first."""

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def bytes_of(self, team: str) -> int:
        return self._bytes[team]

    def add(self, team: str, num_bytes: int) -> None:
        """Count bytes that a connection has begun to remember or, if negative, has forgotten."""
        self._bytes[team] += num_bytes
        if not self._bytes[team]:
            del self._bytes[team]

    def went_on(self, team: str, conversation: Conversation) -> None:
        """Record that the conversation is now the most recently continued one of its team."""
        self._conversations[team][conversation] = None
        self._conversations[team].move_to_end(conversation)

    def ended(self, team: str, conversation: Conversation) -> None:
        """Remove a conversation from those of its team, since its `Memory` has forgotten it."""
        left = self._conversations[team]
        left.pop(conversation, None)
        if not left:
            del self._conversations[team]

    def keep_bounds(self, team: str) -> None:
        """Forget the least recently continued conversations until the team and all teams together are in bounds."""
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
    """A remembered response. It is forgotten once no conversation and no other remembered response needs it."""

    record: bytes
    before: str | None
    """Id of the last remembered response before this one in the conversation; None: none before it is remembered."""
    num_users: int = 0


class Memory:
    """Finds a response's record among those that a connection remembers, or else in Redis (a `RecordStore`).

    The least recently continued conversation is forgotten to make room. Close the memory with the connection."""

    def __init__(self, store: RecordStore, memories: Memories, max_bytes: int) -> None:
        self._store = store
        self._memories = memories
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._records: dict[tuple[str, str], _Remembered] = {}
        """(Team, id) -> record. A key may move to another team while its connection is open."""
        self._conversations: dict[str, tuple[str, str]] = {}
        """Id of a conversation's last response, stored or remembered -> the conversation's team, and the id of its
        latest remembered response. The most recently continued conversation comes last."""

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
        """Record that a response has continued its conversation. Remember the response, unless it is stored."""
        id_ = str(record.response["id"])
        raw = None if is_stored else await written(record)
        # Ids of stored responses, hundreds per conversation, are not kept here: a record's chain has them.
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
        """Forget the conversation that ends with this response. Responses that other conversations share are kept.

        The time grows only with the number of responses forgotten: thousands of conversations may have to go at once.
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
        """Forget all conversations of the connection."""
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
