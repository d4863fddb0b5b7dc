"""llama-server's own routes as its clients see them, on fake workers; on a true one, the files of its slots."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.access.control import Access
from gateway.api.http.diagnostics import PRIVATE, SIGN_ON
from gateway.api.routes import ROUTES
from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Process, Stack

EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "
GGSQ, GGSQ_VERSION = 0x67677371, 3
"""What a file begins with that llama.cpp saved of a sequence: `LLAMA_STATE_SEQ_MAGIC` and its version in llama.h."""


async def ask(caller: Caller, path: str, method: str = "POST", **body: Any) -> tuple[int, Any]:
    async with caller.session.request(method, caller.url + path, json=body or None) as response:
        return response.status, await response.json(content_type=None)


async def events(caller: Caller, path: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
    async with caller.session.post(caller.url + path, json={"model": "quick", "stream": True, **body}) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_a_whole_completion(caller: Caller) -> None:
    status, document = await ask(caller, "/completion", model="quick", prompt="Once upon a time", n_predict=3, seed=7)
    assert status == 200
    assert (document["content"], document["stop_type"], document["tokens_predicted"]) == ("t0 t1 t2 ", "limit", 3)
    assert (document["model"], document["index"], document["stop"]) == ("quick", 0, True)
    assert document["tokens_evaluated"] == document["timings"]["prompt_n"] > 0
    assert 0 <= document["id_slot"] < 8
    settings = document["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["top_k"]) == (7, 3, 40)


async def test_the_model_behind_the_question_mark_and_the_other_path(caller: Caller) -> None:
    status, document = await ask(caller, "/completions?model=quick", prompt=[1, "a", 2], return_tokens=True)
    assert (status, document["content"], document["tokens"]) == (200, EIGHT, list(range(8)))
    assert document["stop_type"] == "eos"


async def test_a_streamed_completion(caller: Caller) -> None:
    chunks = [chunk async for chunk in events(caller, "/completion", prompt="hi")]
    assert "".join(chunk["content"] for chunk in chunks) == EIGHT
    assert [chunk["tokens"] for chunk in chunks[:-1]] == [[n] for n in range(8)]
    assert [chunk["stop"] for chunk in chunks] == [False] * 8 + [True]
    assert [chunk["tokens_predicted"] for chunk in chunks] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert len({chunk["id_slot"] for chunk in chunks}) == 1
    assert chunks[-1]["generation_settings"]["stream"] is True


async def test_progress_and_times_of_a_stream(caller: Caller) -> None:
    asked = events(caller, "/completion", prompt="hi", return_progress=True, timings_per_token=True)
    chunks = [chunk async for chunk in asked]
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert told[-1]["processed"] == told[-1]["total"] == chunks[-1]["tokens_evaluated"]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if chunk["content"]] == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_several_prompts_and_answers(caller: Caller) -> None:
    prompts = [[1], [1, 2, 3]]
    status, documents = await ask(caller, "/completion", model="quick", prompt=prompts, n_cmpl=2, n_predict=1)
    assert status == 200
    assert [(one["index"], one["tokens_evaluated"], one["content"]) for one in documents] == [
        (0, 1, "t0 "),
        (1, 1, "t0 "),
        (2, 3, "t0 "),
        (3, 3, "t0 "),
    ]
    chunks = [chunk async for chunk in events(caller, "/completion", prompt=["a", "b"])]
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["content"] for chunk in own) == EIGHT
        assert [chunk["stop"] for chunk in own].count(True) == 1


async def test_warming_the_cache_generates_nothing(caller: Caller) -> None:
    status, document = await ask(caller, "/completion", model="quick", prompt="hi", n_predict=0)
    assert (status, document["content"], document["tokens_predicted"]) == (200, "", 0)


async def test_wanted_fields(caller: Caller) -> None:
    fields = ["content", "generation_settings/n_predict"]
    asked = await ask(caller, "/completion", model="quick", prompt="hi", n_predict=1, response_fields=fields)
    assert asked == (200, {"content": "t0 ", "generation_settings/n_predict": 1})


@pytest.mark.parametrize(("asked", "used"), [(5, 5), (100, 100), (-1, 0)])
async def test_temperatures_that_llama_server_takes(caller: Caller, asked: float, used: float) -> None:
    body: dict[str, Any] = {"model": "quick", "prompt": "hi", "n_predict": 1, "temperature": asked}
    status, document = await ask(caller, "/completion", **body)
    assert (status, document["generation_settings"]["temperature"]) == (200, used)


async def test_infill(caller: Caller) -> None:
    body: dict[str, Any] = {"model": "quick", "input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 2}
    status, document = await ask(caller, "/infill", **body)
    assert (status, document["content"]) == (200, "t0 t1 ")


async def test_tokens_and_texts(caller: Caller) -> None:
    status, found = await ask(caller, "/tokenize", model="quick", content="abcdéf", with_pieces=True)
    assert status == 200
    assert [one["piece"] for one in found["tokens"]] == ["abcd", "éf"]
    tokens = [one["id"] for one in found["tokens"]]
    assert await ask(caller, "/tokenize", model="quick", content="abcdéf") == (200, {"tokens": tokens})
    assert await ask(caller, "/detokenize", model="quick", tokens=tokens) == (200, {"content": "abcdéf"})
    assert (await ask(caller, "/tokenize", model="quick", content="aé"))[1]["tokens"] != []
    mixed = (await ask(caller, "/tokenize", model="quick", content=[tokens[0], "x"]))[1]["tokens"]
    assert mixed[0] == tokens[0]
    assert await ask(caller, "/tokenize", model="quick") == (200, {"tokens": []})


async def test_half_a_character_is_told_in_bytes(caller: Caller) -> None:
    (_, found) = await ask(caller, "/tokenize", model="quick", content="abcé", with_pieces=True)
    assert [one["piece"] for one in found["tokens"]] == ["abc", [0xC3], [0xA9]]


async def test_a_conversation_as_its_prompt(caller: Caller) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, document = await ask(caller, "/apply-template", model="quick", messages=messages)
    assert status == 200
    assert '"content": "hi"' in document["prompt"]


async def test_properties(caller: Caller) -> None:
    status, props = await ask(caller, "/props?model=quick", "GET")
    assert status == 200
    assert (props["model_alias"], props["total_slots"], props["is_sleeping"]) == ("quick", 8, False)
    assert props["default_generation_settings"]["n_ctx"] == 64
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert "messages" in props["chat_template"]


async def test_there_is_no_property_that_could_be_changed(caller: Caller, gateway: Process) -> None:
    assert await ask(caller, "/props", model="quick") == (200, {"success": True})
    status, document = await ask(caller, "/props", model="quick", temperature=1)
    assert (status, document["error"]["type"]) == (501, "not_supported_error")
    assert "`temperature`" in document["error"]["message"]
    async with calling(gateway.url, NARROW_KEY, "quick") as narrow:
        assert (await ask(narrow, "/props", model="quick"))[0] == 403


@pytest.mark.parametrize(
    ("path", "body", "code", "kind"),
    [
        ("/completion", {"model": "quick", "prompt": 5}, 400, "invalid_request_error"),
        ("/completion", {"model": "nobody", "prompt": "a"}, 404, "not_found_error"),
        ("/completion", {"prompt": "a"}, 400, "invalid_request_error"),
        ("/completion", {"model": "quick", "prompt": "a", "n_discard": 1}, 501, "not_supported_error"),
        ("/completion", {"model": "quick", "prompt": "a", "temperature": 101}, 400, "invalid_request_error"),
        ("/completion", {"model": "quick", "prompt": "abcd" * 70}, 400, "exceed_context_size_error"),
        ("/completion", {"model": "quick", "prompt": "a", "lora": [{"id": 0}]}, 400, "invalid_request_error"),
        ("/tokenize", {"model": "quick", "content": 5}, 400, "invalid_request_error"),
        ("/detokenize", {"model": "quick", "tokens": ["a"]}, 400, "invalid_request_error"),
        ("/embedding", {"model": "quick", "content": "a"}, 501, "not_supported_error"),
        ("/apply-template", {"model": "quick", "messages": []}, 400, "invalid_request_error"),
        ("/slots/99?action=erase", {"model": "quick"}, 400, "invalid_request_error"),
        ("/slots/x?action=erase", {"model": "quick"}, 400, "invalid_request_error"),
        ("/slots/0?action=sell", {"model": "quick"}, 400, "invalid_request_error"),
        ("/slots/0?action=save", {"model": "quick"}, 400, "invalid_request_error"),
    ],
)
async def test_errors_have_the_form_of_llama_server(
    caller: Caller, path: str, body: dict[str, Any], code: int, kind: str
) -> None:
    status, document = await ask(caller, path, **body)
    assert status == code
    assert document["error"].keys() - {"n_ctx", "n_prompt_tokens"} == {"code", "message", "type"}
    assert (document["error"]["code"], document["error"]["type"]) == (code, kind)
    is_long = kind == "exceed_context_size_error"
    assert is_long == ("exceeds the available context size (64 tokens)" in document["error"]["message"])


async def test_a_stream_that_breaks_ends_in_an_error(caller: Caller) -> None:
    *chunks, last = [chunk async for chunk in events(caller, "/completion", model="failing", prompt="hi")]
    assert "".join(chunk["content"] for chunk in chunks) == "t0 t1 t2 "
    assert (last["error"]["code"], last["error"]["type"]) == (500, "server_error")


async def test_a_key_is_needed_except_for_health(gateway: Process) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/slots", "/props", "/lora-adapters", "/models"):
            async with session.get(gateway.url + path) as response:
                assert response.status == 401
                assert (await response.json())["error"]["type"] == "authentication_error"
        async with session.get(gateway.url + "/v1/health") as response:
            assert await response.json() == {"status": "ok"}


async def test_the_list_of_models(caller: Caller) -> None:
    status, listing = await ask(caller, "/models", "GET")
    assert status == 200
    assert listing == (await ask(caller, "/v1/models", "GET"))[1]


async def test_pages_may_ask(caller: Caller, gateway: Process) -> None:
    origin = {"Origin": "http://page.example"}
    wanted = {"Access-Control-Request-Headers": "authorization, content-type", "Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession() as session:
        for path in ("/completion", "/v1/chat/completions", "/nowhere"):
            async with session.options(gateway.url + path, headers=origin | wanted) as response:
                assert (response.status, await response.read()) == (200, b"")
                assert response.headers["access-control-allow-origin"] == "http://page.example"
                assert "access-control-allow-credentials" not in response.headers
                assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
                assert response.headers["access-control-allow-headers"] == "authorization, content-type"
    whole = {"model": "quick", "prompt": "a", "n_predict": 1}
    for path, body in (
        ("/completion", whole),
        ("/completion", {**whole, "stream": True}),
        ("/completion", {"model": "nobody"}),
        ("/v1/chat/completions", caller.body(max_tokens=1)),
    ):
        async with caller.session.post(gateway.url + path, json=body, headers=origin) as response:
            assert response.headers["access-control-allow-origin"] == "http://page.example"
    async with caller.session.post(gateway.url + "/completion", json=whole) as response:
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", ["/metrics", "/metrics/targets", "/ready", "/version"])
async def test_what_needs_no_key_is_not_for_pages(gateway: Process, path: str) -> None:
    origin = {"Origin": "http://page.example"}
    async with aiohttp.ClientSession() as session:
        for ask in (session.get, session.options):
            async with ask(gateway.url + path, headers=origin) as response:
                assert response.status == 200
                assert "access-control-allow-origin" not in response.headers


def test_every_route_without_a_key_that_tells_of_the_fleet_is_private() -> None:
    open_to_all = {row.path for row in ROUTES if row.access is Access.OPEN}
    told = {path for path in open_to_all - PRIVATE if not path.startswith(SIGN_ON)}
    documents = {"/admin/docs", "/admin/openapi.json", "/docs", "/openapi.json"}
    console = {"/", "/ui", "/ui/", "/ui/session", "/ui/{file}"}
    assert told == {"/health", "/v1/health", "/healthz", *documents, *console}


@dataclass(frozen=True)
class Keeper:
    """A true worker with one slot behind a gateway of its own: fake ones save none."""

    stack: Stack
    folder: Path
    """Where the worker saves."""


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    folder = tmp_path_factory.mktemp("slots")
    with Stack() as stack:
        stack.worker(DEMO_MODEL, "keeper", slots=1, ctx=256, slot_save_dir=folder)
        stack.gateway()
        yield Keeper(stack, folder)


def saved_by_llama_server(tokens: list[int], *, packed: bool) -> bytes:
    """Return a file of llama.cpp's `llama_state_seq_save_file`. `packed`: its tokens have a head of their own."""
    words = ([-1, 1, len(tokens)] if packed else []) + tokens
    head = struct.pack("<III", GGSQ, GGSQ_VERSION, len(words))
    return head + struct.pack(f"<{len(words)}i", *words) + random.Random(1).randbytes(4096)


