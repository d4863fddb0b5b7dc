"""Routes and fields that clients of OpenAI's API, llama-server and vLLM look for."""

from __future__ import annotations

import json
import time
from typing import Any

import aiohttp
import anthropic
import pytest

from gateway import __version__
from tests.integration.front.conftest import NARROW_KEY
from tests.support.caller import Caller, calling
from tests.support.stack import ROOT, Process, Stack

MESSAGES = [{"role": "user", "content": "hi"}]
VERBOSE = {
    *("prompt", "generation_settings", "timings", "tokens_predicted", "tokens_evaluated"),
    *("stop_type", "stopping_word", "truncated"),
}


async def posted(caller: Caller, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with caller.session.post(caller.url + path, json={"model": caller.model, **body}) as response:
        document: dict[str, Any] = await response.json()
        assert response.status == 200, document
        return document


async def test_routes_without_v1_do_the_same(caller: Caller) -> None:
    for path, body in (
        ("/chat/completions/input_tokens", {"messages": MESSAGES}),
        ("/responses/input_tokens", {"input": "hi"}),
    ):
        assert await posted(caller, path, body) == await posted(caller, f"/v1{path}", body)
    response = await posted(caller, "/responses", {"input": "hi", "store": False})
    assert (response["object"], response["status"]) == ("response", "completed")


async def test_probes_and_the_release_need_no_key(gateway: Process) -> None:
    async with aiohttp.ClientSession() as session:
        for path, told in (("/healthz", {"status": "ok"}), ("/version", {"version": __version__})):
            async with session.get(gateway.url + path) as response:
                assert (response.status, await response.json()) == (200, told)


@pytest.mark.parametrize(
    ("route", "remedy"),
    [
        ("POST /v1/moderations", "`response_format`"),
        ("POST /v1/conversations", "`previous_response_id`"),
        ("POST /v1/responses/compact", "`truncation"),
        ("POST /v1/chat/completions/control", "`reasoning_budget_tokens`"),
        ("GET /v1/stream", "`x-resume-grace`"),
        ("DELETE /v1/stream", "`x-resume-grace`"),
        ("POST /v1/streams/lookup", "`x-resume-grace`"),
        ("GET /tools", "`tools`"),
        ("POST /tools", "`tools`"),
    ],
)
async def test_what_is_not_served_says_what_to_do_instead(caller: Caller, route: str, remedy: str) -> None:
    method, path = route.split()
    async with caller.session.request(method, caller.url + path, json={"input": "hi"}) as response:
        error = (await response.json())["error"]
        assert response.status == 501, error
        assert "not_supported" in (error["code"], error["type"].removesuffix("_error"))
        assert remedy in error["message"]
    async with aiohttp.ClientSession() as stranger, stranger.request(method, caller.url + path, json={}) as response:
        assert response.status == 401


async def test_metrics_tell_when_the_process_began(gateway: Process) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{gateway.url}/metrics/targets") as response:
            [worker] = (await response.json())[0]["targets"]
        for url in (gateway.url, f"http://{worker}"):
            async with session.get(f"{url}/metrics") as response:
                began = int(response.headers["process-start-time-unix"])
                assert -1 <= time.time() - began < 3600
            async with session.get(f"{url}/metrics") as response:
                assert int(response.headers["process-start-time-unix"]) == began


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})]
)
async def test_answers_tell_what_computed_them(caller: Caller, path: str, body: dict[str, Any], stream: bool) -> None:
    asked = {"model": caller.model, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    async with caller.session.post(f"{caller.url}/v1/{path}", json=asked | body | {"n": 2}) as response:
        text = await response.text()
    assert response.status == 200, text
    num_objects = text.count('"object":')
    assert num_objects > 5 if stream else num_objects == 1
    assert text.count('"system_fingerprint":"fp_quick"') == num_objects


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})]
)
async def test_verbose_answers_tell_what_they_ran_with(
    caller: Caller, path: str, body: dict[str, Any], stream: bool
) -> None:
    """They tell it once, where the answer ends; docs/api.md names the fields."""
    asked = {"model": caller.model, "stream": stream, "max_tokens": 3, "seed": 7, "temperature": 0.25, **body}
    for verbose in (True, False):
        async with caller.session.post(f"{caller.url}/v1/{path}", json=asked | {"verbose": verbose}) as response:
            text = await response.text()
        assert response.status == 200, text
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
        documents = [json.loads(line) for line in lines]
        telling = [document for document in documents if "__verbose" in document]
        assert telling == (documents[-1:] if verbose else [])
        for document in telling:
            told = document["__verbose"]
            assert set(told) == VERBOSE
            settings = told["generation_settings"]
            assert (settings["seed"], settings["temperature"], settings["stream"]) == (7, 0.25, stream)
            assert (told["tokens_predicted"], told["stop_type"], told["stopping_word"]) == (3, "limit", "")
            assert told["tokens_evaluated"] == told["timings"]["cache_n"] + told["timings"]["prompt_n"] > 0
            assert told["truncated"] is False
            assert document["choices"][0]["finish_reason"] == "length"


