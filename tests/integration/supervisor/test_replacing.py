"""Workers that are replaced while calls run, by programs as people start them: no call is refused, no stream broken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import psutil

from tests.integration.supervisor.conftest import Catalog, Program, Programs, wait_until
from tests.integration.supervisor.test_up import port_of

NUM_EDITS = 5
STREAM_TOKENS = 300
SIZES = {"ctx": 512, "kv_tokens": 2048, "llama": {"n_threads": 1}}


@dataclass(slots=True)
class Callers:
    """A caller of short calls and one of streams, each of which calls again as soon as it has its answer."""

    url: str
    key: str
    failures: list[str] = field(default_factory=list)
    num_calls: int = 0
    num_streams: int = 0
    longest_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def calling(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._loop, args=(each,)) for each in (self._call, self._stream)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(90)
                assert not thread.is_alive()

    def is_answered(self) -> bool:
        """Return whether a first call, which may have to load the model, is answered."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx2.post(f"{self.url}/v1/completions", json=asked(1), headers=headers, timeout=400).status_code == 200

    def _loop(self, once: Callable[[httpx2.Client], None]) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx2.Client(base_url=self.url, headers=headers, timeout=400) as client:
            while not self._over.is_set():
                try:
                    once(client)
                except httpx2.HTTPError as error:
                    self.failures.append(repr(error))

    def _call(self, client: httpx2.Client) -> None:
        began = time.monotonic()
        answer = client.post("/v1/completions", json=asked(4))
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        if answer.status_code != 200:
            self.failures.append(answer.text)
        self.num_calls += 1
        time.sleep(0.05)

    def _stream(self, client: httpx2.Client) -> None:
        body = {**asked(STREAM_TOKENS), "stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        usage = json.loads(lines[-2].removeprefix("data: ")).get("usage") or {} if len(lines) > 2 else {}
        if lines[-1:] != ["data: [DONE]"] or usage.get("completion_tokens") != STREAM_TOKENS:
            self.failures.append(f"{answer.status_code}: {lines[-2:]}")
        self.num_streams += 1


def asked(num_tokens: int) -> dict[str, Any]:
    return {"model": "tale", "prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}


def edits(residency: Mapping[str, Any], catalog: Catalog) -> Iterator[int]:
    """Write the catalog with other settings each time; yield the number of slots that it has now."""
    for number in range(NUM_EDITS + 1):
        slots = 2 + number % 2
        catalog.write(catalog.entry("tale", **SIZES, slots=slots, residency=residency))
        yield slots


def start(programs: Programs, catalog: Catalog, **environment: str) -> tuple[Program, Callers]:
    up = programs.start("up", "--port", "0", "--catalog", str(catalog.file), **environment)
    up.until("Ctrl-C stops everything")
    return up, Callers(f"http://127.0.0.1:{port_of(up)}", (up.state / "first-key").read_text().strip())


def slots_of(callers: Callers) -> int:
    """Return the slots of the model's workers together."""
    headers = {"Authorization": f"Bearer {callers.key}"}
    answer = httpx2.get(f"{callers.url}/slots", params={"model": "tale"}, headers=headers, timeout=30)
    return len(answer.json()) if answer.status_code == 200 else 0


def replaced(programs: Programs, catalog: Catalog, residency: Mapping[str, Any], **environment: str) -> str:
    """Edit the catalog's file again and again while calls run; return what the program said."""
    editing = edits(residency, catalog)
    next(editing)
    up, callers = start(programs, catalog, **environment)
    assert callers.is_answered(), up.text()
    with callers.calling():
        for slots in editing:
            wait_until(lambda slots=slots: slots_of(callers) == slots, up.text)  # type: ignore[misc]
    assert not callers.failures, (callers.failures, up.text())
    assert callers.num_calls > NUM_EDITS
    assert callers.num_streams > 2
    told = f"{callers.num_calls} calls, the longest {callers.longest_s:.1f} s, and {callers.num_streams} streams"
    print(f"\n{told} during {NUM_EDITS} replacements, none refused or cut")
    return up.text()


def test_a_successor_comes_first_where_memory_allows(programs: Programs, catalog: Catalog) -> None:
    said = replaced(programs, catalog, {"min": 1}, PADDOCK_CACHE_RAM_MIB="8")
    assert said.count("gets no more calls: a worker with the new settings of tale takes its place") == NUM_EDITS, said
    assert said.count("takes its place") == 2 * NUM_EDITS, said
    assert "no memory for another" not in said


def test_calls_wait_for_the_successor_where_memory_does_not_allow(programs: Programs, catalog: Catalog) -> None:
    """Each worker may take more than half of the memory that is free."""
    half_mib = int(psutil.virtual_memory().available * 0.6) >> 20
    said = replaced(programs, catalog, {"min_resident_s": 0}, PADDOCK_CACHE_RAM_MIB=str(half_mib))
    assert said.count("no memory for another worker beside it") >= NUM_EDITS, said
    assert "takes its place" not in said