async def test_slots_that_paddock_did_not_save_are_refused(keeper: Keeper) -> None:
    """They are refused wherever they lie, in a team's own folder as well; what it saved itself comes back."""
    async with calling(keeper.stack.gateways[0].url, keeper.stack.key, "keeper") as caller:
        assert (await ask(caller, "/completion", prompt="Once upon a time", n_predict=4, id_slot=0))[0] == 200
        status, saved = await ask(caller, "/slots/0?action=save", filename="own.bin")
        assert status == 200, saved
        [own] = keeper.folder.glob("*/own.bin")
        foreign = {
            "garbage.bin": random.Random(0).randbytes(4096),
            "empty.bin": b"",
            "list.bin": saved_by_llama_server([1, 2, 3, 4], packed=False),
            "packed.bin": saved_by_llama_server([1, 2, 3, 4], packed=True),
        }
        for folder in (keeper.folder, own.parent):
            for name, contents in foreign.items():
                (folder / name).write_bytes(contents)
                status, document = await ask(caller, "/slots/0?action=restore", filename=name)
                error = document["error"]
                assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error"), name
                assert error["message"].startswith(f"{name}: ")
                assert "save the slot" in error["message"]
        status, restored = await ask(caller, "/slots/0?action=restore", filename="own.bin")
        assert (status, restored["n_restored"]) == (200, saved["n_saved"])
