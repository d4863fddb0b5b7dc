"""Limits of what a team stores, set by command: at all gateways within a second, for responses, streams and slots."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.program import Program
from tests.support.stack import DEMO_MODEL, Stack
from workers.protocol.exits import Exit

SMALL, KEEPER = "small", "keeper"
KNOWN_S = 1.0
"""Seconds within which gateways have to know a change."""
PATIENCE_S = 20.0
TEAM = "hoarders"
OWN = "of the team or its organisation"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("slots")
    with Stack() as running:
        running.fake_worker(SMALL, "--step-ms", "2", "--tokens", "8", wait=False)
        running.fake_worker("slow", "--step-ms", "20", "--tokens", "2000", wait=False)
        running.worker(DEMO_MODEL, KEEPER, slots=1, ctx=256, slot_save_dir=folder, slot_saves_per_team=2)
        url = running.accounts().url
        for _ in range(2):
            running.gateway(accounts_url=url, responses_bytes_per_team=8000, resume_streams_per_team=2)
        for gateway in running.gateways:
            running.wait_until_listed(gateway, SMALL, "slow", KEEPER)
        yield running


@pytest.fixture
def paddock(stack: Stack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    port = stack.gateways[0].url.rpartition(":")[2]
    environment = {"PADDOCK_STATE_DIR": str(stack.folder / "state"), "PADDOCK_PORT": port, "PADDOCK_API_KEY": stack.key}
    return Program(monkeypatch, capfd, environment)


@pytest.fixture
async def caller(stack: Stack, paddock: Program) -> AsyncIterator[Caller]:
    """A caller of a team of its own at the second gateway; commands go to the first."""
    deadline = time.monotonic() + PATIENCE_S
    while paddock.run("teams show default").code:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
    paddock.run(f"teams delete {TEAM} --with-keys")
    paddock.ok(f"teams create {TEAM}")
    key = paddock.ok(f"keys create --team {TEAM}").card["key"]
    async with calling(stack.gateways[1].url, key, SMALL) as calls:
        await becomes(lambda: status(calls, "/v1/models"), 200)
        yield calls


async def becomes(found: Callable[[], Awaitable[object]], wanted: object) -> None:
    """Wait until `found` returns `wanted`, for as long as a change may take."""
    deadline = time.monotonic() + KNOWN_S
    while (now := await found()) != wanted:
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)


async def status(caller: Caller, path: str) -> int:
    async with caller.session.get(caller.url + path) as response:
        return response.status


async def post(caller: Caller, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
    async with caller.session.post(caller.url + path, json=body, headers=headers or {}) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith("{") else text


async def num_kept(caller: Caller) -> int:
    """Store five responses of some 1,500 bytes and return how many of them are there."""
    ids = []
    for _ in range(5):
        _, response = await post(caller, "/v1/responses", model=SMALL, input="word " * 150)
        ids.append(response["id"])
    return [await status(caller, f"/v1/responses/{id_}") for id_ in ids].count(200)


async def test_stored_responses(caller: Caller, paddock: Program) -> None:
    by_setting = await num_kept(caller)
    assert 2 <= by_setting <= 4
    shown = paddock.ok(f"limits set team {TEAM} --stored-response-bytes 3000").card["limits"]
    assert shown == "2.9K of stored responses"
    await becomes(lambda: num_kept(caller), 1)
    paddock.ok(f"limits set team {TEAM} --stored-response-bytes 1M")
    await becomes(lambda: num_kept(caller), 5)
    paddock.ok(f"limits set team {TEAM} --stored-responses 3")
    await becomes(lambda: num_kept(caller), 3)
    paddock.ok("limits set organisation default --stored-responses 2")
    await becomes(lambda: num_kept(caller), 2)
    paddock.ok("limits clear organisation default")
    paddock.ok(f"limits set team {TEAM} --stored-response-bytes 500")
    await asyncio.sleep(KNOWN_S)
    code, told = await post(caller, "/v1/responses", model=SMALL, input="word " * 150, background=True)
    assert (code, told["error"]["code"]) == (503, "storage_full")
    assert f"the limit `stored_response_bytes` {OWN}" in told["error"]["message"]
    paddock.ok(f"limits clear team {TEAM}")
    await becomes(lambda: num_kept(caller), by_setting)


async def num_streams(caller: Caller) -> tuple[int, str]:
    """Begin streams until one is refused; return how many began, and what the refusal names."""
    begun: list[Any] = []
    while True:
        body = {"model": "slow", "stream": True, "max_tokens": 500, "messages": [{"role": "user", "content": "a"}]}
        response = await caller.session.post(
            f"{caller.url}/v1/chat/completions", json=body, headers={"x-resume-grace": "1"}
        )
        if response.status != 200:
            message = (await response.json())["error"]["message"]
            for one in begun:
                one.close()
            await asyncio.sleep(2.0)  # their grace, and until Redis is told
            return len(begun), message.partition("(")[2].partition(")")[0]
        begun.append(response)


async def test_resumable_streams(caller: Caller, paddock: Program) -> None:
    by_setting = (2, "setting `resume_streams_per_team`")
    assert await num_streams(caller) == by_setting
    for most in (1, 4):
        paddock.ok(f"limits set team {TEAM} --resumable-streams {most}")
        await asyncio.sleep(KNOWN_S)
        assert await num_streams(caller) == (most, f"limit `resumable_streams` {OWN}")
    paddock.ok(f"limits set team {TEAM} --resumable-streams none")
    await asyncio.sleep(KNOWN_S)
    assert await num_streams(caller) == by_setting


async def test_saved_slots(caller: Caller, paddock: Program) -> None:
    assert (await post(caller, "/completion", model=KEEPER, prompt="Once upon a time", n_predict=4))[0] == 200

    async def save(name: str) -> str:
        """Save the slot; return what is told if that is refused."""
        code, told = await post(caller, "/slots/0?action=save", model=KEEPER, filename=name)
        if code == 200:
            assert told["n_written"] > 0
            return ""
        assert code == 503
        return str(told["error"]["message"])

    assert [await save("a"), await save("b")] == ["", ""]
    assert "slot_saves_per_team is 2" in await save("c")
    paddock.ok(f"limits set team {TEAM} --saved-slots 3")
    await becomes(lambda: save("c"), "")
    assert f"this team has 3 saved slots, and the limit `saved_slots` {OWN} is 3. Erase some" in await save("d")
    paddock.ok(f"limits set team {TEAM} --saved-slots 1")
    await asyncio.sleep(KNOWN_S)
    assert "`saved_slots`" in await save("a"), "what was saved before stays, and counts"
    code, _ = await post(caller, "/slots/0?action=restore", model=KEEPER, filename="c")
    assert code == 200
    paddock.ok(f"limits set team {TEAM} --saved-slots none --saved-slot-bytes 2000")
    for name in ("b", "c"):
        await post(caller, "/slots/0?action=erase", model=KEEPER, filename=name)
    await asyncio.sleep(KNOWN_S)
    told = await save("a")
    assert "`saved_slot_bytes`" in told
    assert "2,000 bytes" in told
    paddock.ok(f"limits set team {TEAM} --saved-slot-bytes none")
    await becomes(lambda: save("b"), "")
    assert "slot_saves_per_team is 2" in await save("c")


def test_commands_and_files_name_them_alike(stack: Stack, paddock: Program, tmp_path: Path) -> None:
    flags = "--stored-responses 9 --stored-response-bytes 64M --resumable-streams 8 --resumable-stream-bytes 1.5M"
    paddock.ok(f"teams create named {flags} --saved-slots 4 --saved-slot-bytes 2G")
    document = json.loads(paddock.ok("teams show named --json").out)
    assert document["limits"] == {
        "stored_responses": 9,
        "stored_response_bytes": 64 << 20,
        "resumable_streams": 8,
        "resumable_stream_bytes": 3 << 19,
        "saved_slots": 4,
        "saved_slot_bytes": 2 << 30,
    }
    columns = ["RESPONSES", "RESPONSE BYTES", "STREAMS", "STREAM BYTES", "SLOTS", "SLOT BYTES"]
    assert paddock.ok("limits list team").rows == [["NAME", *columns], ["named", "9", "64M", "8", "1.5M", "4", "2G"]]
    file = tmp_path / "access.yaml"
    file.write_text(json.dumps({"teams": [{"name": "named", "limits": document["limits"] | {"saved_slots": 5}}]}))
    assert "limits.saved_slots 4 → 5" in paddock.ok(f"apply -f {file}").out
    paddock.ok("organisations update default --saved-slots 3")
    assert "limits" not in paddock.ok("limits clear organisation default").card
    told = paddock.refused("limits set user nobody --saved-slots 3", Exit.REFUSED)
    assert "no user 'nobody'" in told
    paddock.ok("keys create --name bare")
    told = paddock.refused("limits set key bare --saved-slots 3", Exit.REFUSED)
    assert "`limits.saved_slots` is not known. What is stored is limited for teams and organisations only." in told
    assert "is no size" in paddock.refused("limits set team named --saved-slot-bytes lots", Exit.USAGE)
    assert "resumable_stream_bytes" in paddock.refused("limits set team named --resumable-stream-bytes 9", Exit.REFUSED)
    paddock.ok("teams delete named")
