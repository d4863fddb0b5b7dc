"""Puts the mark of a thought, with which the prompt ended, before the answer, for callers who read marks."""

from __future__ import annotations

from workers.chat.tools import ContentPiece, Parser, Piece


class Prefaced:
    """A parser that puts a text before the output of another one. `inner` None: the text needs no parsing."""

    def __init__(self, preface: str, inner: Parser | None) -> None:
        self._preface = preface
        self._inner = inner
        self.num_calls = 0
        self.is_over = False

    def feed(self, text: str) -> list[Piece]:
        return self._told([ContentPiece(text)] if self._inner is None else self._inner.feed(text))

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        return self._told([] if self._inner is None else self._inner.finish(cut_off=cut_off))

    def _told(self, pieces: list[Piece]) -> list[Piece]:
        if self._inner is not None:
            self.num_calls, self.is_over = self._inner.num_calls, self._inner.is_over
        if pieces and self._preface:
            pieces, self._preface = [ContentPiece(self._preface), *pieces], ""
        return pieces
