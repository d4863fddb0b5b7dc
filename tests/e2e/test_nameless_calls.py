"""The calls of a client of llama.cpp that names no models, at a gateway of five: each goes to the one that is meant.

Where eight are served, two for each job, the catalog says which one it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from accounts.protocol.records import digest
from tests.support.pooled_models import write_rank_decoder
from tests.support.small_models import write_infill_model, write_small_model
from tests.support.stack import DEMO_MODEL, Process, Stack

CHAT, OTHER, EMBEDDER, RERANKER, CODER = "chat", "other", "embedder", "reranker", "coder"
CATALOG: dict[str, Any] = {
    "models": [{"name": name, "path": f"{name}.gguf"} for name in (CHAT, OTHER, EMBEDDER, RERANKER, CODER)],
    "aliases": {"house": CHAT},
    "default": {"chat": "house"},
    "unknown_model": "default",
}
MESSAGES = {"messages": [{"role": "user", "content": "Who are you?"}]}
SHORT = {"max_tokens": 4, "temperature": 0}
DOCUMENTS = {"query": "a cat", "documents": ["The cat sat.", "A dog ran."]}


@dataclass(frozen=True)
class Play:
    """One call, the model that it is meant for, and what its answer has."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    model: str = ""
    """Empty: none is asked."""
    has: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}" + (" streamed" if self.body and self.body.get("stream") else "")


