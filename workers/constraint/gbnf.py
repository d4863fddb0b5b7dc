"""Checks callers' grammars before they are used: GBNF by cheap bounds first, then GBNF and costly Lark by a trial in a
process of its own.

llama.cpp's grammar code may throw, abort or never return, and llguidance may take minutes over an intersection of
patterns: in the worker's process that would end every call. Source of GBNF: grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import json
import re

from workers.constraint import forks
from workers.constraint.forks import Forks, Kind
from workers.constraint.mask import Unusable, killed, unavailable
from workers.process.helper_process import NotStarted, ProcessEnded, TookTooLong
from workers.protocol.events import CallFailed, Failure, FailureCode

MAX_BYTES = 64 << 10
MAX_NESTING = 50
MAX_REPETITIONS = 1_000
"""Maximum of m and of n in a repetition {m,n}."""
MAX_ALL_REPETITIONS = 20_000
"""Maximum sum of the larger numbers of all repetitions {m,n} in a grammar: llama.cpp writes a rule per repetition."""

_TOKEN = re.compile(
    r"""
      "(?:[^"\\\n]|\\.)*+"?          # a literal; one without an end is all that follows,
    | \[(?:[^\]\\]|\\.)*+\]?         # as are characters: so nothing is looked at twice
    | \#[^\n]*                       # a comment
    | \{(?P<least>\d*+)(?P<range>,?+)(?P<most>\d*+)\}
    | (?P<open>\() | (?P<close>\))
    """,
    re.VERBOSE | re.DOTALL,
)


def check(text: str) -> None:
    """Raise Unusable for a grammar that exceeds a bound."""
    if len(text.encode()) > MAX_BYTES:
        raise Unusable(f"the grammar has more than {MAX_BYTES >> 10} KiB; send a smaller one")
    if not text.strip():
        raise Unusable("the grammar is empty; write at least a rule named root")
    if "\0" in text:
        raise Unusable("the grammar has a NUL character; leave it out")
    depth = deepest = total = 0
    for found in _TOKEN.finditer(text):
        if found["open"]:
            depth += 1
            deepest = max(deepest, depth)
        elif found["close"]:
            depth -= 1
        elif found["least"] is not None:
            count = max(_count(found["least"]), _count(found["most"]))
            total += count
            if count > MAX_REPETITIONS:
                raise Unusable(f"the repetition {found[0][:40]} is above {MAX_REPETITIONS}; repeat less or use `*`")
    if deepest > MAX_NESTING:
        raise Unusable(f"the grammar is nested {deepest} levels deep, {MAX_NESTING} are allowed; name its parts")
    if total > MAX_ALL_REPETITIONS:
        raise Unusable(f"the grammar's repetitions add up to {total}, {MAX_ALL_REPETITIONS} are allowed; use `*`")


def names_tokens(text: str) -> bool:
    """Return whether the grammar's rules may name tokens, such as `<[1234]>` or `<think>`, and not only texts."""
    return "<" in _TOKEN.sub("", text)


def _count(digits: str) -> int:
    return int(digits or 0) if len(digits) < 7 else 10**6


TRIAL_S = 10.0
"""Maximum seconds to wait for a trial's result; then the call fails (BUSY). The process itself is bounded in processor
time, so that only a busy machine makes a trial take this long."""


class Trial:
    """Tries grammars, each in a process of its own. Safe to use from several threads."""

    def __init__(self, processes: Forks, *, trial_s: float = TRIAL_S) -> None:
        self._processes = processes
        self._trial_s = trial_s

    def check(self, kind: Kind, text: str) -> None:
        """Try a grammar, and block until that is done: GBNF by random walks through it, Lark by compiling it.

        Raises Unusable with the reason; CallFailed if the grammar can't be tried now."""
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
        except TookTooLong as late:
            if late.starved:
                why = f"the process for it stood still for {self._trial_s:g} s and is being replaced"
                raise unavailable(why) from None
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
