"""A catalog's file that changes while a gateway runs: what new calls get, and what calls under way keep."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.front.conftest import NARROW, NARROW_KEY
from tests.integration.front.test_fallbacks import asked, chat, counted
from tests.integration.front.test_responses_socket import text_of
from tests.support.caller import Caller, calling
from tests.support.socket_caller import connected
from tests.support.stack import Process, Stack

SOON_S = 10.0
QUICK = ("--step-ms", "2", "--tokens", "4")
MODELS = [{"name": "quick", "path": "quick.gguf"}, {"name": "slow", "path": "slow.gguf"}]
FIRST: dict[str, Any] = {"models": MODELS, "aliases": {"house": "quick"}, "default": {"chat": "house"}}


class CatalogFile:
    """A catalog as a ConfigMap is mounted: the file is a link into a folder that is swapped as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        folder.mkdir()
        self.path = folder / "catalog.json"
        self.path.symlink_to("..data/catalog.json")

    def write(self, document: object) -> None:
        """Write new contents in place, as an editor does."""
        self.path.write_text(document if isinstance(document, str) else json.dumps(document))

    def swap(self, document: object) -> None:
        """Put new contents in the place of the old ones at once."""
        self._number += 1
        fresh = self._folder / f"..{self._number}"
        fresh.mkdir()
        (fresh / "catalog.json").write_text(json.dumps(document))
        link = self._folder / "..new"
        link.symlink_to(fresh.name)
        link.rename(self._folder / "..data")

    def remove(self) -> None:
        (self._folder / "..data").unlink()


@pytest.fixture(scope="module")
def running(stack: Stack) -> Iterator[tuple[Process, CatalogFile]]:
    file = CatalogFile(stack.folder / "mounted")
    file.swap(FIRST)
    process = stack.gateway(catalog=file.path, api_keys=json.dumps([NARROW]))
    yield process, file
    process.stop()
    stack.gateways.remove(process)


@pytest.fixture
def file(running: tuple[Process, CatalogFile]) -> CatalogFile:
    return running[1]


@pytest.fixture
async def following(stack: Stack, running: tuple[Process, CatalogFile]) -> AsyncIterator[Caller]:
    async with calling(running[0].url, stack.key, "house") as asking:
        running[1].swap(FIRST)
        await reloaded(asking)
        yield asking


async def reloaded(caller: Caller) -> dict[str, Any]:
    """The answer to POST /admin/catalog/reload."""
    async with caller.session.post(f"{caller.url}/admin/catalog/reload") as response:
        answer: dict[str, Any] = await response.json()
        return answer | {"code": response.status}


async def shown(caller: Caller, path: str = "/admin/catalog") -> dict[str, Any]:
    async with caller.session.get(f"{caller.url}{path}") as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def until(caller: Caller, **wanted: Any) -> dict[str, Any]:
    """Wait until GET /admin/catalog says so."""
    async with asyncio.timeout(SOON_S):
        while True:
            told = await shown(caller)
            if wanted.items() <= told.items():
                return told
            await asyncio.sleep(0.05)


async def refused(caller: Caller) -> dict[str, Any]:
    """Wait until GET /admin/catalog says that something is wrong with the file."""
    async with asyncio.timeout(SOON_S):
        while True:
            told = await shown(caller)
            if told["fault"] is not None:
                return told
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["write", "swap"])
async def test_an_alias_is_added_while_a_call_streams(following: Caller, file: CatalogFile, way: str) -> None:
    following.model = "house"
    pinned = {"house": {"targets": ["slow"], "set": {"max_tokens": 3}}, "added": "quick"}
    following.model = "slow"
    async with following.stream(max_tokens=120) as answer:
        await answer.until_text()
        getattr(file, way)({**FIRST, "aliases": {**pinned, "gone": "quick"}, "default": {"chat": "added"}})
        await until(following, aliases=["added", "gone", "house"])
        following.model = "house"
        status, body, headers = await chat(following, max_tokens=90)
        assert (status, body["model"], headers["x-paddock-model"]) == (200, "house", "slow")
        assert body["usage"]["completion_tokens"] == 3
        assert headers["x-paddock-ignored"] == "max_tokens"
        status, body, _ = await asked(
            following, "/v1/chat/completions", model=None, messages=[{"role": "user", "content": "x"}]
        )
        assert (status, body["model"]) == (200, "added")
        file.swap({**FIRST, "aliases": pinned})
        await until(following, aliases=["added", "house"])
        following.model = "gone"
        assert (await chat(following))[0] == 404
        await answer.finish()
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 120, "the call under way has kept what it started with"