CALLS = (
    Play("GET", "/health", has='"ok"'),
    Play("GET", "/props", has='"model_alias":"house"'),
    Play("GET", "/v1/models", has='"embedder"'),
    Play("GET", "/models", has='"reranker"'),
    Play("POST", "/tokenize", {"content": "a cat"}, has='"tokens":['),
    Play("POST", "/detokenize", {"tokens": [300, 301]}, has='"content":"'),
    Play("POST", "/apply-template", MESSAGES, has="Who are you?"),
    Play("POST", "/completion", {"prompt": "Once", "n_predict": 4}, CHAT, '"stop_type":"limit"'),
    Play("POST", "/completion", {"prompt": "Once", "n_predict": 4, "stream": True}, CHAT, '"stop":true'),
    Play("POST", "/v1/completions", {"prompt": "Once", **SHORT}, CHAT, '"object":"text_completion"'),
    Play("POST", "/v1/chat/completions", {**MESSAGES, **SHORT}, CHAT, '"model":"house"'),
    Play("POST", "/v1/chat/completions", {**MESSAGES, **SHORT, "stream": True}, CHAT, "data: [DONE]"),
    Play("POST", "/infill", {"input_prefix": "def a(", "input_suffix": "):", "n_predict": 4}, CODER, '"content"'),
    Play("POST", "/embedding", {"content": "a cat"}, EMBEDDER, '"embedding":[['),
    Play("POST", "/v1/embeddings", {"input": ["a cat", "a dog"]}, EMBEDDER, '"index":1'),
    Play("POST", "/rerank", DOCUMENTS, RERANKER, '"relevance_score"'),
    Play("POST", "/v1/rerank", DOCUMENTS, RERANKER, '"relevance_score"'),
    Play("GET", "/slots", has='"model":"chat"'),
    Play("GET", "/lora-adapters", has="[]"),
    Play("GET", "/metrics", has="paddock_requests_total"),
    Play("POST", "/v1/responses", {"input": "Who are you?", "max_output_tokens": 16}, CHAT, '"model":"house"'),
    Play("POST", "/v1/messages", {**MESSAGES, "max_tokens": 4}, CHAT, '"model":"house"'),
    Play("POST", "/v1/messages/count_tokens", MESSAGES, has='"input_tokens":'),
    Play("POST", "/v1/chat/completions/input_tokens", MESSAGES, has='"input_tokens":'),
)
TWINS = {EMBEDDER: "vectors", RERANKER: "judge", CODER: "editor"}
"""Model -> another one that does the same."""
SECOND = {CHAT: OTHER, **TWINS}
"""Model -> the one that takes its calls where the catalog says so for each job."""
JOBS = {"embed": EMBEDDER, "rerank": RERANKER, "infill": CODER}
NARROW_KEY = "pk-narrow-0123456789"
NAMELESS: tuple[dict[str, Any], ...] = ({}, {"model": ""}, {"model": None})
UNKNOWN = {"model": "gpt-9"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the models lie that are made for this, and the catalogs."""
    folder = tmp_path_factory.mktemp("five")
    write_rank_decoder(folder / "reranker.gguf")
    write_infill_model(folder / "coder.gguf")
    (folder / "catalog.json").write_text(json.dumps(CATALOG))
    return folder


def serve(stack: Stack, path: Path, name: str, *, embeds: bool) -> Process:
    llama = json.dumps({"n_threads": 1} | ({"embeddings": True} if embeds else {}))
    return stack.worker(path, name, slots=2, ctx=256, llama=llama, wait=False)


@pytest.fixture(scope="module")
def five(folder: Path) -> Iterator[Stack]:
    with Stack() as stack:
        records = [{"name": "narrow", "team": "blue", "sha256": digest(NARROW_KEY), "aliases": [OTHER, EMBEDDER]}]
        gateway = stack.gateway(wait=False, catalog=folder / "catalog.json", api_keys=json.dumps(records))
        for name, path in (
            (CHAT, DEMO_MODEL),
            (OTHER, write_small_model(folder, "attention")),
            (EMBEDDER, DEMO_MODEL),
            (RERANKER, folder / "reranker.gguf"),
            (CODER, folder / "coder.gguf"),
        ):
            serve(stack, path, name, embeds=name == EMBEDDER)
        stack.wait_until_ready(gateway)
        yield stack


@pytest.fixture(scope="module")
def of_eight(five: Stack, folder: Path) -> Iterator[Process]:
    """Yield a gateway whose catalog names one of two models for each job.

    The tests that use it stand last: from here on no model of the other gateway is the only one for its job.
    """
    models = [*CATALOG["models"], *({"name": name, "path": f"{name}.gguf"} for name in TWINS.values())]
    default = {"chat": OTHER} | {job: TWINS[model] for job, model in JOBS.items()}
    (folder / "eight.json").write_text(json.dumps({**CATALOG, "models": models, "default": default}))
    gateway = five.gateway(wait=False, catalog=folder / "eight.json")
    files = {EMBEDDER: DEMO_MODEL, RERANKER: folder / "reranker.gguf", CODER: folder / "coder.gguf"}
    twins = [serve(five, files[model], twin, embeds=model == EMBEDDER) for model, twin in TWINS.items()]
    five.wait_until_ready(gateway)
    yield gateway
    for process in (gateway, *twins):
        process.stop()


def played(
    stack: Stack, call: Play, more: dict[str, Any], key: str = "", gateway: Process | None = None
) -> httpx2.Response:
    body = None if call.body is None else call.body | more
    headers = {"Authorization": f"Bearer {key or stack.key}"}
    url = (gateway or stack.gateways[0]).url
    return httpx2.request(call.method, url + call.path, json=body, headers=headers, timeout=60)


def misses(call: Play, answer: httpx2.Response) -> str:
    """What is wrong with an answer; empty: nothing."""
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    if call.has.replace(" ", "") not in answer.text.replace(" ", "") and call.has not in answer.text:
        return f"no {call.has} in {answer.text[:300]}"
    if call.model and answer.headers.get("x-paddock-model") != call.model:
        return f"answered by {answer.headers.get('x-paddock-model')}"
    return ""


def test_there_are_twenty_four() -> None:
    assert len(CALLS) == 24
    assert len({call.name for call in CALLS}) == 24


@pytest.mark.parametrize("more", NAMELESS, ids=["absent", "empty", "null"])
def test_every_call_that_names_no_model_is_answered_by_the_one_for_it(five: Stack, more: dict[str, Any]) -> None:
    """With one key, which may use all five."""
    answers = {call.name: (call, played(five, call, more)) for call in CALLS}
    wrong = {name: why for name, (call, answer) in answers.items() if (why := misses(call, answer))}
    assert not wrong, f"{len(CALLS) - len(wrong)} of {len(CALLS)}: {wrong}"
    assert not any("x-paddock-default-model" in answer.headers for _, answer in answers.values())


def test_an_unknown_name_falls_back_the_same_way_and_says_so(five: Stack) -> None:
    posts = [call for call in CALLS if call.body is not None]
    for call in posts:
        answer = played(five, call, UNKNOWN)
        assert not misses(call, answer), call.name
        named = {CHAT: "house", "": "house"}.get(call.model, call.model)
        assert answer.headers["x-paddock-default-model"] == named, call.name
    page = httpx2.get(f"{five.gateways[0].url}/metrics").text
    counted = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith("paddock_unk")}
    assert counted['paddock_unknown_models_total{model="coder"}'] == 1
    assert sum(counted.values()) == len(posts)
    for call in (Play("GET", "/props?model=gpt-9"), Play("GET", "/slots?model=gpt-9")):
        assert played(five, call, {}).headers["x-paddock-default-model"] == "house"


def test_neither_leads_a_key_to_a_model_that_it_may_not_use(five: Stack) -> None:
    """Of five models this key may use two; the default is none of them."""
    chat = Play("POST", "/v1/chat/completions", {**MESSAGES, **SHORT})
    for more in ({}, UNKNOWN):
        answer = played(five, chat, more, NARROW_KEY)
        assert (answer.status_code, answer.headers["x-paddock-model"]) == (200, OTHER)
        assert answer.json()["model"] == OTHER
        refused = played(five, Play("POST", "/rerank", DOCUMENTS), more, NARROW_KEY)
        assert refused.status_code == (404 if more else 501)
        assert not any(name in refused.text for name in (RERANKER, CODER, "house"))
    for name in (CHAT, "house", RERANKER):
        assert played(five, chat, {"model": name}, NARROW_KEY).status_code == 403


def test_what_changes_a_model_for_everybody_is_never_done_to_another_one(five: Stack) -> None:
    for call in (
        Play("POST", "/models/unload", {}),
        Play("POST", "/models/load", {}),
        Play("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a.gguf"}),
        Play("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ):
        answer = played(five, call, UNKNOWN)
        assert answer.status_code == 404, (call, answer.text)
        assert "`gpt-9` does not exist" in answer.text
        assert "missing" in played(five, call, {}).text or "Name the `model`" in played(five, call, {}).text
    url, headers = five.gateways[0].url, {"Authorization": f"Bearer {five.key}"}
    assert httpx2.post(f"{url}/lora-adapters?model=gpt-9", json=[], headers=headers).status_code == 404
    assert httpx2.post(f"{url}/lora-adapters", json=[], headers=headers).status_code == 200
    assert httpx2.get(f"{url}/v1/models/gpt-9", headers=headers).status_code == 404


def test_the_infill_model_is_known_by_its_vocabulary(five: Stack) -> None:
    beats = {name: five.heartbeat(name, f"worker-{number}") for number, name in enumerate((CHAT, OTHER, EMBEDDER))}
    assert [beat is not None and beat.infill for beat in beats.values()] == [False, False, False]
    coder = five.heartbeat(CODER, "worker-4")
    assert coder is not None
    assert coder.infill


def test_a_slot_that_is_erased_without_a_name_is_the_default_models(five: Stack) -> None:
    """Three of the five continue texts, and have slots."""
    erase = Play("POST", "/slots/0?action=erase", {})
    fill = Play("POST", "/completion", {"prompt": "Once upon a time", "n_predict": 4, "id_slot": 0})

    def erased(more: dict[str, Any]) -> int:
        answer = played(five, erase, more)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["n_erased"])

    assert played(five, fill, {"model": OTHER}).status_code == 200
    for more in NAMELESS:
        assert played(five, fill, {"model": CHAT}).status_code == 200
        assert erased(more) > 0
        assert erased({"model": CHAT}) == 0, "it was that one"
    assert erased({"model": OTHER}) > 0, "it was left as it was"


def test_of_two_models_for_a_job_the_catalogs_default_is_asked(five: Stack, of_eight: Process) -> None:
    calls = [call for call in CALLS if call.model and "streamed" not in call.name]
    assert {call.model for call in calls} == set(SECOND)
    answers = {call.name: (call, played(five, call, {}, gateway=of_eight)) for call in calls}
    wrong = {
        name: (answer.headers.get("x-paddock-model"), answer.text)
        for name, (call, answer) in answers.items()
        if (answer.status_code, answer.headers.get("x-paddock-model")) != (200, SECOND[call.model])
    }
    assert not wrong


@pytest.mark.usefixtures("of_eight")
@pytest.mark.parametrize("job", JOBS)
def test_of_two_models_for_a_job_none_is_asked_where_the_catalog_names_none(five: Stack, job: str) -> None:
    """The first gateway's catalog has a default for chat alone."""
    call = next(call for call in CALLS if call.model == JOBS[job])
    deadline = time.monotonic() + 10
    while (answer := played(five, call, {})).status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answer.status_code == 400, answer.text
    assert f"`default.{job}` in the catalog" in answer.text
    assert JOBS[job] in answer.text
    assert TWINS[JOBS[job]] in answer.text
