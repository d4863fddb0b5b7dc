"""LoRA adapters of a whole fleet, through the front door: two true workers with a folder each, two gateways."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from accounts.protocol.records import digest
from tests.support import adapter_files
from tests.support.stack import DEMO_MODEL, Stack
from workers.llama.gguf import read_header
from workers.protocol import keys

PIRATE = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
MODEL = "demo"
PROMPT = "Tom and the cat went to the"
NAMES = ("a", "b")
USER_KEY = "pk-user-0123456789"
BASE_KEY = "pk-base-0123456789"
ANSWER_TOKENS = 1000
"""About as many as its context holds: the call is to run for as long as it can."""
SEEN_S = 1.0
"""Within which every gateway knows what one was told."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder of adapters for each worker: `one.gguf` is the same file in both, `torn.gguf` is not."""
    header = read_header(DEMO_MODEL)
    with tempfile.TemporaryDirectory(prefix="pd-adapters-") as path:
        for seed, name in enumerate(NAMES):
            own = Path(path) / name
            own.mkdir()
            adapter_files.sound(own / "one.gguf", header, seed=10, size=2.0)
            adapter_files.sound(own / "two.gguf", header, seed=11, size=2.0)
            adapter_files.sound(own / "torn.gguf", header, seed=seed, size=2.0)
        shutil.copy(PIRATE, Path(path) / "a" / "only-a.gguf")
        (Path(path) / "b" / "cut.gguf").write_bytes(PIRATE.read_bytes()[:-100])
        shutil.copy(PIRATE, Path(path) / "a" / "cut.gguf")
        yield Path(path)


def start_worker(stack: Stack, folder: Path, name: str, *, wait: bool = True) -> None:
    fixed = json.dumps([{"name": "house", "path": str(PIRATE)}])
    places = {"slots": 2, "ctx": 1024, "kv_tokens": 2048, "max_adapters": 3}
    stack.worker(DEMO_MODEL, MODEL, worker_id=name, wait=wait, adapters_dir=folder / name, adapters=fixed, **places)


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with Stack() as running:
        for name in NAMES:
            start_worker(running, folder, name, wait=False)
        user = {"name": "user", "team": "blue", "sha256": digest(USER_KEY)}
        base = {"name": "base", "team": "red", "sha256": digest(BASE_KEY), "aliases": [MODEL]}
        for _ in range(2):
            running.gateway(wait=False, api_keys=json.dumps([user, base]))
        for name, process in zip(NAMES, running.workers, strict=True):
            running.wait_for_worker(MODEL, name, process)
        for gateway in running.gateways:
            running.wait_until_ready(gateway)
        yield running


class Server:
    def __init__(self, http: httpx2.Client, stack: Stack) -> None:
        self.http = http
        self.stack = stack

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def load(self, name: str, path: str, **more: Any) -> httpx2.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)

    def unload(self, name: str, **more: Any) -> httpx2.Response:
        return self.post("/v1/unload_lora_adapter", lora_name=name, **more)

    def names(self) -> list[str]:
        return [one["name"] for one in self.http.get("/lora-adapters").raise_for_status().json()]

    def say(self, model: str = MODEL, **more: Any) -> str:
        """The answer, computed token by token: logits that tie may fall either way where some are cached or drafted."""
        asked = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "cache_prompt": False, "speculation": False}
        body = {"model": model, **asked, **more}
        return str(self.post("/completion", **body).raise_for_status().json()["content"])

    def refused(self, answer: httpx2.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["message"]

    def told(self, worker: str) -> Any:
        """What a worker says of itself in Redis."""
        beat = self.stack.heartbeat(MODEL, worker)
        assert beat is not None
        return beat


def asking(stack: Stack, number: int) -> Iterator[Server]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=stack.gateways[number].url, headers=headers, timeout=150) as http:
        yield Server(http, stack)


@pytest.fixture
def server(stack: Stack) -> Iterator[Server]:
    yield from asking(stack, 0)


@pytest.fixture
def other(stack: Stack) -> Iterator[Server]:
    yield from asking(stack, 1)


def until(happened: Callable[[], object], timeout_s: float = 30.0) -> float:
    """Waits -> how long it took, seconds."""
    started = time.monotonic()
    while not happened():
        assert time.monotonic() - started < timeout_s
        time.sleep(0.02)
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("torn.gguf", "holds other contents"),
        ("only-a.gguf", "can't be read"),
        ("cut.gguf", "truncated"),
        ("../b/one.gguf", "does not lie in adapters_dir"),
        ("nowhere.gguf", "can't be read"),
    ],
)
def test_what_one_worker_refuses_is_registered_nowhere(server: Server, other: Server, path: str, says: str) -> None:
    status, message = server.refused(server.load("new", path))
    assert (status, says in message) == (400, True), message
    assert "so nothing is registered" in message
    assert server.names() == other.names() == ["house"]
    assert all(server.told(name).adapters == ("house",) for name in NAMES)
    assert server.post("/completion", model="new", prompt="a").status_code == 404


