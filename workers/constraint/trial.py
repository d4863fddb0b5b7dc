"""Trials of callers' grammars in processes of their own: llama.cpp's grammar code may throw, abort or never return,
llguidance may take minutes over an intersection of patterns, and in the worker's process that would end every call.
"""

from __future__ import annotations

import json

from workers.constraint import forks
from workers.constraint.failures import Unusable, killed, unavailable
from workers.constraint.forks import Forks, Kind
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.stoppable import NotStarted, ProcessEnded, TookTooLong

TRIAL_S = 10.0
"""Seconds to wait for a trial's result, on a machine with other work: the process's own bound is on processor time."""


class Trial:
    """Tries grammars, each in a process of its own. May be used from several threads."""

    def __init__(self, processes: Forks, *, trial_s: float = TRIAL_S) -> None:
        self._processes = processes
        self._trial_s = trial_s

    def check(self, kind: Kind, text: str) -> None:
        """Try a grammar and block until that is done: GBNF by walks through it, Lark by compiling it.

        Raises Unusable with the reason; CallFailed where it can't be tried now.
        """
        reason = self._reason(kind, text)
        if reason:
            raise Unusable(reason)

    def _reason(self, kind: Kind, text: str) -> str:
        """Return why the grammar is refused; empty if it is not. Raises CallFailed."""
        try:
            self._processes.start()
            process = self._processes.fork()
        except NotStarted as error:
            raise unavailable(f"the process for it did not start ({error})") from None
        if process is None:
            raise unavailable("the process for it has just ended")
        try:
            process.ask(forks.TRY, json.dumps([kind, text]).encode())
            answer = process.take(self._trial_s)
        except TookTooLong:
            answer = None
        except NotStarted as error:
            raise unavailable(f"the process for it did not start ({error})") from None
        except ProcessEnded as ended:
            if ended.killed:
                raise killed() from None
            return f"trying it crashed or took too long ({ended}); make it simpler"
        finally:
            process.close()
        if answer is None:
            message = f"this worker had no time to try the grammar within {self._trial_s:g} s; ask again"
            raise CallFailed(Failure(FailureCode.BUSY, message))
        told, reason = answer
        return "" if told == forks.OK else reason.decode("utf-8", "replace")
