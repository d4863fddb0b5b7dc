"""llama-server's own routes and vLLM's for adapters, on two true workers: slots, adapters, texts, embeddings."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from accounts.protocol.records import digest
from tests.support.stack import DEMO_MODEL, Process, Stack
from workers.protocol import keys

ADAPTER = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
MODEL = "paddock-demo"
PROMPT = "Tom and the cat went to the"
TEAM_KEYS = {"red": "pk-red-0123456789", "blue": "pk-blue-0123456789"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pd-native-"))
    shutil.copy(ADAPTER, path / "pirate.gguf")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start_worker(stack: Stack, folder: Path, name: str, *, wait: bool = True) -> Process:
    return stack.worker(
        DEMO_MODEL,
        MODEL,
        worker_id=name,
        wait=wait,
        slots=2,
        ctx=256,
        adapters_dir=folder,
        slot_save_dir=folder / "slots",
    )


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with Stack() as running:
        for name in ("a", "b"):
            start_worker(running, folder, name, wait=False)
        records = [{"name": name, "team": name, "sha256": digest(key)} for name, key in TEAM_KEYS.items()]
        for _ in range(2):
            running.gateway(wait=False, api_keys=json.dumps(records))
        for name, process in zip(("a", "b"), running.workers, strict=True):
            running.wait_for_worker(MODEL, name, process)
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
        yield running


class Server:
    """One gateway, asked with an admin's key."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def status(self, path: str, told: list[tuple[int, Any]]) -> int:
        """Of a GET; adds what was told."""
        answer = self._http.get(path)
        told.append((answer.status_code, answer.json()))
        return answer.status_code

    def post(self, path: str, body: Any) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()

    def ask(self, path: str, body: Any) -> httpx2.Response:
        return self._http.post(path, json=body)

    def refused(self, path: str, body: Any) -> tuple[int, str]:
        answer = self._http.post(path, json=body)
        return answer.status_code, answer.json()["error"]["message"]

    def error(self, path: str, body: Any) -> Any:
        return self._http.post(path, json=body).json()["error"]

    def text(self, path: str, body: Any) -> str:
        return self._http.post(path, json=body).raise_for_status().text

    def complete(self, prompt: str = PROMPT, **more: Any) -> Any:
        return self.post("/completion", {"prompt": prompt, "n_predict": 12, "temperature": 0, **more})


def asking(stack: Stack, number: int) -> Iterator[Server]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=stack.gateways[number].url, headers=headers, timeout=60) as http:
        yield Server(http)


@pytest.fixture(scope="module")
def server(stack: Stack) -> Iterator[Server]:
    yield from asking(stack, 0)


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[Server]:
    yield from asking(stack, 1)


