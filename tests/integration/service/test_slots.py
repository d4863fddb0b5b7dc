"""Slots of a real worker process: saved into files, brought back after a restart, erased; and who may do that."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from starlette.requests import Request

from tests.integration.service.conftest import ROOT, Process, RedisServer
from tests.integration.service.wire import SECRET, Gateway
from workers.protocol import keys
from workers.protocol.events import CallFailed, Failure, FailureCode, Finished
from workers.protocol.framing import SUBMIT_PATH
from workers.protocol.heartbeat import decode_heartbeat
from workers.protocol.queries import SLOTS_PATH, SlotInfo, SlotRestored, SlotSaved, decode_slot_infos
from workers.protocol.requests import AdapterUse, GenerateRequest, Sampling, Submit
from workers.service.routes.slots import SlotKeeper, SlotRoutes

DEMO = ROOT / "deploy" / "demo" / "paddock-demo.gguf"
PIRATE = ROOT / "deploy" / "demo" / "paddock-demo-pirate-lora.gguf"

STORY = "Once upon a time there was a paddock with a gate, a horse and a small dog that never slept. " * 3
NUM_TOKENS = 12


@contextmanager
def worker(
    redis: RedisServer, folder: Path, name: str, *flags: str, model: Path = DEMO, drained: bool = False
) -> Iterator[str]:
    """`drained`: it is told to stop at the end, and must, instead of being killed."""
    argv = [sys.executable, "-m", "workers.cli", "worker", "--model", str(model), "--alias", name]
    argv += ["--redis-url", redis.url, "--worker-id", name, "--slots", "2", "--kv-tokens", "1024", "--ctx", "512"]
    argv += ["--llama", '{"n_threads": 1}', "--state-dir", str(folder / "state"), *flags]
    process = Process(argv, folder, {"PADDOCK_WORKER_SECRET": SECRET})
    try:
        deadline = time.monotonic() + 30
        while not (record := redis.client.hget(keys.worker(name, name), "beat")):
            assert time.monotonic() < deadline, process.errors()
            time.sleep(0.02)
        assert isinstance(record, bytes)
        yield decode_heartbeat(record).address
        if drained:
            process.signal(signal.SIGTERM)
            assert process.wait() == 0, process.errors()
    finally:
        process.kill()
        redis.client.delete(keys.worker(name, name))


class Client:
    """One gateway that speaks for several teams."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self.name = secrets.token_hex(4)
        self.gateway = Gateway(session, address, self.name)
        self.session = session
        self.address = address
        self.number = 0
        """Of the last call."""

    async def slot(self) -> int:
        """Where the last call was."""
        [slot] = [info.id for info in await self.slots() if info.request_id == self.request_id]
        return slot

    @property
    def request_id(self) -> str:
        return f"{self.name}-{self.number}"

    async def say(
        self,
        prompt: str,
        tenant: str = "red",
        salt: str = "",
        adapters: tuple[AdapterUse, ...] = (),
        max_tokens: int = NUM_TOKENS,
    ) -> tuple[str, int]:
        """-> the answer, greedy, and how many of its prompt's tokens were cached."""
        self.number += 1
        request = GenerateRequest(
            prompt=prompt,
            sampling=Sampling(temperature=0),
            max_tokens=max_tokens,
            ignore_eos=True,
            cache_salt=salt,
            adapters=adapters,
        )
        submit = Submit(gateway=self.name, call=self.number, request=request, tenant=tenant, request_id=self.request_id)
        async with self.gateway.connected() as heard:
            status, body = await self.gateway.post(SUBMIT_PATH, msgspec.json.encode(submit))
            assert status == 202, body
            await heard.until_end(self.number)
            end = heard.end(self.number)
            assert isinstance(end, Finished)
            return heard.text(self.number), end.usage.cached_tokens

    async def act(self, slot: int, action: str, tenant: str = "red", **fields: Any) -> dict[str, object]:
        body = json.dumps({"action": action, "tenant": tenant, **fields}).encode()
        status, answer = await self.gateway.post(f"{SLOTS_PATH}/{slot}", body)
        value: dict[str, object] = json.loads(answer)
        assert (status == 200) == ("code" not in value)
        return value

    async def save(self, slot: int, filename: str, tenant: str = "red", salt: str = "") -> SlotSaved:
        return msgspec.convert(await self.act(slot, "save", tenant, filename=filename, salt=salt), SlotSaved)

    async def restore(self, slot: int, filename: str, **fields: Any) -> SlotRestored:
        return msgspec.convert(await self.act(slot, "restore", filename=filename, **fields), SlotRestored)

    async def refused(self, slot: int, action: str, tenant: str = "red", **fields: Any) -> Failure:
        return msgspec.convert(await self.act(slot, action, tenant, **fields), Failure)

    async def slots(self) -> list[SlotInfo]:
        status, body = await self.gateway.get(SLOTS_PATH, **await self.gateway.headers())
        assert status == 200
        return decode_slot_infos(body)


