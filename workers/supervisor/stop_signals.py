"""Turns SIGINT, SIGTERM and a closed terminal into calls: the first one asks to stop, the second not to wait."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType

ALWAYS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles the signals within `with`, on a running loop of the main thread, which calls each function once."""

    def __init__(self, on_stop: Callable[[], None], on_hurry: Callable[[], None]) -> None:
        self._actions = [on_hurry, on_stop]
        # Under nohup a closed terminal is to be ignored.
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        self._numbers = (*ALWAYS, *hangup)

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)

    def _received(self) -> None:
        if self._actions:
            self._actions.pop()()