def test_both_contents_are_named_where_they_differ(server: Server) -> None:
    _, message = server.refused(server.load("new", "torn.gguf"))
    assert len([word for word in message.replace("(", " ").replace(")", " ").split() if len(word) == 64]) == 2
    assert "Worker b refuses it" in message


def test_a_registered_adapter_is_called_on_any_worker_and_loaded_by_its_first_call(
    server: Server, other: Server
) -> None:
    plain = server.say()
    assert server.load("one", "one.gguf").status_code == 200
    took_s = until(lambda: "one" in other.names())
    assert took_s < SEEN_S
    assert [server.told(name).adapters_resident for name in NAMES] == [(), ()], "nobody has called it"
    assert len({server.told(name).adapter_hashes["one"] for name in NAMES}) == 1
    said = {other.say("one", id_slot=slot) for slot in range(4)}
    assert len(said) == 1
    assert plain not in said
    until(lambda: [server.told(name).adapters_resident for name in NAMES] == [("one",), ("one",)])
    assert all(server.told(name).adapter_load_ms > 0 for name in NAMES)

    assert server.load("one", "two.gguf").status_code == 200, "a name may get other contents"
    renewed = server.say("one")
    assert renewed not in (plain, *said)
    until(lambda: other.say("one") == renewed, SEEN_S)
    assert server.unload("one").status_code == 200
    assert server.names() == ["house"]


def test_a_pinned_one_is_in_memory_before_it_is_called(server: Server) -> None:
    assert server.load("kept", "one.gguf", pinned=True).status_code == 200
    assert [server.told(name).adapters_resident for name in NAMES] == [("kept",), ("kept",)]
    assert [server.told(name).adapter_room for name in NAMES] == [2, 2]
    assert server.unload("kept").text == "Success: LoRA adapter 'kept' removed successfully."


def unload_while_called(server: Server, other: Server, timeout_s: int) -> tuple[httpx2.Response, httpx2.Response]:
    """Unload an adapter while a call uses it; return that answer and the call's.

    A call may be over before its worker's heartbeat tells of it, or between that and the unloading: then try again.
    """
    body = {"model": "busy", "prompt": PROMPT, "n_predict": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    for _ in range(20):
        assert server.load("busy", "one.gguf").status_code == 200
        until(lambda: "busy" in other.names())
        ended: list[httpx2.Response] = []

        def ask(ended: list[httpx2.Response] = ended) -> None:
            ended.append(other.post("/completion", **body))

        call = threading.Thread(target=ask)
        call.start()
        while call.is_alive():
            if any(server.told(name).slots_busy for name in NAMES):
                gone = server.unload("busy", timeout_s=timeout_s)
                is_used = bool(timeout_s) or gone.status_code != 200
                assert server.post("/completion", model="busy", prompt="a").status_code == 404
                call.join()
                if is_used:
                    return gone, ended[0]
        call.join()
    raise AssertionError("none of 20 calls was seen while it ran")


def test_unloading_waits_for_running_calls_and_says_how_many_it_left(server: Server, other: Server) -> None:
    for timeout_s in (0, 120):
        gone, answer = unload_while_called(server, other, timeout_s)
        if timeout_s:
            assert gone.status_code == 200
        else:
            assert gone.status_code == 202
            assert "1 calls that began before still use it" in gone.text
        assert answer.status_code == 200
        assert answer.json()["tokens_predicted"] == ANSWER_TOKENS
    until(lambda: not any(server.told(name).adapters_resident for name in NAMES))


def test_what_the_settings_name_is_fixed(server: Server) -> None:
    status, message = server.refused(server.unload("house"))
    assert (status, "stands in the settings of" in message) == (400, True)
    status, message = server.refused(server.load("house", "one.gguf"))
    assert (status, "stands in this worker's settings" in message) == (400, True)
    assert server.names() == ["house"]
    assert server.say("house") != server.say()


def test_only_admins_register(server: Server, stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {USER_KEY}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=150) as http:
        user = Server(http, stack)
        for answer in (user.load("x", "one.gguf"), user.unload("house"), user.http.post("/lora-adapters", json=[])):
            status, message = user.refused(answer)
            assert (status, "Only an admin's API key may" in message) == (403, True)
        assert user.names() == ["house"]
        assert user.say("house") == server.say("house")


CHAT = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2}
OF_EACH_DIALECT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
    ("/v1/messages", CHAT),
    ("/completion", {"prompt": "a", "n_predict": 2}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
]


