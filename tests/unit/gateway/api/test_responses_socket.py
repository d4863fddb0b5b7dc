"""What a connection remembers, and how many of its requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Sequence

import pytest

from gateway.api.http.sockets import Sockets
from gateway.api.responses import records
from gateway.api.responses.records import LONG_BYTES, NewRecord, Record, decode_record, encode_record
from gateway.api.responses.request import LONG_CHARS
from gateway.api.responses.response_store import ResponseStore
from gateway.api.responses.socket.memory import MAX_CONVERSATIONS, MAX_TEAMS_SHARE, Memories, Memory
from gateway.api.responses.socket.stream_queues import (
    MAX_MESSAGES,
    MAX_STREAMS,
    Create,
    StreamQueues,
    draft_of_message,
    read_message,
)
from gateway.call import Principal
from gateway.errors import StreamLimit, TooManyConnections, TooManySockets
from gateway.telemetry.request_log import Ignored


class Shared:
    """The store of all gateways."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.asked: list[Sequence[str]] = []

    async def keep(self, team: str, id: str, record: bytes, before: Sequence[str] = (), *, again: bool = False) -> bool:
        self.records[id] = record
        return True

    async def sizes(self, team: str, ids: Sequence[str]) -> list[int]:
        return [len(self.records.get(id_, b"")) for id_ in ids]

    async def find(self, team: str, ids: Sequence[str]) -> list[bytes | None]:
        self.asked.append(ids)
        return [self.records.get(id_) for id_ in ids]

    async def drop(self, team: str, id: str) -> bool:
        return self.records.pop(id, None) is not None


def record(id_: str, *chain: str, text: str = "") -> Record:
    return Record(response={"id": id_, "output": [], "text": text}, input=(), chain=chain)


async def known(memory: Memory, *ids: str) -> list[str]:
    found = await memory.find("team", ids)
    return [decode_record(raw).response["id"] for raw in found if raw is not None]


async def test_what_is_stored_is_asked_for_where_it_is_stored() -> None:
    shared = Shared()
    memory = Memory(shared, Memories(1 << 20), 10_000)
    await memory.note("team", record("a"), is_stored=False)
    await memory.note("team", record("b", "a"), is_stored=True)
    assert await known(memory, "a") == ["a"]
    assert shared.asked == []
    assert await known(memory, "a", "b") == ["a"]
    assert shared.asked == [["b"]]
    await memory.keep("team", "b", b'{"response":{"id":"b"},"input":[]}')
    assert await known(memory, "b", "a") == ["b", "a"]
    assert await memory.drop("team", "b")
    assert await known(memory, "b", "a") == ["a"]


async def test_of_a_key_that_has_changed_teams_nothing_is_remembered() -> None:
    memory = Memory(Shared(), Memories(1 << 20), 10_000)
    await memory.note("team", record("a"), is_stored=False)
    assert await memory.find("another", ["a"]) == [None]
    assert await known(memory, "a") == ["a"]


async def test_the_oldest_conversations_make_room() -> None:
    memory = Memory(Shared(), Memories(1 << 20), 3000)
    await memory.note("team", record("a", text="x" * 900), is_stored=False)
    await memory.note("team", record("b", text="x" * 900), is_stored=False)
    await memory.note("team", record("a2", "a", text="x" * 900), is_stored=False)
    assert await known(memory, "a", "b", "a2") == ["a", "b", "a2"]
    await memory.note("team", record("c", text="x" * 900), is_stored=False)
    assert await known(memory, "a", "b", "a2", "c") == ["a", "a2", "c"]
    await memory.note("team", record("d", text="x" * 9000), is_stored=False)
    assert await known(memory, "a", "b", "a2", "c", "d") == []


async def test_a_number_of_conversations() -> None:
    memory = Memory(Shared(), Memories(1 << 20), 1 << 20)
    ids = [f"r{n}" for n in range(MAX_CONVERSATIONS + 5)]
    for id_ in ids:
        await memory.note("team", record(id_), is_stored=False)
    assert await known(memory, *ids) == ids[5:]


async def test_forks_of_one_conversation() -> None:
    memory = Memory(Shared(), Memories(1 << 20), 1 << 20)
    for one in (record("a"), record("b", "a"), record("c", "a"), record("d", "a", "b")):
        await memory.note("team", one, is_stored=False)
    assert await known(memory, "a", "b", "c", "d") == ["a", "b", "c", "d"]


