"""What scrapers get who come one by one, and together."""

from __future__ import annotations

import asyncio
import threading
import zlib

import pytest
from prometheus_client import CollectorRegistry, Metric

from workers.metrics.page import GZIP, Page
from workers.metrics.types import Gauge


class Seen:
    """A page that counts how often it is written, and in how many threads at once."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.num_looks = self.num_written = self.num_now = self.most_now = 0
        self._counting = threading.Lock()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        registry.register(self)
        self._gauge = Gauge("looks", "how often somebody looked", registry=registry)
        self.page = Page(registry, self._update)

    def _update(self) -> None:
        self.num_looks += 1
        self._gauge.set(self.num_looks)

    def collect(self) -> tuple[Metric, ...]:
        with self._counting:
            self.num_written += 1
            self.num_now += 1
            self.most_now = max(self.most_now, self.num_now)
        self.may_go_on.wait(10)
        with self._counting:
            self.num_now -= 1
        return ()


async def test_scrapes_that_come_together_share_a_page() -> None:
    seen = Seen()
    answers = await asyncio.gather(*(seen.page.answer("", "") for _ in range(20)))
    assert seen.most_now == 1
    assert seen.num_written == seen.num_looks == len({body for body, _ in answers}) <= 2


async def test_nobody_gets_what_was_so_before_they_came() -> None:
    seen = Seen()
    seen.may_go_on.clear()
    first = asyncio.create_task(seen.page.answer("", ""))
    await asyncio.sleep(0)
    together = [asyncio.create_task(seen.page.answer("", "")) for _ in range(20)]
    await asyncio.sleep(0)
    seen.may_go_on.set()
    later = [await one for one in together]
    assert b"looks 1.0" in (await first)[0]
    assert {body.splitlines()[-1] for body, _ in later} == {b"looks 2.0"}
    assert seen.num_written == 2


async def test_whoever_takes_it_zipped_gets_it_zipped() -> None:
    seen = Seen()
    plain, told = await seen.page.answer("", "br")
    zipped, told_zipped = await seen.page.answer("", "br, gzip")
    assert zlib.decompress(zipped, GZIP) == plain.replace(b"looks 1.0", b"looks 2.0")
    assert told_zipped == told | {"content-encoding": "gzip"}


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (PROMETHEUS, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        ("text/plain;version=x", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=x", "text/plain; version=0.0.4; charset=utf-8"),
        (f"text/plain;version={'9' * 5000}", "text/plain; version=0.0.4; charset=utf-8"),
    ],
)
async def test_the_format_is_what_the_scraper_accepts(accept: str, content_type: str) -> None:
    body, told = await Seen().page.answer(accept, "")
    assert told["content-type"] == content_type
    assert body.endswith(b"# EOF\n") == content_type.startswith("application/openmetrics-text")
