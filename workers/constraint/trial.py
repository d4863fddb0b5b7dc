"""Trying what a caller sent in a process of its own: llama.cpp's grammar code may throw or abort or never return,
llguidance may take minutes over an intersection of patterns, and in the worker's process that would end every call.
"""

from __future__ import annotations

import json
import threading
from typing import Literal

from workers.constraint import forks
from workers.constraint.failures import Unusable
from workers.constraint.forks import Forks
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.stoppable import NotStarted, ProcessEnded, TookTooLong

Kind = Literal["gbnf", "lark"]

TRIAL_S = 4.0
"""From the question to the answer; the process's own bound on its processor time is a little shorter."""

MAX_CALLERS = 3
"""The one whose grammar is tried, and those that wait for it."""


class Trial:
    """May be used from several threads; one grammar at a time."""

    def __init__(self, processes: Forks, *, trial_s: float = TRIAL_S) -> None:
        self._processes = processes
        self._trial_s = trial_s
        self._room = threading.Semaphore(MAX_CALLERS)
        self._turn = threading.Lock()

    def check(self, kind: Kind, text: str) -> None:
        """Blocks until the grammar has been tried: GBNF by walks through it, Lark by compiling it.

        Raises Unusable with the reason; CallFailed (BUSY) while others wait for theirs, or where it can't be tried.
        """
        if not self._room.acquire(blocking=False):
            raise CallFailed(Failure(FailureCode.BUSY, "other grammars are being tried on this worker; ask again"))
        try:
            with self._turn:
                reason = self._reason(kind, text)
        finally:
            self._room.release()
        if reason:
            raise Unusable(reason)

    def _reason(self, kind: Kind, text: str) -> str:
        """Return why the grammar is refused; empty if it is not. Raises CallFailed."""
        try:
            self._processes.start()
            process = self._processes.fork()
        except NotStarted:
            message = "grammars can't be tried on this worker: the process for it did not start"
            raise CallFailed(Failure(FailureCode.INTERNAL, message)) from None
        try:
            process.ask(forks.TRY, json.dumps([kind, text]).encode())
            answer = process.take(self._trial_s)
        except TookTooLong:
            answer = None
        except ProcessEnded:
            return "trying it crashed or took too long; make it simpler"
        finally:
            process.close()
        if answer is None:
            return f"trying it took longer than {self._trial_s:g} s; make it simpler"
        told, reason = answer
        return "" if told == forks.OK else reason.decode("utf-8", "replace")
