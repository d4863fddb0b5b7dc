"""Tells how far a download is where there is no terminal for a progress bar: a line now and then."""

from __future__ import annotations

from collections.abc import Callable

LINE_EVERY_S = 10.0
KIB, MIB, GIB = 2**10, 2**20, 2**30


def size_text(num_bytes: float) -> str:
    """Return a number of bytes in the unit that people use for it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes:.0f} bytes"


class PlainProgress:
    """The progress of one file, as lines of text."""

    def __init__(
        self, name: str, begun: int, total: int, write: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Tell that the download begins. `begun`: bytes that were there before; `clock`: seconds that never go back."""
        self._name, self._begun, self._total = name, begun, total
        self._write, self._clock = write, clock
        self._started = self._told = clock()
        before = f", {size_text(begun)} of which are there" if begun else ""
        write(f"{name}: fetching {size_text(total)}{before}")

    def update(self, num_bytes: int) -> None:
        """Tell how many bytes are there, unless that was told a moment ago."""
        now = self._clock()
        if now - self._told < LINE_EVERY_S or num_bytes >= self._total:
            return
        self._told = now
        rate = (num_bytes - self._begun) / (now - self._started)
        left = f", {(self._total - num_bytes) / rate:,.0f} s left" if rate > 0 else ""
        self._write(f"{self._name}: {100 * num_bytes // self._total} %, {size_text(rate)}/s{left}")

    def finish(self) -> None:
        """Tell that the file is there."""
        seconds = self._clock() - self._started
        self._write(f"{self._name}: fetched in {seconds:,.0f} s")


def no_progress(num_bytes: int) -> None:
    """Tell nothing: a terminal has a progress bar."""