async def test_connections_of_a_team_share_a_bound() -> None:
    """The oldest conversations make room, on whichever connection; what another team remembers stays."""
    memories = Memories(4500)
    first, second, other = (Memory(Shared(), memories, 1 << 20) for _ in range(3))
    await first.note("team", record("a", text="x" * 900), is_stored=False)
    await second.note("team", record("b", text="x" * 900), is_stored=False)
    await other.note("others", record("o", text="x" * 4000), is_stored=False)
    await first.note("team", record("a2", "a", text="x" * 900), is_stored=False)
    await second.note("team", record("c", text="x" * 1900), is_stored=False)
    assert await known(second, "b", "c") == ["c"]
    assert await known(first, "a", "a2") == ["a", "a2"]
    assert [raw is not None for raw in await other.find("others", ["o"])] == [True]
    assert memories.bytes_of("team") <= 4500


async def test_all_teams_share_a_bound() -> None:
    memories = Memories(5000)
    held = [Memory(Shared(), memories, 1 << 20) for _ in range(3 * MAX_TEAMS_SHARE)]
    for number, memory in enumerate(held):
        await memory.note(f"team-{number}", record("a", text="x" * 4000), is_stored=False)
        assert memories.num_bytes <= 5000 * MAX_TEAMS_SHARE
    assert memories.bytes_of(f"team-{len(held) - 1}")


async def test_a_connection_that_closes_gives_back_what_it_remembered() -> None:
    memories = Memories(1 << 20)
    memory, stays = Memory(Shared(), memories, 1 << 20), Memory(Shared(), memories, 1 << 20)
    for one in (record("a"), record("b", "a"), record("c", "a"), record("d", "a", "b")):
        await memory.note("team", one, is_stored=False)
    await stays.note("team", record("e"), is_stored=False)
    left = len(encode_record(record("e")))
    assert memories.num_bytes > left
    memory.close()
    assert memories.num_bytes == left
    assert await known(memory, "a", "b", "c", "d") == []
    assert await known(stays, "e") == ["e"]


def test_so_many_sockets_of_a_key_and_of_all() -> None:
    sockets, one, another = Sockets(3, 2), principal("one"), principal("another", "blue")
    with contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(sockets.opened(Lasting(), one))
        with pytest.raises(TooManySockets, match="has 2 WebSockets open here"):
            sockets.check(one)
        held.enter_context(sockets.opened(Lasting(), another))
        with pytest.raises(TooManyConnections, match="3 WebSockets are open"):
            sockets.check(another)
    with sockets.opened(Lasting(), one):
        sockets.check(one)


def test_all_keys_of_a_team_leave_sockets_to_others() -> None:
    sockets = Sockets(8, 3)
    with contextlib.ExitStack() as held:
        for name in ("one", "two"):
            for _ in range(3):
                held.enter_context(sockets.opened(Lasting(), principal(name)))
        with pytest.raises(TooManySockets, match="The team 'team' has 6 WebSockets open here"):
            sockets.check(principal("three"))
        sockets.check(principal("other", "blue"))
    sockets.check(principal("one"))


class Lasting:
    """A connection that stays."""

    def stop(self) -> None:
        pass


def principal(key_id: str, team: str = "team") -> Principal:
    return Principal(key_id, team, None, False)