@pytest.mark.parametrize(("path", "body"), OF_EACH_DIALECT, ids=[path for path, _ in OF_EACH_DIALECT])
def test_a_key_for_the_base_model_reaches_no_adapter(
    server: Server, stack: Stack, path: str, body: dict[str, Any]
) -> None:
    headers = {"Authorization": f"Bearer {BASE_KEY}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=150) as http:
        limited = Server(http, stack)
        for stream in (False, True):
            by_name = limited.post(path, **body, model="house", stream=stream)
            by_field = limited.post(path, **body, model=MODEL, lora=[{"id": "house"}], stream=stream)
            by_number = limited.post(path, **body, model=MODEL, lora=[{"id": 0, "scale": 0.01}], stream=stream)
            for answer in (by_name, by_field, by_number):
                assert answer.status_code == 403, answer.text
                assert "This API key may not use" in answer.text
            assert "house" not in by_number.text
        assert server.post(path, **body, model=MODEL, lora=[{"id": "house"}]).status_code != 403
        assert limited.post(path, **body, model=MODEL, lora=[{"id": 0, "scale": 0}]).status_code != 403


def test_a_key_for_the_base_model_is_told_of_no_adapter(server: Server, stack: Stack) -> None:
    headers = {"Authorization": f"Bearer {BASE_KEY}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=150) as http:
        limited = Server(http, stack)
        assert limited.names() == []
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL]
        assert http.get("/v1/models/house").status_code == 403
        saving = http.post("/slots/0?action=save", json={"filename": "x", "lora": [{"id": "house"}]})
        assert saving.status_code == 403
        assert limited.post("/tokenize", content="a", model="house").status_code == 403
        # What an admin sets for everybody is everybody's.
        plain = limited.say()
        assert server.http.post("/lora-adapters", json=[{"id": "house", "scale": 1.0}]).status_code == 200
        until(lambda: limited.say() == server.say("house"))
        assert limited.say(lora=[{"id": 0, "scale": 0}]) == plain
        assert server.http.post("/lora-adapters", json=[]).status_code == 200


def test_an_adapter_with_a_scale_of_the_catalog_acts_on_calls_that_name_none(server: Server, stack: Stack) -> None:
    catalog = stack.folder / "scaled.yaml"
    adapter = f"{{name: house, path: {PIRATE}, scale: 1.0}}"
    catalog.write_text(f"models:\n  - {{name: {MODEL}, path: {DEMO_MODEL}, adapters: [{adapter}]}}\n")
    process = stack.gateway(catalog=catalog)
    stack.gateways.remove(process)
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx2.Client(base_url=process.url, headers=headers, timeout=150) as http:
        scaled = Server(http, stack)
        assert scaled.say() == server.say("house") != server.say()
        assert scaled.say(lora=[{"id": "house", "scale": 0}]) == server.say()
        assert [one["scale"] for one in http.get("/lora-adapters").json()] == [1.0]
    process.stop()


def test_only_admins_see_where_files_lie(server: Server, stack: Stack) -> None:
    assert server.load("one", "one.gguf").status_code == 200
    headers = {"Authorization": f"Bearer {USER_KEY}"}
    with httpx2.Client(base_url=stack.gateways[0].url, headers=headers, timeout=150) as http:
        assert [one["path"] for one in http.get("/lora-adapters").json()] == ["", ""]
    assert [one["path"] for one in server.http.get("/lora-adapters").json()] == ["", "one.gguf"]
    assert server.unload("one").status_code == 200


def test_it_is_there_again_where_redis_has_lost_it_and_where_all_workers_are_new(
    server: Server, other: Server, stack: Stack, folder: Path
) -> None:
    assert server.load("lasting", "one.gguf").status_code == 200
    said = server.say("lasting")
    with redis.Redis(unix_socket_path=str(stack.redis.socket)) as client:
        client.delete(keys.adapters(MODEL))
        until(lambda: client.hexists(keys.adapters(MODEL), "lasting"))

    for process in stack.workers:
        process.stop()
    for name in NAMES:
        start_worker(stack, folder, name, wait=False)
    # Called at once, while nobody has it: the call waits for a worker, and the worker for the adapter.
    assert other.say("lasting") == said
    assert server.say("lasting") == said
    assert server.unload("lasting").status_code == 200
    for name in NAMES:
        stack.wait_for_worker(MODEL, name)  # one may have come later than the answers
    until(lambda: all(server.told(name).adapters == ("house",) for name in NAMES))
