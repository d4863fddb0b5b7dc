"""The parameters of one request that have no effect, for its answer's header and for the metrics."""

from __future__ import annotations

import re

MAX_NAMES = 16
"""Most names in a header; `...` stands for more."""
MAX_NAME_CHARS = 48
UNKNOWN = "unknown"
"""Label of every name that is in no table: a caller's text must not become a label."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that a header does not repeat: a caller's text must not become a header of its own."""


class Ignored:
    """The ignored parameters of one request."""

    __slots__ = ("_known", "_names", "_num_more", "_unknown", "refuses")

    def __init__(self, *, refuses: bool = False) -> None:
        """`refuses`: unknown parameters are errors, and so are those without effect that ask for something."""
        self.refuses = refuses
        self._names: dict[str, None] = {}
        self._known: set[str] = set()
        self._unknown = False
        self._num_more = 0

    def another(self) -> Ignored:
        """Return an empty one for another request, with the same `refuses`."""
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
        """The names in the order in which they came, made safe; empty: there are none."""
        more = ["..."] if self._num_more else []
        return ", ".join([*self._names, *more])

    @property
    def labels(self) -> list[str]:
        """The names for metrics, each once; UNKNOWN stands for all unknown ones."""
        return [*sorted(self._known), *([UNKNOWN] if self._unknown else [])]

    def _tell(self, name: str) -> None:
        safe = _UNSAFE.sub("?", name[:MAX_NAME_CHARS]) or "?"
        if safe in self._names:
            return
        if len(self._names) < MAX_NAMES:
            self._names[safe] = None
        else:
            self._num_more += 1
