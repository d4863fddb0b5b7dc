"""A book as it is answered to scrapers. Those that come together get one page, so that many cost what two do.

Asked on the event loop; the text is rendered in a thread, in slices between which the event loop gets on.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable

from workers.protocol.metrics.book import CONTENT_TYPE, Book

GZIP_LEVEL = 1
"""A twentieth of the bytes for a few milliseconds of a thread that leaves the others alone meanwhile."""
GZIP = 31
"""zlib's name for gzip's format."""


class Page:
    """Of one process."""

    def __init__(self, book: Book, look: Callable[[], None]) -> None:
        """`look` sets what is as it is at a scrape, on the event loop."""
        self._book = book
        self._look = look
        self._started_at = f"{time.time():.0f}"
        """Seconds; llama-server's header of that name, by which a scraper knows that the counters began anew."""
        self._rendering = asyncio.Lock()
        self._looked_at = float("-inf")
        """When what is in `_text` was so, time.monotonic()."""
        self._text = b""
        self._zipped = b""

    async def answer(self, accepted: str) -> tuple[bytes, dict[str, str]]:
        """The body and its headers, for somebody who takes these encodings (`Accept-Encoding`)."""
        headers = {"content-type": CONTENT_TYPE, "vary": "accept-encoding", "process-start-time-unix": self._started_at}
        if "gzip" in accepted:
            return await self._body(zipped=True), headers | {"content-encoding": "gzip"}
        return await self._body(zipped=False), headers

    async def _body(self, *, zipped: bool) -> bytes:
        """As it is no earlier than now."""
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
