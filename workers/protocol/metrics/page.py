"""Answers scrapes with the metrics' text. Scrapers that come together get one page, so that many cost what two do.

It is called on the event loop; the text is rendered in a thread, in slices between which the event loop gets on.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable

from workers.protocol.metrics.book import CONTENT_TYPE, Book

GZIP_LEVEL = 1
"""zlib's level: a twentieth of the bytes, for a few milliseconds of a thread that leaves the others alone."""
GZIP = 31
"""zlib's `wbits` for gzip's format."""


class Page:
    """The page of one process."""

    def __init__(self, book: Book, look: Callable[[], None]) -> None:
        """`look` sets the metrics that are read on the event loop at a scrape."""
        self._book = book
        self._look = look
        self._started_at = f"{time.time():.0f}"
        """Unix time, seconds, for llama-server's header, by which a scraper knows that the counters began anew."""
        self._rendering = asyncio.Lock()
        self._looked_at = float("-inf")
        """time.monotonic() at which `_text` was read."""
        self._text = b""
        self._zipped = b""

    async def answer(self, accepted: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and its headers. `accepted`: the client's `Accept-Encoding`."""
        headers = {"content-type": CONTENT_TYPE, "vary": "accept-encoding", "process-start-time-unix": self._started_at}
        if "gzip" in accepted:
            return await self._body(zipped=True), headers | {"content-encoding": "gzip"}
        return await self._body(zipped=False), headers

    async def _body(self, *, zipped: bool) -> bytes:
        """Return the body, read no earlier than this call."""
        came_at = time.monotonic()
        async with self._rendering:
            if self._looked_at < came_at:
                looked_at = time.monotonic()
                self._look()
                self._text = await asyncio.to_thread(self._book.render_aside)
                self._looked_at, self._zipped = looked_at, b""
            if zipped and not self._zipped:
                self._zipped = await asyncio.to_thread(zlib.compress, self._text, GZIP_LEVEL, GZIP)
            return self._zipped if zipped else self._text
