"""Trying what a caller sent in a process of its own: llama.cpp's grammar code may throw or abort or never return,
llguidance may take minutes over an intersection of patterns, and in the worker's process that would end every call.

The process is started when it is first needed, lives on, is killed when it takes too long and started anew after its
end. It holds the model's vocabulary only.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Literal

from workers.constraint.failures import Unusable
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.stoppable import NotStarted, ProcessEnded, StoppableProcess, TookTooLong

Kind = Literal["gbnf", "lark"]

START_S = 60.0
TRIAL_S = 3.0
"""From the question to the answer."""

MAX_CALLERS = 3
"""The one whose grammar is tried, and those that wait for it."""


class Trial:
    """May be used from several threads; one grammar at a time."""

    def __init__(self, model: Path, *, trial_s: float = TRIAL_S, start_s: float = START_S) -> None:
        """`model`: the GGUF file whose vocabulary the grammars are for."""
        self._trial_s = trial_s
        self._room = threading.Semaphore(MAX_CALLERS)
        self._process = StoppableProcess("workers.llama.grammar_trial", str(model), start_s=start_s)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def check(self, kind: Kind, text: str) -> None:
        """Blocks until the grammar has been tried: GBNF by walks through it, Lark by compiling it.

        Raises Unusable with the reason; CallFailed (BUSY) while others wait for theirs, or where it can't be tried.
        """
        if not self._room.acquire(blocking=False):
            raise CallFailed(Failure(FailureCode.BUSY, "other grammars are being tried on this worker; ask again"))
        try:
            reason = self._asked(kind, text)
        finally:
            self._room.release()
        if reason:
            raise Unusable(reason)

    def close(self) -> None:
        """Ends the process; a later `check` starts another."""
        self._process.close()

    def _asked(self, kind: Kind, text: str) -> str:
        """Why the grammar is refused; empty if it is not. Raises CallFailed."""
        try:
            return str(json.loads(self._process.ask(json.dumps([kind, text]).encode(), self._trial_s)))
        except TookTooLong:
            return f"trying it took longer than {self._trial_s:g} s; make it simpler"
        except ProcessEnded as ended:
            return f"trying it crashed ({ended}); make it simpler"
        except NotStarted:
            message = "grammars can't be tried on this worker: the process for it did not start"
            raise CallFailed(Failure(FailureCode.INTERNAL, message)) from None