async def test_a_model_that_has_left_the_catalog_and_has_no_worker_is_unknown(
    stack: Stack, following: Caller, file: CatalogFile
) -> None:
    brief = {"name": "brief", "path": "brief.gguf"}
    file.swap({**FIRST, "models": [*MODELS, brief]})
    await until(following, models=["brief", "quick", "slow"])
    worker = stack.fake_worker("brief", *QUICK, worker_id="brief-a")
    following.model = "brief"
    assert (await chat(following))[0] == 200
    file.swap(FIRST)
    await until(following, models=["quick", "slow"])
    assert (await chat(following))[0] == 200, "its worker still takes calls"
    worker.stop()
    stack.workers.remove(worker)
    async with asyncio.timeout(SOON_S):
        while (answer := await chat(following))[0] == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    status, body, _ = answer
    assert status == 404, "calls do not wait for a worker that nobody starts"
    assert body["error"]["code"] == "model_not_found"
    assert "brief" not in {model["id"] for model in (await shown(following, "/v1/models"))["data"]}


async def until_held(caller: Caller) -> None:
    """Wait until a call for the model is held, as its worker is gone."""
    async with asyncio.timeout(SOON_S):
        while True:
            call = asyncio.create_task(chat(caller))
            await asyncio.wait([call], timeout=0.5)
            if not call.done():
                call.cancel()
                return
            assert (await call)[0] in (200, 502, 503), "it is known"


async def test_a_gateway_knows_other_models_than_its_catalogs_only_if_it_has_seen_workers_of_them(
    stack: Stack, running: tuple[Process, CatalogFile]
) -> None:
    """Redis forgets no name: a gateway that started after a model's removal held its calls for a minute."""
    first = stack.fake_worker("stranger", *QUICK, worker_id="stranger-a")
    first.stop()
    stack.workers.remove(first)
    fresh, bare = stack.gateway(catalog=running[1].path), stack.gateway(queue_timeout_s=30)
    async with (
        calling(fresh.url, stack.key, "stranger") as caller,
        calling(bare.url, stack.key, "stranger") as without_catalog,
    ):
        assert "stranger" not in {model["id"] for model in (await shown(caller, "/v1/models"))["data"]}
        status, body, _ = await asyncio.wait_for(chat(caller), 1.0)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        await until_held(without_catalog)
        second = stack.fake_worker("stranger", *QUICK, worker_id="stranger-b")
        async with asyncio.timeout(SOON_S):
            while (await chat(caller))[0] != 200:  # noqa: ASYNC110 - another process has to notice
                await asyncio.sleep(0.05)
        second.stop()
        stack.workers.remove(second)
        await until_held(caller)
    for gateway in (fresh, bare):
        gateway.stop()
        stack.gateways.remove(gateway)


async def test_a_bad_file_changes_nothing_and_says_so(following: Caller, file: CatalogFile) -> None:
    before = await counted(following, "paddock_catalog_reads_total", result="refused")
    good = await shown(following)
    file.write(json.dumps({**FIRST, "aliases": {"house": {"targets": ["quick"], "set": {"max_token": 3}}}}))
    told = await refused(following)
    assert f"{file.path}: " in told["fault"], "which file"
    assert "aliases.house: set: " in told["fault"], "where in it"
    assert "did you mean `max_tokens`?" in told["fault"], "what to do"
    assert {name: told[name] for name in ("models", "aliases", "taken_at")} == {
        name: good[name] for name in ("models", "aliases", "taken_at")
    }
    ready = await shown(following, "/ready")
    assert (ready["status"], ready["catalog"]) == ("ready", "refused")
    assert await counted(following, "paddock_catalog_refused") == 1
    assert await counted(following, "paddock_catalog_reads_total", result="refused") == before + 1
    assert (await chat(following))[0] == 200
    answer = await reloaded(following)
    assert (answer["code"], answer["error"]["code"]) == (400, "catalog_refused")
    assert "did you mean `max_tokens`?" in answer["error"]["message"]
    file.write(FIRST)
    await until(following, fault=None)
    assert await counted(following, "paddock_catalog_refused") == 0
    assert "catalog" not in await shown(following, "/ready")


