"""Parameters of one request that nothing is done with: what its answer's header and the metrics tell of them."""

from __future__ import annotations

import re

MAX_NAMES = 16
"""Names that a header tells; of more it says that there are."""
MAX_NAME_CHARS = 48
UNKNOWN = "unknown"
"""Label of every name that stands in no table: a caller's text must not become a label."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""What a header does not repeat: a caller's text must not become a header of its own."""


class Ignored:
    """One request's."""

    __slots__ = ("_known", "_names", "_num_more", "_unknown", "refuses")

    def __init__(self, *, refuses: bool = False) -> None:
        """`refuses`: unknown parameters are errors, and those of no effect that ask for something."""
        self.refuses = refuses
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        self._unknown = False
        self._num_more = 0

    def another(self) -> Ignored:
        """Return that of another request by the same rule."""
        return Ignored(refuses=self.refuses)

    def note(self, name: str) -> None:
        """Note a parameter that a table or a model names."""
        self._known.add(name)
        self._tell(name)

    def note_unknown(self, name: str) -> None:
        """Note a parameter that nothing names."""
        self._unknown = True
        self._tell(name)

    @property
    def header(self) -> str:
        """Return the names in the order in which they came, made safe; empty: there are none."""
        more = ["..."] if self._num_more else []
        return ", ".join([*self._names, *more])

    @property
    def labels(self) -> list[str]:
        """Return the names for metrics, each once; all that are unknown are one."""
        return [*sorted(self._known), *([UNKNOWN] if self._unknown else [])]

    def _tell(self, name: str) -> None:
        safe = _UNSAFE.sub("?", name[:MAX_NAME_CHARS]) or "?"
        if safe in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[safe] = None
        else:
            self._num_more += 1
