"""What scrapers get who come one by one, and together."""

from __future__ import annotations

import asyncio
import threading
import zlib

from workers.protocol.metrics.book import Book
from workers.protocol.metrics.metric import Kind, Metric
from workers.protocol.metrics.page import GZIP, Page

LOOKS = Metric("looks", Kind.GAUGE, "how often somebody looked")


class Seen:
    """A page that counts how often it is rendered, and in how many threads at once."""

    def __init__(self) -> None:
        book = Book((LOOKS,))
        self.num_looks = self.num_rendered = self.num_now = self.most_now = 0
        self._gauge = book.gauge(LOOKS)
        self._counting = threading.Lock()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        book.read_first(self._read)
        self.page = Page(book, self._look)

    def _look(self) -> None:
        self.num_looks += 1
        self._gauge.set(self.num_looks)

    def _read(self) -> None:
        with self._counting:
            self.num_rendered += 1
            self.num_now += 1
            self.most_now = max(self.most_now, self.num_now)
        self.may_go_on.wait(10)
        with self._counting:
            self.num_now -= 1


async def test_scrapes_that_come_together_share_a_page() -> None:
    seen = Seen()
    answers = await asyncio.gather(*(seen.page.answer("") for _ in range(20)))
    assert seen.most_now == 1
    assert seen.num_rendered == seen.num_looks == len({body for body, _ in answers}) <= 2


async def test_nobody_gets_what_was_so_before_they_came() -> None:
    seen = Seen()
    seen.may_go_on.clear()
    first = asyncio.create_task(seen.page.answer(""))
    await asyncio.sleep(0)
    together = [asyncio.create_task(seen.page.answer("")) for _ in range(20)]
    await asyncio.sleep(0)
    seen.may_go_on.set()
    later = [await one for one in together]
    assert b"looks 1.0" in (await first)[0]
    assert {body.splitlines()[-1] for body, _ in later} == {b"looks 2.0"}
    assert seen.num_rendered == 2


async def test_who_takes_it_zipped_gets_it_zipped() -> None:
    seen = Seen()
    plain, told = await seen.page.answer("br")
    zipped, told_zipped = await seen.page.answer("br, gzip")
    assert zlib.decompress(zipped, GZIP) == plain.replace(b"looks 1.0", b"looks 2.0")
    assert told_zipped == told | {"content-encoding": "gzip"}
    assert told["content-type"].startswith("text/plain; version=0.0.4")