@pytest.fixture(scope="module")
def slot_folder(folder: Path) -> Path:
    return folder / "slots"


@pytest.fixture(scope="module")
def address(redis_server: RedisServer, folder: Path, slot_folder: Path) -> Iterator[str]:
    adapter = json.dumps([{"name": "pirate", "path": str(PIRATE)}])
    with worker(redis_server, folder, "saves", "--slot-save-dir", str(slot_folder), "--adapters", adapter) as found:
        yield found


@pytest.fixture
def client(session: aiohttp.ClientSession, address: str) -> Client:
    return Client(session, address)


def saved_file(folder: Path, name: str) -> Path:
    [file] = folder.glob(f"*/{name}")
    return file


async def test_a_conversation_survives_the_worker(
    redis_server: RedisServer, folder: Path, session: aiohttp.ClientSession, slot_folder: Path, client: Client
) -> None:
    text, cached = await client.say(STORY)
    assert cached == 0
    saved = await client.save(0, "chat.bin")
    file = saved_file(slot_folder, "chat.bin")
    assert (saved.id_slot, saved.filename, saved.n_written) == (0, "chat.bin", file.stat().st_size)
    assert saved.timings.save_ms > 0
    [info, empty] = await client.slots()
    assert (info.is_processing, info.n_decoded, info.tenant) == (False, NUM_TOKENS, "red")
    assert info.n_prompt_tokens + NUM_TOKENS - 1 == saved.n_saved
    assert (empty.n_prompt_tokens, empty.tenant, empty.request_id) == (0, "", "")
    expected, _ = await client.say(STORY + text + " And then?", "green")
    with worker(redis_server, folder, "restores", "--slot-save-dir", str(slot_folder)) as found:
        other = Client(session, found)
        restored = await other.restore(1, "chat.bin")
        assert (restored.id_slot, restored.n_restored) == (1, saved.n_saved)
        assert restored.n_read == saved.n_written
        assert restored.timings.restore_ms > 0
        again, cached = await other.say(STORY + text + " And then?")
        assert again == expected
        assert cached >= info.n_prompt_tokens
        _, cached = await other.say(STORY, "blue")
        assert cached == 0


async def test_only_its_own_team_saves_erases_and_restores_it(client: Client) -> None:
    await client.say("A secret of mine. " + STORY, "red", "salt")
    assert await client.slot() == 0
    for tenant, salt in (("blue", "salt"), ("red", ""), ("red", "other")):
        saved = await client.save(0, "stolen", tenant, salt)
        assert (saved.n_saved, saved.n_written) == (0, 0)
        assert await client.act(0, "erase", tenant, salt=salt) == {"id_slot": 0, "n_erased": 0}
        empty = await client.save(1, "stolen", tenant, salt)
        assert (empty.n_saved, empty.n_written) == (0, 0)
    saved = await client.save(0, "mine", "red", "salt")
    assert saved.n_saved > 50
    for tenant, salt in (("blue", "salt"), ("blue", "")):
        failure = await client.refused(1, "restore", tenant, filename="mine", salt=salt)
        assert failure.message == "mine: there is no such file; save the slot under this name first"
        assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "filename")
    failure = await client.refused(1, "restore", "red", filename="mine", salt="")
    assert "another team, salt or adapter" in failure.message
    assert await client.act(0, "erase", "red", salt="salt") == {"id_slot": 0, "n_erased": saved.n_saved}
    _, cached = await client.say("A secret of mine. " + STORY, "red", "salt")
    assert cached == 0


async def test_adapters_count(client: Client) -> None:
    pirate = (AdapterUse("pirate", 0.5),)
    text, _ = await client.say("Ahoy. " + STORY, adapters=pirate)
    slot = await client.slot()
    saved = await client.save(slot, "pirate")
    await client.act(slot, "erase")
    assert "adapter" in (await client.refused(slot, "restore", filename="pirate")).message
    named = [{"name": "pirate", "scale": 0.5}]
    assert (await client.restore(slot, "pirate", adapters=named)).n_restored == saved.n_saved
    again, cached = await client.say("Ahoy. " + STORY, adapters=pirate)
    assert again == text
    assert cached > 0
    assert (
        "no adapter is named"
        in (await client.refused(slot, "restore", filename="pirate", adapters=[{"name": "parrot"}])).message
    )


