"""Shows a page that is drawn again and again, on the whole terminal, until the person presses q or Ctrl-C."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switches to the terminal's second screen without a cursor, and back."""
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
FOOT = "q leaves, space pauses"
PAUSED = "paused; space goes on"

Page = Callable[[int, int], str]
"""Returns the page for a terminal of so many columns and lines."""


def show(page: Page, every_s: float) -> None:
    """Draw the page every so many seconds until the person leaves. Raises what `page` raises."""
    is_paused = False
    with _whole_screen(), suppress(KeyboardInterrupt):
        while True:
            if not is_paused:
                width, height = shutil.get_terminal_size()
                _draw(page(width, height), FOOT, height)
            key = _key_within(every_s)
            if key in ("q", "Q"):
                return
            if key == " ":
                is_paused = not is_paused
                if is_paused:
                    _foot(PAUSED, shutil.get_terminal_size().lines)


def _draw(text: str, foot: str, height: int) -> None:
    lines = text.split("\n")[: max(1, height - 2)]
    sys.stdout.write(HOME + "".join(f"{line}{REST_OF_LINE}\n" for line in lines) + REST_OF_SCREEN)
    _foot(foot, height)


def _foot(text: str, height: int) -> None:
    sys.stdout.write(f"\x1b[{height};1H{text}{REST_OF_LINE}")
    sys.stdout.flush()


def _key_within(seconds: float) -> str:
    """Return the key that is pressed within so many seconds; empty: none."""
    ends = time.monotonic() + seconds
    ready, _, _ = select.select([sys.stdin], [], [], max(0.0, ends - time.monotonic()))
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


@contextmanager
def _whole_screen() -> Iterator[None]:
    """Use the terminal's second screen while the block lasts, and get keys as they are pressed."""
    if not sys.stdin.isatty():
        raise OSError(0, "top: standard input is no terminal")
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
