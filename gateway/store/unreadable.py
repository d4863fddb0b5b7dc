"""Skips data in our Redis keys that we did not write: it is counted, and named in the log once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.protocol.metrics.of_gateway import Unread

log = logging.getLogger(__name__)

MAX_TOLD = 256
"""Most entries that the log names; whatever writes such things may write many."""
MAX_SHOWN = 120


def _uncounted(kind: str) -> None:
    """Ignore entries that were skipped."""


class Unreadable:
    """Counts and logs the unreadable entries that one gateway process meets."""

    def __init__(self, count: Callable[[str], None] = _uncounted) -> None:
        """`count` is called for each skipped entry with the kind of its key."""
        self._count = count
        self._told: dict[tuple[Unread, str], None] = {}

    def skip(self, kind: Unread, name: object, why: object) -> None:
        """Record that an entry of that kind was left out. `name`: of the key or of the entry in it."""
        self._count(kind.value)
        shown = _shown(name)
        if (kind, shown) in self._told or len(self._told) >= MAX_TOLD:
            return
        self._told[kind, shown] = None
        log.error(
            "what stands in Redis under %s, %s, can't be read and is left out: %s; see what else writes there",
            kind.value,
            shown,
            _shown(why),
        )


def _shown(what: object) -> str:
    """Return a text that is short, on one line, and readable whatever bytes it is made of."""
    text = what.decode("utf-8", "backslashreplace") if isinstance(what, bytes) else str(what)
    text = "".join([char if char.isprintable() else ascii(char)[1:-1] for char in text[: MAX_SHOWN + 1]])
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