@pytest.mark.parametrize("action", ["save", "restore"])
@pytest.mark.parametrize(
    "filename", ["", "../chat", "/etc/passwd", ".hidden", "a/b", "zero\0byte", "x" * 200, "..", "ümlaut", "a\nb"]
)
async def test_names_that_are_no_names(client: Client, action: str, filename: str) -> None:
    failure = await client.refused(1, action, filename=filename)
    assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "filename")
    assert "at most 128 letters" in failure.message


async def test_damaged_and_foreign_files_are_refused(client: Client, slot_folder: Path) -> None:
    await client.say("Damaged. " + STORY)
    slot = await client.slot()
    await client.save(slot, "whole")
    whole = saved_file(slot_folder, "whole")
    data = whole.read_bytes()
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    for name, contents in (("cut", data[:-100]), ("changed", bytes(changed)), ("none", b""), ("text", b"hello " * 99)):
        whole.with_name(name).write_bytes(contents)
        failure = await client.refused(slot, "restore", filename=name)
        assert (failure.code, failure.param) == (FailureCode.INVALID_REQUEST, "filename")
        assert failure.message.startswith(f"{name}: ")
    whole.with_name("way-out").symlink_to("/etc/passwd")
    assert "way-out: " in (await client.refused(slot, "restore", filename="way-out")).message
    assert (await client.restore(slot, "whole")).n_restored > 0


async def test_a_file_of_another_model_is_refused(
    redis_server: RedisServer, folder: Path, session: aiohttp.ClientSession, slot_folder: Path, client: Client
) -> None:
    await client.say("Another. " + STORY)
    slot = await client.slot()
    await client.save(slot, "other-model")
    copy = folder / "other.gguf"
    shutil.copy(DEMO, copy)
    with copy.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\0")
    with worker(redis_server, folder, "foreign", "--slot-save-dir", str(slot_folder), model=copy) as found:
        other = Client(session, found)
        failure = await other.refused(0, "restore", filename="other-model")
    assert failure.message == (
        "other-model: it was saved with another model, llama.cpp or KV setting; save the slot again"
    )


@pytest.mark.parametrize(
    ("slot", "body", "status"),
    [
        (2, b'{"action": "save", "tenant": "t", "filename": "a"}', 400),
        (2, b'{"action": "restore", "tenant": "t", "filename": "a"}', 400),
        (0, b'{"action": "drop", "tenant": "t"}', 400),
        (0, b'{"action": "erase"}', 400),
        (0, b'{"action": "erase", "tenant": "t", "x": 1}', 400),
        (0, b"[]", 400),
        (0, b" " * (1 << 17), 400),
        (-1, b"{}", 404),
    ],
)
async def test_requests_that_are_none(client: Client, slot: int, body: bytes, status: int) -> None:
    found, _ = await client.gateway.post(f"{SLOTS_PATH}/{slot}", body)
    assert found == status


async def test_the_routes_are_behind_the_secret(session: aiohttp.ClientSession, address: str) -> None:
    for method, path in (("GET", SLOTS_PATH), ("POST", f"{SLOTS_PATH}/0")):
        async with session.request(method, address + path) as response:
            assert response.status == 401


async def test_what_is_saved_is_bounded_per_team_and_erasing_frees(
    redis_server: RedisServer, folder: Path, session: aiohttp.ClientSession
) -> None:
    saved_in = folder / "bounded"
    flags = ("--slot-save-dir", str(saved_in), "--slot-saves-per-team", "2", "--slot-save-mib-per-team", "1")
    with worker(redis_server, folder, "bounded", *flags) as found:
        client = Client(session, found)
        await client.say(STORY)
        slot = await client.slot()
        for name in ("one", "two"):
            assert (await client.save(slot, name)).n_written > 0
        failure = await client.refused(slot, "save", filename="three")
        assert (failure.code, failure.param) == (FailureCode.STORAGE_FULL, "filename")
        assert "slot_saves_per_team is 2. Erase some with `action=erase`" in failure.message
        await client.save(slot, "two")
        size = saved_file(saved_in, "one").stat().st_size
        assert await client.act(slot, "erase", filename="one") == {"id_slot": slot, "n_erased": 0, "n_freed": size}
        assert not list(saved_in.glob("*/one"))
        assert (await client.refused(slot, "erase", filename="one")).message == "one: there is no such file"
        assert (await client.refused(slot, "erase", "blue", filename="two")).message == "two: there is no such file"
        assert (await client.save(slot, "three")).n_written > 0, "erasing a file leaves the slot as it was"
        await client.act(slot, "erase", filename="three")
        saved_file(saved_in, "two").with_name("large").write_bytes(b"x" * (1 << 20))
        failure = await client.refused(slot, "save", filename="two")
        assert "slot_save_mib_per_team is 1" in failure.message
        saved_file(saved_in, "large").write_bytes(b"x" * ((1 << 20) - 5_000))
        failure = await client.refused(slot, "save", filename="two")
        assert (failure.code, failure.param) == (FailureCode.STORAGE_FULL, "filename")
        assert "more than the 5,000 bytes that are left of slot_save_mib_per_team" in failure.message