def test_the_page_names_the_fields_of_verbose() -> None:
    [row] = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("| `verbose` |")]
    assert not {name for name in VERBOSE if f"`{name}`" not in row}


async def test_progress_has_timings_where_they_are_asked_for(caller: Caller) -> None:
    for told, wanted in ((True, {"timings_per_token": True}), (False, {})):
        for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/completion", {"prompt": "hi"})):
            asked = {"model": caller.model, "stream": True, "return_progress": True, **body, **wanted}
            async with caller.session.post(caller.url + path, json=asked) as response:
                lines = [line.decode() async for line in response.content]
            found = [line for line in lines if '"prompt_progress"' in line]
            assert found, lines
            assert all(('"timings":{"cache_n":' in line) is told for line in found)
            assert not told or '"predicted_per_second":0.0' in found[0]


@pytest.mark.parametrize("timed", [True, False])
async def test_a_streamed_response_tells_progress_and_timings_where_they_are_asked_for(
    caller: Caller, timed: bool
) -> None:
    asked = {"model": caller.model, "input": "hi", "stream": True, "return_progress": True, "timings_per_token": timed}
    async with caller.session.post(f"{caller.url}/v1/responses", json=asked) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    progress = [event for event in events if "prompt_progress" in event]
    assert progress
    for event in progress:
        assert (event["type"], event["response"]["status"]) == ("response.in_progress", "in_progress")
        assert event["prompt_progress"]["total"] >= event["prompt_progress"]["processed"]
        assert ("timings" in event) is timed
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert deltas
    assert any("timings" in event for event in deltas) is timed
    assert events[-1]["timings"] == events[-1]["response"]["timings"]


