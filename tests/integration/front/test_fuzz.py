"""Every route of the gateway under bodies, addresses and headers that nobody in their right mind sends.

No 500, no hang, no traceback, no slot that stays taken, and no memory that is not given back.
"""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.sync.client import connect

from gateway.api.compatibility import TABLES, Endpoint
from gateway.api.http.sockets import METHOD
from gateway.api.responses import body as responses_refused
from gateway.api.responses.body import ResponsesBody
from gateway.api.routes import ROUTES, RouteRow
from tests.support.json_fuzz import WEIRD, bodies, junk
from tests.support.sent_forms import CONTENT_TYPE, form
from tests.support.sent_media import WAV
from tests.support.stack import Process, Stack

ENDPOINTS = [endpoint for table in TABLES for endpoint in table.endpoints]
PLAIN = [
    row
    for row in ROUTES
    if row.method != METHOD
    and row.name not in ("model_news", "overview_events")
    and f"{row.method} {row.path}" not in {name for one in ENDPOINTS for name in one.routes}
]
"""The routes without a table of parameters; without those whose answers have no end."""

FITTING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "content": "hi",
    "query": "hi",
    "documents": ["one", "two"],
    "tokens": [1, 2],
    "input_prefix": "a",
    "input_suffix": "b",
    "max_tokens": 4,
    "lora_name": "poet",
    "lora_path": "poet.gguf",
    "file": "",
    "language": "de",
}
MODELS = {"/v1/embeddings": "vectors", "/embedding": "vectors", "/v1/rerank": "ranks"}

PATIENCE_S = 10.0
MAX_GROWTH_BYTES = 150 << 20

MANY = 400
FEW_AND_MANY = pytest.mark.parametrize("examples", [15, pytest.param(MANY, marks=pytest.mark.long)])
"""The few are the same every time."""


