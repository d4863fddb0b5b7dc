"""Answers scrapes with a registry's metrics, as text or OpenMetrics, gzipped or not, as the scraper accepts.

Simultaneous scrapes share a page, so that many cost no more than two. Scrapes are answered on the event loop; the page
is written in a thread, in slices, between which the event loop can run.
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
"""Characters after which a slice of the page ends. Other threads wait while one is written, some tenths of a ms."""
REST_S = 0.0001
"""Seconds to pause between slices, so that a waiting thread can wake up; a pause of 0 would be too short for that."""

GZIP_LEVEL = 1
"""zlib's level. Compressing a page to a twentieth takes a few milliseconds, in which the interpreter's lock is free."""
GZIP = 31
"""zlib's `wbits` for gzip's format."""


@dataclass(frozen=True, slots=True)
class Format:
    """One of Prometheus' formats."""

    content_type: str
    write: Callable[[Collector], bytes]
    """Function of `prometheus_client` that writes the metrics of a collector in this format."""
    total: str
    """Suffix that a counter's name has in its lines `# TYPE` and `# HELP`."""
    quote: str
    """How a quotation mark is written in a help text."""
    end: str
    """The last line of a page."""


TEXT = Format(CONTENT_TYPE_PLAIN_0_0_4, generate_latest, "_total", '"', "")
# With any other escaping, the library writes `vllm:x` as `vllm_x` in this format.
_openmetrics_text = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
OPENMETRICS = Format(openmetrics.CONTENT_TYPE_LATEST, _openmetrics_text, "", r"\"", "# EOF\n")


class Page:
    """The metrics page of one process, in each format."""

    def __init__(self, registry: CollectorRegistry, update: Callable[[], None]) -> None:
        """`update` is called on the event loop at a scrape, to set the metrics that must be read there."""
        self._registry = registry
        self._update = update
        self._started_at = f"{time.time():.0f}"
        """Unix time, seconds, for llama-server's header that tells scrapers when the counters began at 0."""
        self._writing = asyncio.Lock()
        self._read_at = float("-inf")
        """time.monotonic() just before the metrics in the pages of `_bodies` were read."""
        self._bodies: dict[tuple[Format, bool], bytes] = {}
        """(Format, whether gzipped) -> body."""

    async def answer(self, accept: str, accept_encoding: str) -> tuple[bytes, dict[str, str]]:
        """Return a page's body and headers. `accept`, `accept_encoding`: those headers of the scraper's request."""
        form = _form_for(accept)
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
        """Return a body whose metrics were read after this call began."""
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


def _form_for(accept: str) -> Format:
    """Return the format that a scraper accepts; the plain text format where it names a version that is none."""
    try:
        _, chosen = choose_encoder(accept)
    except (TypeError, ValueError):  # the library compares `version=x` with numbers
        return TEXT
    return OPENMETRICS if chosen.startswith("application/openmetrics-text") else TEXT


def written_aside(registry: CollectorRegistry, form: Format) -> bytes:
    """Return the page. For a background thread: it pauses after each slice, so that the event loop can run."""
    done = []
    for piece in slices(registry, form):
        done.append(piece)
        time.sleep(REST_S)
    return b"".join(done)


def slices(registry: CollectorRegistry, form: Format = TEXT) -> Iterator[bytes]:
    """Yield the page in slices; making one holds the interpreter's lock for less than a millisecond."""
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
    if not isinstance(family, Family):  # another collector's, which only the library can write
        yield form.write(_Only(family)).decode().removesuffix(form.end)
        return
    name = family.name + (form.total if family.type == "counter" else "")
    about = family.documentation.replace("\\", r"\\").replace("\n", r"\n").replace('"', form.quote)
    yield f"# HELP {name} {about}\n# TYPE {name} {family.type}\n"
    yield from family.lines()


@dataclass(frozen=True, slots=True)
class _Only:
    """A collector of a single metric, because `Format.write` takes collectors only."""

    family: Metric

    def collect(self) -> tuple[Metric]:
        return (self.family,)
