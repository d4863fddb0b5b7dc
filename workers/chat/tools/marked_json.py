"""Reads tool calls that are JSON between marks: one object with name and arguments, or a list of them."""

from __future__ import annotations

from workers.chat.tools.reader import Reader
from workers.chat.tools.scanner import Steps
from workers.chat.tools.tags import Tags


class MarkedJsonReader(Reader):
    closers: tuple[str, ...] = ()
    """Marks of which one may follow."""

    def _call(self, mark: str) -> Steps[bool]:
        if not (yield from self._json_calls()):
            return False
        while (yield from self._sees("{")):  # MiniMax M1 writes one call per line
            self._drop()
            if not (yield from self._json_call()):
                return True
        yield from self._any_mark(Tags(self.closers))
        return True