async def got(caller: Caller, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    async with caller.session.get(caller.url + path, headers=headers) as response:
        return response.status, await response.json()


async def test_a_model_and_its_aliases_are_one_entry_of_llama_servers_list(other_caller: Caller) -> None:
    _, listing = await got(other_caller, "/models")
    cards = {card["id"]: card for card in listing["data"]}
    assert (cards["quick"]["aliases"], cards["quick"]["tags"]) == (["chat", "quick"], ["small", "quick"])
    assert cards["absent"]["aliases"] == ["absent", "later"]
    assert not {"chat", "later"} & set(cards)
    assert "steady" in cards, "a name of several models is no alias of one"
    _, listing = await got(other_caller, "/v1/models")
    cards = {card["id"]: card for card in listing["data"]}
    assert cards["quick"]["aliases"] == cards["chat"]["aliases"] == ["chat", "quick"]
    assert cards["chat"]["tags"] == ["small", "quick"]
    assert (await got(other_caller, "/v1/models/chat"))[1] == cards["chat"]


async def test_aliases_that_a_key_may_not_use_are_not_told(stack: Stack) -> None:
    async with calling(stack.gateways[1].url, NARROW_KEY, "quick") as caller:
        _, listing = await got(caller, "/models")
    assert [(card["id"], card["aliases"]) for card in listing["data"]] == [("quick", ["quick"])]


async def test_anthropics_list_of_models_in_pages(other_caller: Caller) -> None:
    version = {"anthropic-version": "2023-06-01"}
    names = [card["id"] for card in (await got(other_caller, "/v1/models"))[1]["data"]]
    _, first = await got(other_caller, "/v1/models?limit=2", **version)
    assert [info["id"] for info in first["data"]] == names[:2]
    assert (first["first_id"], first["last_id"], first["has_more"]) == (names[0], names[1], True)
    info = first["data"][0]
    assert (info["type"], info["display_name"]) == ("model", names[0])
    _, rest = await got(other_caller, f"/v1/models?limit=1000&after_id={names[1]}", **version)
    assert ([info["id"] for info in rest["data"]], rest["has_more"]) == (names[2:], False)
    _, back = await got(other_caller, f"/v1/models?limit=2&before_id={names[3]}", **version)
    assert ([info["id"] for info in back["data"]], back["has_more"]) == (names[1:3], True)
    _, one = await got(other_caller, "/v1/models/quick", **version)
    assert (one["id"], one["max_input_tokens"]) == ("quick", 64)
    for query in ("limit=0", "limit=x", "after_id=nobody", f"after_id={names[0]}&before_id={names[1]}"):
        status, body = await got(other_caller, f"/v1/models?{query}", **version)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error"), query
    assert (await got(other_caller, "/v1/models/nobody", **version))[1]["error"]["type"] == "not_found_error"


async def test_anthropics_sdk_lists_models(stack: Stack) -> None:
    url = stack.gateways[1].url
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=stack.key, max_retries=0) as client,
        calling(url, stack.key, "quick") as caller,
    ):
        assert (await client.models.retrieve("chat")).display_name == "chat"
        for _ in range(5):  # a worker of another test may leave between two pages
            found = [info.id async for info in client.models.list(limit=3)]
            listed = [card["id"] for card in (await got(caller, "/v1/models"))[1]["data"]]
            if found == listed:
                break
        assert found == listed


@pytest.mark.parametrize(
    ("given", "num_vectors"),
    [
        ("", 1),
        ([12, 34, "text", 56], 1),
        ([[12, 34], [12, "text", 56], "text"], 3),
        ({"prompt_string": "text"}, 1),
        (
            [
                "text",
                {"prompt_string": "text"},
                {"content": [{"type": "text", "text": "te"}, {"type": "text", "text": "xt"}]},
            ],
            3,
        ),
    ],
)
async def test_every_form_of_what_is_embedded(caller: Caller, given: Any, num_vectors: int) -> None:
    caller.model = "vectors"
    found = [one["embedding"] for one in (await posted(caller, "/v1/embeddings", {"input": given}))["data"]]
    assert len(found) == num_vectors
    async with caller.session.post(f"{caller.url}/embedding?model=vectors", json={"content": given}) as response:
        assert [one["embedding"][0] for one in await response.json()] == found
    if isinstance(given, list) and given[0] == "text":
        assert found[0] == found[1] == found[2]


async def test_messages_with_an_empty_list(caller: Caller) -> None:
    for system in (None, "Be brief."):
        body = {"messages": [], "max_tokens": 3, "system": system}
        assert (await posted(caller, "/v1/messages", body))["type"] == "message"
        assert (await posted(caller, "/v1/messages/count_tokens", body))["input_tokens"] > 0


async def test_two_turns_of_the_assistant_in_a_row(caller: Caller) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "Well,"}, {"role": "assistant", "content": "now"}]
    answer = await posted(caller, "/v1/chat/completions", {"messages": turns, "max_tokens": 3})
    assert answer["choices"][0]["message"]["content"]
    assert (await posted(caller, "/v1/messages", {"messages": turns, "max_tokens": 3}))["type"] == "message"
