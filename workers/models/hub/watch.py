"""Follows the process that downloads a model, and ends it when it is not wanted any more."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

Report = Callable[[str, int, int], None]
"""Called with a file's address, and the bytes of it that are there and that there will be."""


class Progress(msgspec.Struct, frozen=True):
    """A line on the standard output of `workers.models.hub --progress`."""

    url: str
    done: int
    total: int


encode_line = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(Progress).decode


class DownloadWatch:
    """The watch of one download. `cancel` may be called by any thread, also before the process is there."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.is_cancelled = False
        self.complaint = ""
        """The last line on the process's standard error."""

    def cancel(self) -> None:
        """End the download. What has come is kept."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                _kill(self._process)

    def follow(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        """Return the last line on a process's standard output once it has ended, and report the others' progress.
        Raises subprocess.TimeoutExpired after killing it."""
        with self._lock:
            self._process = process
            if self.is_cancelled:
                _kill(process)
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer, listening = threading.Timer(timeout_s, end), threading.Thread(target=self._listen, args=(process,))
        timer.start()
        listening.start()
        last = ""
        try:
            for line in process.stdout or ():
                last = line
                with suppress(msgspec.DecodeError):
                    told = _decode_line(line)
                    self._report(told.url, told.done, told.total)
            process.wait()
        finally:
            timer.cancel()
            listening.join()
            with self._lock:
                self._process = None
        if late.is_set():
            raise subprocess.TimeoutExpired(process.args, timeout_s)
        return last

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self.complaint = line.strip().removeprefix("paddock: ") or self.complaint


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that leads a session, with all of that."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