@pytest.mark.parametrize(
    "contents", ["models: 2026-13-45", "models: " + "9" * 5000, "models: " + "[" * 500, "models: &models [*models]"]
)
async def test_contents_that_no_reader_expects_end_no_gateway(
    following: Caller, file: CatalogFile, contents: str
) -> None:
    """A date or a number that is none, deep nesting, an alias within itself: YAML's reader fails in its own ways."""
    file.write(contents)
    assert f"{file.path}: not valid YAML" in (await refused(following))["fault"]
    assert (await chat(following))[0] == 200
    file.swap(FIRST)
    await until(following, fault=None)


async def test_a_file_that_is_gone_changes_nothing(following: Caller, file: CatalogFile) -> None:
    file.remove()
    told = await refused(following)
    assert f"{file.path}: No such file" in told["fault"]
    assert (await chat(following))[0] == 200
    file.swap(FIRST)
    await until(following, fault=None)


async def test_a_reload_answers_with_what_is_different(following: Caller, file: CatalogFile) -> None:
    assert (await reloaded(following))["changes"] == {}
    changed = {
        "models": [{**MODELS[0], "tags": ["small"]}],
        "aliases": {"mansion": "quick"},
        "unknown_model": "default",
    }
    file.swap(changed)
    told = await reloaded(following)
    assert told["changes"] == {
        "models": {"removed": ["slow"], "changed": ["quick"]},
        "aliases": {"added": ["mansion"], "removed": ["house"]},
        "settings": {"removed": ["default.chat"], "changed": ["unknown_model"]},
    }
    assert (told["fault"], told["models"], told["aliases"]) == (None, ["quick"], ["mansion"])
    cards = {card["id"]: card for card in (await shown(following, "/v1/models"))["data"]}
    assert cards["mansion"]["tags"] == ["small"]
    assert "house" not in cards
    assert "slow" in cards, "its worker is still there"


async def test_only_admins_see_and_reload_it(following: Caller) -> None:
    headers = {"Authorization": f"Bearer {NARROW_KEY}"}
    for method, path in (("GET", "/admin/catalog"), ("POST", "/admin/catalog/reload")):
        async with following.session.request(method, f"{following.url}{path}", headers=headers) as response:
            assert response.status == 403


async def test_a_gateway_without_a_catalog_has_none_to_reload(caller: Caller) -> None:
    answer = await reloaded(caller)
    assert answer["code"] == 501
    assert "--catalog" in answer["error"]["message"]
    assert (await shown(caller))["file"] is None


SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 7},
    "/v1/completions": {"prompt": "hi", "max_tokens": 7},
    "/v1/responses": {"input": "hi", "store": False, "max_output_tokens": 7},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7},
    "/completion": {"prompt": "hi", "n_predict": 7},
}


@pytest.mark.parametrize("path", SHORT)
async def test_every_dialect_gets_what_the_alias_sets(following: Caller, file: CatalogFile, path: str) -> None:
    file.swap({**FIRST, "aliases": {"house": {"targets": ["quick"], "set": {"max_tokens": 2}}}})
    await reloaded(following)
    _, body, _ = await asked(following, path, **SHORT[path])
    assert "t0 t1 " in json.dumps(body)
    assert "t2" not in json.dumps(body)
    following.model = "quick"
    _, body, _ = await asked(following, path, **SHORT[path])
    assert "t6" in json.dumps(body), "the model's own name has no parameters"


async def test_an_open_socket_follows_the_catalog(following: Caller, file: CatalogFile, stack: Stack) -> None:
    async with connected(following.url, stack.key, "house") as socket:
        assert "t6" in text_of(await socket.answer(input="hi", store=False, max_output_tokens=7))
        file.swap({**FIRST, "aliases": {"house": {"targets": ["quick"], "set": {"max_tokens": 2}}}})
        await reloaded(following)
        assert text_of(await socket.answer(input="hi", store=False, max_output_tokens=7)) == "t0 t1 "


async def test_a_key_that_may_not_use_the_alias_gets_nothing_of_it(following: Caller, file: CatalogFile) -> None:
    file.swap({**FIRST, "aliases": {"house": {"targets": ["quick"], "set": {"max_tokens": 2}}}})
    await reloaded(following)
    async with calling(following.url, NARROW_KEY, "quick") as narrow:
        status, body, _ = await asked(narrow, "/v1/completions", model=None, prompt="hi", max_tokens=5)
        assert (status, body["model"], body["usage"]["completion_tokens"]) == (200, "quick", 5)
        assert (await asked(narrow, "/v1/completions", model="house", prompt="hi"))[0] == 403