def as_form(body: bytes) -> bytes:
    """Return a form with the fields of a JSON object; anything else as it is."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(document, dict):
        return body
    fields: list[tuple[str, str | bytes]] = []
    for name, value in document.items():
        if name == "file":
            fields.append((name, WAV))
        elif isinstance(value, list):
            fields += [(f"{name}[]", json.dumps(item)) for item in value]
        elif isinstance(value, dict):
            fields += [(f"{name}[{key}]", json.dumps(item)) for key, item in value.items()]
        else:
            fields.append((name, value if isinstance(value, str) else json.dumps(value)))
    return form(*fields)


def trying(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < MANY,
        suppress_health_check=list(HealthCheck),
    )


class Fuzzed:
    """One connection, renewed where the gateway closes it."""

    def __init__(self, gateway: Process, key: str) -> None:
        self._host = gateway.url.removeprefix("http://")
        self._headers = {"authorization": f"Bearer {key}"}
        self._connection = http.client.HTTPConnection(self._host, timeout=PATIENCE_S)
        self.statuses: Counter[int] = Counter()

    def close(self) -> None:
        self._connection.close()

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> None:
        """Raises AssertionError for an answer that nobody may get."""
        began = time.monotonic()
        try:
            status, raw, kind = self._exchange(method, path, body, headers or {})
        finally:
            took_s = time.monotonic() - began
            assert took_s < PATIENCE_S, f"{method} {path} took {took_s:.1f} s: {body!r:.300}"
        self.statuses[status] += 1
        told = f"{method} {path} -> {status} {raw[:300]!r} for {body!r:.600}"
        assert status != 500, told
        assert b"Traceback" not in raw, told
        if kind.startswith("application/json") and method != "HEAD":
            document = json.loads(raw)
            assert status < 400 or document["error"]["message"], told

    def _exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes, str]:
        for attempt in (0, 1):
            try:
                self._connection.request(method, path, body, self._headers | headers)
                response = self._connection.getresponse()
                return response.status, response.read(), response.headers.get("content-type", "")
            except (http.client.RemoteDisconnected, ConnectionError):
                self._connection.close()
                if attempt:
                    raise
        raise AssertionError("not reached")


@pytest.fixture(scope="module")
def fuzzed(stack: Stack) -> Iterator[Fuzzed]:
    """A gateway of its own, so that its memory can be watched, with as much patience as the others."""
    gateway = stack.gateway(max_body_bytes=1 << 20, queue_timeout_s=1.5, max_queue=2, ping_interval_s=0.2)
    connected = Fuzzed(gateway, stack.key)
    yield connected
    connected.close()
    gateway.stop()
    assert "Traceback" not in gateway.text()


@FEW_AND_MANY
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.routes[0])
def test_bodies(fuzzed: Fuzzed, endpoint: Endpoint, examples: int) -> None:
    method, path = endpoint.routes[0].split(" ")
    fitting = {"model": MODELS.get(path, "quick"), **FITTING}
    names = (*endpoint.ignored, *endpoint.refused, "surprise")
    is_form = path.startswith("/v1/audio/")
    headers = {"content-type": CONTENT_TYPE.decode()} if is_form else {}

    @trying(examples)
    @given(bodies(endpoint.body, fitting, names))
    def send(body: bytes) -> None:
        body = as_form(body) if is_form else body
        fuzzed.send(method, path.replace("{id_slot}", "0") + ("?action=save" if "slots" in path else ""), body, headers)

    send()


@FEW_AND_MANY
@pytest.mark.parametrize("row", PLAIN, ids=lambda row: f"{row.method} {row.path}")
def test_addresses(fuzzed: Fuzzed, row: RouteRow, examples: int) -> None:
    words = st.text(max_size=20) | st.sampled_from([*WEIRD, "quick", "vectors", "-1", "resp_0", "save"])

    @trying(examples)
    @given(words, st.dictionaries(words, words, max_size=3), junk)
    def send(place: str, query: dict[str, str], body: Any) -> None:
        path = row.path.replace(":path", "")
        for name in ("{model}", "{response_id}", "{id_slot}"):
            path = path.replace(name, quoted(place) or "x")
        asked = "&".join(f"{quoted(name)}={quoted(value)}" for name, value in {"model": "quick", **query}.items())
        raw = json.dumps(body).encode("utf-8", "replace") if row.method == "POST" else None
        fuzzed.send(row.method, f"{path}?{asked}", raw)

    send()


HEADERS = ["x-slo-ttft-ms", "x-request-id", "x-resume-grace", "last-event-id", "x-session-id", "x-paddock-debug"]
HEADERS += ["traceparent", "accept"]
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30) | st.sampled_from(
    ["0", "-1", "1e400", "nan", "60", "9" * 400, "a:b-1", ","]
)


@FEW_AND_MANY
@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/chat/completions", ("messages",)),
        ("/v1/messages", ("messages", "max_tokens")),
        ("/v1/responses", ("input",)),
        ("/completion", ("prompt",)),
    ],
)
def test_headers(fuzzed: Fuzzed, path: str, names: tuple[str, ...], examples: int) -> None:
    body = json.dumps({"model": "quick", "stream": True, **{name: FITTING[name] for name in names}}).encode()

    @trying(examples)
    @given(st.dictionaries(st.sampled_from(HEADERS), VALUES, max_size=3))
    def send(headers: dict[str, str]) -> None:
        fuzzed.send("POST", path, body, headers)

    send()


@FEW_AND_MANY
def test_messages(fuzzed: Fuzzed, stack: Stack, examples: int) -> None:
    """One WebSocket, which none of them closes."""
    fitting = {"model": "quick", "input": "hi"}
    names = ("generate", "stream_id", "type", "background", *responses_refused.IGNORED, *responses_refused.REFUSED)
    url = f"{stack.gateways[-1].url.replace('http', 'ws')}/v1/responses"
    last = {"response.completed", "response.incomplete", "response.failed", "error"}
    kinds: Counter[str] = Counter()
    # Its pings, on a thread, would draw from `random` while a body is made.
    with connect(url, additional_headers={"x-api-key": stack.key}, ping_interval=None) as connection:

        @trying(examples)
        @given(bodies(ResponsesBody, fitting, names), st.integers(0, 9))
        def send(body: bytes, way: int) -> None:
            text = body.decode("utf-8", "replace")
            connection.send(text if way == 0 else text.replace("{", '{"type":"response.create",', 1))
            while (event := json.loads(connection.recv(timeout=PATIENCE_S)))["type"] not in last:
                pass
            kinds[event["type"]] += 1
            assert event.get("status") != 500, (event, text[:600])

        send()
    assert kinds["response.completed"] > examples / 10, kinds
    assert kinds["error"] > examples / 10, kinds


def test_much_of_it_is_taken(fuzzed: Fuzzed) -> None:
    """A fuzzer that is turned away at the door sees nothing of the house."""
    print(sorted(fuzzed.statuses.items()))
    total = fuzzed.statuses.total()
    if not total:
        pytest.skip("the tests before this one were not run")
    assert fuzzed.statuses[200] > total / 10, fuzzed.statuses
    assert fuzzed.statuses[400] > total / 10, fuzzed.statuses


def test_nothing_is_left_behind(stack: Stack, fuzzed: Fuzzed) -> None:
    deadline = time.monotonic() + 5
    pools = ("quick", "vectors", "ranks", "slow")
    while any(stack.leases(pool) for pool in pools):
        assert time.monotonic() < deadline, {pool: stack.leases(pool) for pool in pools}
        time.sleep(0.05)
    gateway = stack.gateways[-1]
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    body = json.dumps({"model": "quick", "messages": [{"role": "user", "content": "x" * 900_000}]}).encode()
    for _ in range(30):
        fuzzed.send("POST", "/v1/chat/completions", body)
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    assert "Traceback" not in gateway.text()
    for worker in stack.workers:
        assert "Traceback" not in worker.text(), worker.name


def quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")
