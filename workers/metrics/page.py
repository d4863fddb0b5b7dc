"""Answers scrapes with a registry's metrics, as text or OpenMetrics, zipped or not, as the scraper accepts.

Scrapers that come together get one page, so that many cost what two do. It is called on the event loop; the page is
written in a thread, in slices between which the event loop gets on.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from workers.metrics.types import Family

SLICE_CHARS = 32 << 10
"""Text written in one go: some tenths of a millisecond in which no other thread gets on."""
REST_S = 0.0001
"""Seconds of pause, in which a waiting thread can wake up; a pause of 0 would be over before it does."""

GZIP_LEVEL = 1
"""zlib's level: a twentieth of the bytes, for a few milliseconds of a thread that leaves the others alone."""
GZIP = 31
"""zlib's `wbits` for gzip's format."""


@dataclass(frozen=True, slots=True)
class Format:
    """One of Prometheus' formats, of which a page is kept each."""

    content_type: str
    write: Callable[[Collector], bytes]
    """The library's own writer."""
    total: str
    """What the name of a counter ends in where its type and help are told."""
    quote: str
    """A quotation mark in a help text."""
    end: str
    """The last line."""


TEXT = Format(CONTENT_TYPE_PLAIN_0_0_4, generate_latest, "_total", '"', "")
# By any other way of escaping, the library writes `vllm:x` as `vllm_x` here.
_openmetrics_text = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
OPENMETRICS = Format(openmetrics.CONTENT_TYPE_LATEST, _openmetrics_text, "", r"\"", "# EOF\n")


class Page:
    """The page of one process."""

    def __init__(self, registry: CollectorRegistry, update: Callable[[], None]) -> None:
        """`update` sets the metrics that are read on the event loop at a scrape."""
        self._registry = registry
        self._update = update
        self._started_at = f"{time.time():.0f}"
        """Unix time, seconds, for llama-server's header, by which a scraper knows that the counters began anew."""
        self._writing = asyncio.Lock()
        self._read_at = float("-inf")
        """time.monotonic() before the metrics were read that `_bodies` show."""
        self._bodies: dict[tuple[Format, bool], bytes] = {}
        """Format, whether zipped -> body."""

    async def answer(self, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and its headers, by these two headers of the scraper."""
        _, chosen = choose_encoder(accept)
        form = OPENMETRICS if chosen.startswith("application/openmetrics-text") else TEXT
        is_zipped = gzip_accepted(accept_encoding)
        headers = {
            "content-type": form.content_type,
            "vary": "accept, accept-encoding",
            "process-start-time-unix": self._started_at,
        }
        if is_zipped:
            headers["content-encoding"] = "gzip"
        return await self._body(form, is_zipped), headers

    async def _body(self, form: Format, is_zipped: bool) -> bytes:
        """Return the body, read no earlier than this call."""
        came_at = time.monotonic()
        async with self._writing:
            if self._read_at < came_at:
                self._read_at, self._bodies = time.monotonic(), {}
                self._update()
            bodies = self._bodies
            if (form, False) not in bodies:
                bodies[form, False] = await asyncio.to_thread(written_aside, self._registry, form)
            if is_zipped and (form, True) not in bodies:
                bodies[form, True] = await asyncio.to_thread(zlib.compress, bodies[form, False], GZIP_LEVEL, GZIP)
            return bodies[form, is_zipped]


def written_aside(registry: CollectorRegistry, form: Format) -> bytes:
    """Return the page, written in a background thread: the busy thread waits for a slice at most."""
    done = []
    for piece in slices(registry, form):
        done.append(piece)
        time.sleep(REST_S)
    return b"".join(done)


def slices(registry: CollectorRegistry, form: Format = TEXT) -> Iterator[bytes]:
    """Yield the page in pieces: making one holds the interpreter for less than a millisecond."""
    text, size = list[str](), 0
    for family in registry.collect():
        for lines in _lines(family, form):
            text.append(lines)
            size += len(lines)
            if size > SLICE_CHARS:
                yield "".join(text).encode()
                text, size = [], 0
    yield "".join([*text, form.end]).encode()


def _lines(family: Metric, form: Format) -> Iterator[str]:
    if not isinstance(family, Family):  # another collector's: it may hold whatever the library can write
        yield form.write(_Only(family)).decode().removesuffix(form.end)
        return
    name = family.name + (form.total if family.type == "counter" else "")
    about = family.documentation.replace("\\", r"\\").replace("\n", r"\n").replace('"', form.quote)
    yield f"# HELP {name} {about}\n# TYPE {name} {family.type}\n"
    yield from family.lines()


@dataclass(frozen=True, slots=True)
class _Only:
    """A collector of one family."""

    family: Metric

    def collect(self) -> tuple[Metric]:
        return (self.family,)