async def test_a_folder_that_can_t_be_read_is_told_as_unavailable(
    redis_server: RedisServer, folder: Path, session: aiohttp.ClientSession
) -> None:
    saved_in = folder / "spoilt"
    with worker(redis_server, folder, "spoilt", "--slot-save-dir", str(saved_in)) as found:
        client = Client(session, found)
        await client.say(STORY)
        slot = await client.slot()
        await client.save(slot, "one")
        team = saved_file(saved_in, "one").parent
        team.rename(folder / "kept")
        team.write_text("")
        for action in ("save", "restore", "erase"):
            failure = await client.refused(slot, action, filename="one")
            assert failure.code is FailureCode.UNAVAILABLE
            assert "Not a directory" not in failure.message
        team.unlink()
        (folder / "kept").rename(team)
        assert (await client.restore(slot, "one")).n_restored > 0


async def test_one_team_does_not_fill_the_line_of_actions(client: Client) -> None:
    busy: list[dict[str, object]] = []
    for _ in range(20):  # a quick worker may be done with some before others come
        answers = await asyncio.gather(*(client.act(0, "restore", filename="nowhere") for _ in range(12)))
        busy += [one for one in answers if one["code"] == FailureCode.BUSY]
        if busy:
            break
    assert len(busy) >= 1
    assert all("under way for this team" in str(one["message"]) for one in busy)
    assert (await client.refused(0, "restore", filename="nowhere")).message.startswith("nowhere: there is no such file")


async def test_a_crowd_that_lists_slots_asks_the_engine_once_at_a_time() -> None:
    """Without a thread for each: those are for calls."""
    asked: list[Future[list[SlotInfo]]] = []

    class Keeper:
        def infos(self) -> Future[list[SlotInfo]]:
            asked.append(Future())
            return asked[-1]

    routes = SlotRoutes(cast(SlotKeeper, Keeper()))
    request = Request({"type": "http", "method": "GET", "path": SLOTS_PATH, "headers": []})
    crowd = [asyncio.create_task(routes.show(request)) for _ in range(50)]
    await asyncio.sleep(0.01)
    crowd[0].cancel()
    asked[0].set_result([])
    assert [(await one).status_code for one in crowd[1:]] == [200] * 49
    assert len(asked) == 1
    last = asyncio.create_task(routes.show(request))
    await asyncio.sleep(0.01)
    asked[1].set_exception(CallFailed(Failure(FailureCode.BUSY, "no")))
    assert (await last).status_code == 429


async def test_without_a_folder_nothing_is_saved_but_slots_are_told_and_erased(
    redis_server: RedisServer, folder: Path, session: aiohttp.ClientSession
) -> None:
    with worker(redis_server, folder, "plain") as found:
        client = Client(session, found)
        await client.say(STORY)
        for action in ("save", "restore"):
            failure = await client.refused(0, action, filename="a")
            assert failure.code is FailureCode.UNSUPPORTED
            assert "--slot-save-dir" in failure.message
        info = (await client.slots())[0]
        assert await client.act(0, "erase") == {"id_slot": 0, "n_erased": info.n_prompt_tokens + NUM_TOKENS - 1}


async def test_a_worker_of_another_kind_has_none(spawn_pooled: str, session: aiohttp.ClientSession) -> None:
    client = Client(session, spawn_pooled)
    assert (await client.refused(0, "erase")).code is FailureCode.UNSUPPORTED


@pytest.fixture
def spawn_pooled(redis_server: RedisServer, folder: Path) -> Iterator[str]:
    with worker(redis_server, folder, "pooled", "--llama", '{"n_threads": 1, "embeddings": true}') as found:
        yield found
