"""An admin reads, checks and writes the catalog's file over HTTP; who did is in the audit."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import Stack

TEXT = "models:\n  - {name: one, path: one.gguf, workers: 0}  # the first\n"
MORE = TEXT + "aliases:\n  gpt: one\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        file = running.folder / "kept" / "catalog.yaml"
        file.parent.mkdir()
        file.write_text(TEXT)
        link = running.folder / "catalog.yaml"
        link.symlink_to(file)
        running.fake_worker("any")  # a gateway without a catalog is ready once it has seen one
        running.gateway(catalog=link, accounts_url=running.accounts().url)
        running.gateway()
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, "one") as asking:
        yield asking


async def asked(caller: Caller, method: str, path: str = "", **body: Any) -> tuple[int, Any]:
    async with caller.session.request(method, f"{caller.url}/admin/catalog{path}", json=body or None) as response:
        return response.status, await response.json()


async def test_a_text_is_checked_written_and_used(stack: Stack, caller: Caller) -> None:
    file = stack.folder / "kept" / "catalog.yaml"
    file.chmod(0o640)
    _, told = await asked(caller, "GET", "?text=true")
    assert (told["text"], told["unwritable"]) == (TEXT, None)
    _, found = await asked(caller, "POST", "/check", text=MORE)
    assert found == {"faults": [], "changes": {"aliases": {"added": ["gpt"]}}}
    status, written = await asked(caller, "PUT", text=MORE, digest=told["digest"])
    assert (status, written["changes"], written["audited"]) == (200, {"aliases": {"added": ["gpt"]}}, True)
    assert written["aliases"] == ["gpt"]
    assert file.read_text() == MORE
    assert (stack.folder / "catalog.yaml").is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(file.parent) == ["catalog.yaml"]
    async with caller.session.get(f"{caller.url}/admin/audit?kind=catalog") as response:
        [entry] = (await response.json())["data"]
    assert (entry["action"], entry["actor"]) == ("write", "key:first")
    assert entry["after"] == {"changes": {"aliases": {"added": ["gpt"]}}}


async def test_what_is_wrong_is_never_written(stack: Stack, caller: Caller) -> None:
    file = stack.folder / "kept" / "catalog.yaml"
    before = file.read_text()
    _, told = await asked(caller, "GET", "?text=true")
    bad = before.replace("path", "pfad")
    _, found = await asked(caller, "POST", "/check", text=bad)
    assert [fault["line"] for fault in found["faults"]] == [2]
    status, refused = await asked(caller, "PUT", text=bad, digest=told["digest"])
    assert (status, refused["error"]["code"]) == (400, "catalog_refused")
    assert "line 2: " in refused["error"]["message"]
    assert (await asked(caller, "PUT", text=before))[0] == 400
    assert (await asked(caller, "POST", "/check", texts=before))[0] == 400
    assert file.read_text() == before


async def test_no_file_is_read_by_naming_it_as_a_template(stack: Stack, caller: Caller) -> None:
    file = stack.folder / "kept" / "catalog.yaml"
    before = file.read_text()
    _, told = await asked(caller, "GET", "?text=true")
    foreign = before.replace("workers: 0", "workers: 0, chat_template: ../gateway-secret")
    _, found = await asked(caller, "POST", "/check", text=foreign)
    assert [fault["line"] for fault in found["faults"]] == [2]
    status, refused = await asked(caller, "PUT", text=foreign, digest=told["digest"])
    assert (status, refused["error"]["code"]) == (400, "catalog_refused")
    assert file.read_text() == before


async def test_a_file_that_has_changed_meanwhile_stays(stack: Stack, caller: Caller) -> None:
    file = stack.folder / "kept" / "catalog.yaml"
    _, told = await asked(caller, "GET", "?text=true")
    file.write_text(TEXT + "# by somebody else\n")
    status, refused = await asked(caller, "PUT", text=MORE, digest=told["digest"])
    assert (status, refused["error"]["code"]) == (409, "catalog_changed")
    assert "somebody else" in file.read_text()


async def test_a_gateway_without_a_catalog_says_so(stack: Stack) -> None:
    async with calling(stack.gateways[1].url, stack.key, "one") as caller:
        assert (await asked(caller, "GET"))[0] == 200
        for method, path, body in (("GET", "?text=true", {}), ("POST", "/check", {"text": TEXT})):
            status, told = await asked(caller, method, path, **body)
            assert (status, told["error"]["code"]) == (501, "not_supported")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
async def test_a_file_that_may_not_be_written_says_where_to_change_it(stack: Stack, caller: Caller) -> None:
    folder: Path = stack.folder / "kept"
    folder.chmod(0o500)  # noqa: ASYNC240 - of the test's own disk
    try:
        _, told = await asked(caller, "GET", "?text=true")
        assert "ConfigMap" in told["unwritable"]
        status, refused = await asked(caller, "PUT", text=MORE, digest=told["digest"])
        assert (status, refused["error"]["message"]) == (501, told["unwritable"])
    finally:
        folder.chmod(0o700)  # noqa: ASYNC240 - of the test's own disk
