"""A model that grows under a line of calls and shrinks when they have ended, by programs as people start them."""

from __future__ import annotations

import threading

import httpx2

from tests.integration.supervisor.conftest import Catalog, Program, Programs, wait_until
from tests.integration.supervisor.test_up import port_of
from tests.support.scrape import Scrape

NUM_CALLERS = 8
TTL_S = 4.0


class Gateway:
    def __init__(self, up: Program) -> None:
        headers = {"Authorization": f"Bearer {(up.state / 'first-key').read_text().strip()}"}
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{port_of(up)}", headers=headers, timeout=400)

    def shown(self, name: str) -> float:
        """Return a metric of the model; -1 where it is not shown."""
        try:
            return Scrape(self.http.get("/metrics").raise_for_status().text).value(f"paddock_{name}", model="tale")
        except LookupError:
            return -1.0

    def complete(self, num_tokens: int) -> int:
        body = {"model": "tale", "prompt": "Once upon", "max_tokens": num_tokens, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body).raise_for_status().json()
        return int(answer["usage"]["completion_tokens"])


class Crowd:
    """Callers that call again and again, until they are told to end."""

    def __init__(self, gateway: Gateway, num_tokens: int) -> None:
        self._gateway, self._num_tokens = gateway, num_tokens
        self.failures: list[str] = []
        self.num_answers = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(NUM_CALLERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._over.is_set():
            try:
                assert self._gateway.complete(self._num_tokens) == self._num_tokens
                self.num_answers += 1
            except (httpx2.HTTPError, AssertionError) as error:
                self.failures.append(repr(error))
                return


def test_it_grows_while_calls_wait_long_and_shrinks_by_its_ttl(programs: Programs, catalog: Catalog) -> None:
    residency = {"min": 1, "max": 2, "ttl_s": TTL_S}
    catalog.write(catalog.entry("tale", ctx=2048, llama={"n_threads": 1}, residency=residency))
    up = programs.start("up", "--port", "0", "--catalog", str(catalog.file), PADDOCK_CACHE_RAM_MIB="8")
    up.until("Ctrl-C stops everything")
    gateway = Gateway(up)
    assert gateway.complete(4) == 4
    wait_until(lambda: (gateway.shown("workers"), gateway.shown("workers_wanted")) == (1, 1), up.text)
    crowd = Crowd(gateway, num_tokens=1000)
    try:
        wait_until(lambda: gateway.shown("workers_wanted") == 2, up.text)
        assert gateway.shown("predicted_wait_seconds") > 0
        wait_until(lambda: gateway.shown("workers") == 2, up.text)
    finally:
        crowd.end()
    assert not crowd.failures
    wait_until(lambda: (gateway.shown("workers"), gateway.shown("workers_wanted")) == (1, 1), up.text)
    assert "calls of tale wait" in up.text()
    assert "has had no call for" in up.text()
    assert gateway.complete(4) == 4
    gateway.http.close()