class Held:
    """Counts what is over."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


async def test_bounds_of_what_waits() -> None:
    go, done, held = asyncio.Event(), [], Held()

    async def respond(message: Create, held: Held) -> None:
        await go.wait()
        done.append(message.stream_id)

    rested = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        queues = StreamQueues(tasks, respond, rested.set, max_bytes=1000)
        queues.add(Create({}, "big", 5000), held)
        with pytest.raises(StreamLimit, match="more than 1000 bytes"):
            queues.add(Create({}, "big", 10), held)
        go.set()
        await rested.wait()
        assert not queues.busy
        go.clear()
        rested.clear()
        for number in range(MAX_STREAMS):
            queues.add(Create({}, str(number), 1), held)
        with pytest.raises(StreamLimit, match="16 streams"):
            queues.add(Create({}, "one more", 1), held)
        for _ in range(MAX_MESSAGES - MAX_STREAMS):
            queues.add(Create({}, "0", 1), held)
        with pytest.raises(StreamLimit, match="32 requests"):
            queues.add(Create({}, "0", 1), held)
        go.set()
        await rested.wait()
    assert len(done) == held.num_closed == 1 + MAX_MESSAGES
    assert queues.busy is False


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_client_that_has_left_ends_all_lanes(has_begun: bool) -> None:
    held = Held()

    async def respond(message: Create, held: Held) -> None:
        await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        queues = StreamQueues(tasks, respond, lambda: None, max_bytes=1000)
        queues.add(Create({}, "a", 1), held)
        queues.add(Create({}, "", 1), held)
        if has_begun:
            await asyncio.sleep(0)
        await queues.cancel()
    assert not queues.busy
    assert held.num_closed == 2


async def test_ids_of_stored_conversations_are_not_kept() -> None:
    """Hundreds of them for each of a hundred conversations on each connection came to a gigabyte."""
    memories = Memories(1 << 20)
    memory = Memory(Shared(), memories, 1 << 20)
    chain = tuple(f"stored-{n}" for n in range(300))
    for number in range(50):
        await memory.note("team", record(f"r{number}", *chain), is_stored=True)
    assert not memory._conversations
    await memory.note("team", record("u", *chain), is_stored=False)
    await memory.note("team", record("v", *chain, "u"), is_stored=True)
    assert [*memory._conversations.items()] == [("v", ("team", "u"))]
    assert [id_ for _, id_ in memory._records] == ["u"]
    assert await known(memory, "u") == ["u"]
    await memory.note("team", record("w", *chain, "u", "v"), is_stored=True)
    assert list(memory._conversations) == ["w"]
    memory.close()
    assert memories.num_bytes == 0


@pytest.mark.serial
async def test_forgetting_a_conversation_costs_what_is_forgotten() -> None:
    """A hundred that went on from one of 300 took 1.6 ms each, and hundreds may have to make room in one go."""
    memory = Memory(Shared(), Memories(64 << 20), 64 << 20)
    chain = tuple(f"c{number}" for number in range(300))
    for number, id_ in enumerate(chain):
        await memory.note("team", record(id_, *chain[:number]), is_stored=False)
    began = time.process_time()
    for number in range(MAX_CONVERSATIONS):
        await memory.note("team", record(f"b{number}", *chain), is_stored=False)
    noted = time.process_time()
    for number in range(MAX_CONVERSATIONS - 1):
        memory.forget(f"b{number}")
    assert time.process_time() - noted < (noted - began) / 4
    assert len(memory._records) == len(chain) + 1
    memory.forget(f"b{MAX_CONVERSATIONS - 1}")
    assert not memory._records


async def test_what_is_remembered_is_what_conversations_consist_of() -> None:
    chosen, memories = random.Random(7), Memories(1 << 20)
    memory = Memory(Shared(), memories, 1 << 20)
    paths: dict[str, list[str]] = {}
    """Of each conversation that may be gone on from, by the id of its last response."""
    unstored: set[str] = set()
    for number in range(2_000):
        id_, before = f"r{number}", chosen.choice([None, *paths])
        chain = [] if before is None else paths[before]
        chain = chain[: chosen.randrange(len(chain) + 1)] if chosen.random() < 0.5 else chain
        is_stored = chosen.random() < 0.3
        await memory.note("team", record(id_, *chain), is_stored=is_stored)
        unstored |= set() if is_stored else {id_}
        if chain:
            paths.pop(chain[-1], None)
        paths[id_] = [*chain, id_]
        if len(paths) > 20:
            gone = chosen.choice([*paths])
            del paths[gone]
            if gone in memory._conversations:
                memory.forget(gone)
        remembered = {one for path in paths.values() for one in path if one in unstored}
        assert {one for _, one in memory._records} == remembered
        assert memory._conversations.keys() == {last for last, path in paths.items() if unstored & {*path}}
    memory.close()
    assert memories.num_bytes == 0


async def test_a_long_one_is_written_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `store: false` its 32 MiB were encoded on the loop, where those of a response that is stored were."""
    threads: list[threading.Thread] = []

    def noted(one: Record | NewRecord) -> bytes:
        threads.append(threading.current_thread())
        return encode_record(one)

    monkeypatch.setattr(records, "encode_record", noted)
    item = {"id": "x", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * LONG_BYTES}]}
    long_one = NewRecord(response={"id": "long", "output": []}, input=json.dumps([item]).encode())
    shared = Shared()
    memory = Memory(shared, Memories(1 << 20), 1 << 20)
    await memory.note("team", long_one, is_stored=False)
    await memory.note("team", record("short"), is_stored=False)
    await ResponseStore(shared, 1 << 20).keep("team", long_one)
    assert [thread is threading.main_thread() for thread in threads] == [False, True, False]
    [raw] = await memory.find("team", ["long"])
    assert raw == shared.records["long"]
    assert decode_record(raw).input == (item,)


def test_what_a_connection_remembers_is_written_once() -> None:
    """Where it is put together, which is done on a thread."""
    message = read_message(
        json.dumps({"type": "response.create", "model": "m", "input": "word " * LONG_CHARS, "store": False}).encode()
    )
    kept = draft_of_message(message, Ignored()).resolved({}).complete().to_keep
    assert isinstance(kept, bytes)