def until(happened: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_a_completion_tells(server: Server) -> None:
    answer = server.complete(seed=5, n_probs=2, return_tokens=True)
    tokens = server.post("/tokenize", {"content": PROMPT, "add_special": True})["tokens"]
    assert answer["tokens_evaluated"] == len(tokens)
    assert len(answer["tokens"]) == answer["tokens_predicted"] == answer["timings"]["predicted_n"]
    assert server.post("/detokenize", {"tokens": answer["tokens"]})["content"] == answer["content"]
    assert answer["prompt"].endswith(PROMPT)
    assert answer["generation_settings"]["seed"] == 5
    assert answer["generation_settings"]["repeat_last_n"] == 64
    assert len(answer["completion_probabilities"]) == len(answer["tokens"])
    first = answer["completion_probabilities"][0]
    assert first["id"] == first["top_logprobs"][0]["id"] == answer["tokens"][0]


def test_a_prompt_that_is_too_long_is_told_in_numbers(server: Server) -> None:
    answer = server.ask("/completion", {"prompt": "word " * 300})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", 256)
    assert f"request ({error['n_prompt_tokens']} tokens) exceeds the available context size" in error["message"]
    assert error["n_prompt_tokens"] >= 300


def test_minus_one_means_the_context(server: Server) -> None:
    settings = server.complete(repeat_last_n=-1, dry_penalty_last_n=-1, dry_multiplier=0.5)["generation_settings"]
    assert (settings["repeat_last_n"], settings["dry_penalty_last_n"]) == (256, 256)


def test_warming_the_cache(server: Server) -> None:
    prompt = "A long warm prompt about a boat and its crew, " * 3
    cold = server.complete(prompt, n_predict=0, id_slot=0)
    assert (cold["content"], cold["tokens_predicted"]) == ("", 0)
    warm = server.complete(prompt, n_predict=1, id_slot=0)
    assert warm["timings"]["cache_n"] >= warm["tokens_evaluated"] - 1


def test_indented_lines_only(server: Server) -> None:
    grammar = 'root ::= "a\\n    b\\nc"'
    answer = server.complete(grammar=grammar, n_indent=4)
    assert (answer["content"], answer["stop_type"], answer["has_new_line"]) == ("a\n    b\n", "limit", True)


@pytest.mark.parametrize("number", range(4))
def test_a_wished_slot_is_numbered_over_the_workers(server: Server, number: int) -> None:
    answer = server.complete(id_slot=number)
    assert answer["id_slot"] == number


def test_slots_of_both_workers(server: Server) -> None:
    server.complete(id_slot=3)
    slots = server.get("/slots")
    assert [(slot["id"], slot["worker"], slot["n_ctx"]) for slot in slots] == [
        (0, "a", 256),
        (1, "a", 256),
        (2, "b", 256),
        (3, "b", 256),
    ]
    assert slots[3]["n_prompt_tokens"] > 0
    assert not any("prompt" in slot or "generated" in slot for slot in slots)
    assert server.get("/slots?fail_on_no_slot=1")


def test_lengths_of_other_teams_are_not_told(stack: Stack, server: Server) -> None:
    """Neither while a call runs nor of what it left; a slot of nobody looks the same."""

    def slot(key: str, number: int) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        found: list[dict[str, Any]] = httpx2.get(f"{stack.gateways[0].url}/slots", headers=headers).json()
        return found[number]

    told = {"id", "n_ctx", "speculative", "is_processing", "model", "worker"}
    lengths = {"n_prompt_tokens", "next_token", "id_task"}
    red, blue = TEAM_KEYS["red"], TEAM_KEYS["blue"]

    def is_busy(found: dict[str, Any]) -> bool:
        assert set(found) == told
        return bool(found["is_processing"])

    over = threading.Event()

    def call() -> None:
        with httpx2.Client(headers={"Authorization": f"Bearer {red}"}, timeout=60) as http:
            body = {"prompt": PROMPT, "n_predict": 200, "ignore_eos": True, "id_slot": 1}
            while not over.is_set():
                http.post(f"{stack.gateways[0].url}/completion", json=body).raise_for_status()

    with ThreadPoolExecutor(max_workers=2) as callers:
        asked = [callers.submit(call) for _ in range(2)]
        try:
            until(lambda: is_busy(slot(blue, 1)))
            until(lambda: slot(red, 1)["is_processing"])
        finally:
            over.set()
        for one in asked:
            one.result()
    until(lambda: not slot(stack.key, 1)["is_processing"])
    assert set(slot(red, 1)) == told | lengths
    assert slot(red, 1)["n_prompt_tokens"] == slot(stack.key, 1)["n_prompt_tokens"] > 0
    assert not is_busy(slot(blue, 1))
    assert not is_busy(slot(blue, 0))


def test_a_check_of_the_slots_fails_while_all_are_busy(stack: Stack, server: Server) -> None:
    """As llama-server's: 503 where a load balancer asks whether one is free."""
    over = threading.Event()

    def call() -> None:
        with httpx2.Client(headers={"Authorization": f"Bearer {stack.key}"}, timeout=60) as http:
            body = {"prompt": PROMPT, "n_predict": 200, "ignore_eos": True}
            while not over.is_set():
                http.post(f"{stack.gateways[0].url}/completion", json=body).raise_for_status()

    with ThreadPoolExecutor(max_workers=8) as callers:
        asked = [callers.submit(call) for _ in range(8)]
        try:
            refused: list[tuple[int, Any]] = []
            until(lambda: server.status("/slots?fail_on_no_slot=1", refused) == 503)
        finally:
            over.set()
        for one in asked:
            one.result()
    error = refused[-1][1]["error"]
    assert (refused[-1][0], error["type"]) == (503, "unavailable_error")
    assert error["message"] == f"No slot of `{MODEL}` is free. Send the request again later."
    until(lambda: server.status("/slots?fail_on_no_slot=1", []) == 200)


def test_a_slot_is_saved_erased_and_brought_back(server: Server) -> None:
    prompt = "The story of a slot that was saved and came back to its worker. " * 2
    first = server.complete(prompt, id_slot=2)
    saved = server.post("/slots/2?action=save", {"filename": "story.bin"})
    assert (saved["id_slot"], saved["filename"]) == (2, "story.bin")
    assert saved["n_saved"] >= first["tokens_evaluated"]
    erased = server.post("/slots/2?action=erase", {})
    assert erased["id_slot"] == 2
    assert erased["n_erased"] > 0
    restored = server.post("/slots/2?action=restore", {"filename": "story.bin"})
    assert restored["n_restored"] == saved["n_saved"]
    assert server.complete(prompt, id_slot=2)["content"] == first["content"]
    assert server.refused("/slots/2?action=restore", {"filename": "nothing.bin"})[0] == 400


def test_properties(server: Server) -> None:
    props = server.get("/props")
    assert (props["total_slots"], props["model_alias"], props["model_path"]) == (4, MODEL, DEMO_MODEL.name)
    assert "user" in server.post("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})["prompt"]


class TestAdapters:
    def test_load_call_scale_and_unload(self, server: Server, other: Server, stack: Stack, folder: Path) -> None:
        plain = server.complete()["content"]
        assert server.get("/lora-adapters") == []
        loaded = server.text("/v1/load_lora_adapter", {"lora_name": "pirate", "lora_path": "pirate.gguf"})
        assert loaded == "Success: LoRA adapter 'pirate' added successfully."
        assert [(one["id"], one["name"], one["scale"]) for one in server.get("/lora-adapters")] == [(0, "pirate", 0)]

        by_name = server.complete(lora=[{"id": "pirate", "scale": 1.0}])
        assert by_name["content"] != plain
        assert by_name["generation_settings"]["lora"] == [{"id": "pirate", "scale": 1.0}]
        assert server.complete(lora=[{"id": 0, "scale": 1.0}])["content"] == by_name["content"]
        for number in range(4):
            called = server.complete(model="pirate", id_slot=number)
            assert (called["content"], called["model"]) == (by_name["content"], "pirate")
        assert server.complete()["content"] == plain

        cards = {card["id"]: card for card in server.get("/v1/models")["data"]}
        assert (cards["pirate"]["parent"], cards["pirate"]["root"]) == (MODEL, MODEL)
        until(lambda: "pirate" in {card["id"] for card in other.get("/v1/models")["data"]})
        assert other.complete(model="pirate")["content"] == by_name["content"]
        chat = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", chat)["model"] == "pirate"

        assert server.post("/lora-adapters", [{"id": 0, "scale": 1.0}]) == {"success": True}
        assert server.complete()["content"] == by_name["content"]
        until(lambda: other.complete()["content"] == by_name["content"])
        assert server.complete(lora=[{"id": "pirate", "scale": 0.0}])["content"] == plain
        assert server.post("/lora-adapters", []) == {"success": True}
        assert server.complete()["content"] == plain

        self._a_worker_that_starts_later_has_it(server, stack, folder, by_name["content"])
        server.text("/v1/unload_lora_adapter", {"lora_name": "pirate"})
        assert server.refused("/completion", {"prompt": "a", "model": "pirate"})[0] == 404
        assert server.refused("/completion", {"prompt": "a", "lora": [{"id": "pirate"}]})[0] == 400
        assert server.get("/lora-adapters") == []
        assert server.refused("/v1/unload_lora_adapter", {"lora_name": "pirate"})[0] == 404

    def _a_worker_that_starts_later_has_it(self, server: Server, stack: Stack, folder: Path, said: str) -> None:
        start_worker(stack, folder, "c")

        def told() -> bool:
            beat = stack.heartbeat(MODEL, "c")
            return beat is not None and beat.adapters == ("pirate",)

        until(told, keys.HEARTBEAT_TTL_S + 10)
        until(lambda: len(server.get("/slots")) == 6)
        assert server.complete(model="pirate", id_slot=5)["content"] == said
        stack.workers.pop().stop()
        until(lambda: len(server.get("/slots")) == 4)

    def test_what_can_not_be_loaded(self, server: Server) -> None:
        status, message = server.refused("/v1/load_lora_adapter", {"lora_name": "p", "lora_path": "../x.gguf"})
        assert status == 400
        assert "adapters_dir" in message
        assert server.error("/v1/load_lora_adapter", {"lora_name": "p", "lora_path": "../x"})["param"] == "lora_path"
        assert server.error("/v1/unload_lora_adapter", {"lora_name": "p"})["code"] == "model_not_found"
        assert server.refused("/v1/load_lora_adapter", {"lora_name": "p"})[0] == 400
        assert server.get("/lora-adapters") == []


def test_nobody_supervises_these_workers(server: Server) -> None:
    status, message = server.refused("/models/unload", {"model": MODEL})
    assert status == 501
    assert "No supervisor keeps workers" in message
    assert server.refused("/models/load", {"model": MODEL})[0] == 400
    assert server.refused("/models/load", {"model": "nobody"})[0] == 404


def test_slots_tell_what_an_answer_may_still_have(server: Server) -> None:
    def told() -> dict[str, Any]:
        next_token: dict[str, Any] = server.get("/slots")[0]["next_token"][0]
        return next_token

    idle = {"has_next_token": False, "n_decoded": 0, "n_remain": -1}
    seen, over = idle, threading.Event()

    def ask() -> None:
        while not over.is_set():  # an answer takes as long as two looks: it may be over before it is seen
            server.complete(n_predict=400, ignore_eos=True, id_slot=0)

    call = threading.Thread(target=ask)
    call.start()
    try:
        until(lambda: told()["n_decoded"] > 0, 30.0)
        seen = told()
    finally:
        over.set()
        call.join()
    assert seen == idle or seen["n_decoded"] + seen["n_remain"] == 400
    until(lambda: told() == idle)


def test_ends_that_are_ignored_are_shown_as_biases(server: Server) -> None:
    asked: dict[str, Any] = {"n_predict": 2, "logit_bias": [[5, 1.5]]}
    assert server.complete(**asked)["generation_settings"]["logit_bias"] == [{"token": 5, "bias": 1.5}]
    told = server.complete(ignore_eos=True, **asked)["generation_settings"]["logit_bias"]
    assert told[0] == {"token": 5, "bias": 1.5}
    assert len(told) > 1
    assert all(one["bias"] is None for one in told[1:])


def test_vectors_of_every_token_and_of_texts(server: Server, stack: Stack) -> None:
    pools = {"tokens": "none", "texts": "mean"}
    for name, pooling in pools.items():
        llama = json.dumps({"n_threads": 1, "pooling": pooling})
        stack.worker(DEMO_MODEL, name, worker_id=name, wait=False, slots=1, ctx=64, llama=llama)
    for name, process in zip(pools, stack.workers[-2:], strict=True):
        stack.wait_for_worker(name, name, process)
    until(lambda: {"tokens", "texts"} <= {card["id"] for card in server.get("/models")["data"]})

    text = "The cat ran"
    tokens = server.post("/tokenize", {"content": text, "add_special": True, "model": "tokens"})["tokens"]
    (one,) = server.post("/embedding", {"content": text, "model": "tokens"})
    assert (one["index"], len(one["embedding"])) == (0, len(tokens))
    objects = [text, {"prompt_string": text}, {"content": [{"type": "text", "text": text}]}, tokens]
    same = server.post("/v1/embeddings", {"model": "texts", "input": objects})["data"]
    assert all(other["embedding"] == pytest.approx(same[0]["embedding"], abs=1e-4) for other in same)
    (mixed,) = server.post("/embedding", {"content": [*tokens, text], "model": "tokens"})
    plain = server.post("/tokenize", {"content": text, "model": "tokens"})["tokens"]
    assert len(mixed["embedding"]) == len(tokens) + len(plain), "what begins a text comes once"
    pair = server.post("/embeddings?model=texts", {"input": [text, "A boat"], "embd_normalize": 2})
    assert [(found["index"], len(found["embedding"])) for found in pair] == [(0, 1), (1, 1)]
    assert sum(number**2 for number in pair[0]["embedding"][0]) == pytest.approx(1.0, abs=1e-3)
    largest = server.post("/embedding?model=texts", {"content": text, "embd_normalize": 0})[0]["embedding"][0]
    assert max(map(abs, largest)) == pytest.approx(32760, rel=1e-3)
    assert server.refused("/completion", {"prompt": "a", "model": "texts"})[0] == 501
