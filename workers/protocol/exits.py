"""Exit codes of Paddock's processes: a contract with whoever restarts them.

code  name         meaning                                                restarted by the supervisor
----  -----------  -----------------------------------------------------  ---------------------------
0     OK           stopped as asked, streams drained                      no
1     CRASHED      an error that nobody expected; the log has it          yes, with backoff
2     USAGE        a flag, setting or catalog that can't be used          no
3     BROKEN       a command checked something, and it does not hold      no
65    BAD_MODEL    the model file is missing, truncated or not GGUF       no
68    NO_GATEWAY   the gateway that a command calls can't answer now      no
69    NO_REDIS     Redis did not answer in the time allowed               yes, with backoff
70    HUNG         a step of the engine took longer than step_timeout_s       yes, with backoff
71    NO_MEMORY    the model or its KV cache does not fit                 no
72    DRAINED      an admin had the worker drained; its calls are done    yes, at once
75    DRAIN_CUT    stopped as asked, but calls were cut off at the bound  no
76    REFUSED      the gateway refused what a command asked for           no
77    FORBIDDEN    it refused the key, or the key may not ask for that    no
98    PORT_TAKEN   the address to listen on is in use                     no
"""

from __future__ import annotations

import signal
from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    CRASHED = 1
    USAGE = 2
    BROKEN = 3
    BAD_MODEL = 65
    NO_GATEWAY = 68
    NO_REDIS = 69
    HUNG = 70
    NO_MEMORY = 71
    DRAINED = 72
    DRAIN_CUT = 75
    REFUSED = 76
    FORBIDDEN = 77
    PORT_TAKEN = 98


RESTARTED = frozenset({Exit.CRASHED, Exit.NO_REDIS, Exit.HUNG, Exit.DRAINED})
"""Codes after which the supervisor restarts a process, as it does after a signal or a code that is not in `Exit`."""

# Codes after which the supervisor restarts a process only if its settings have run for a minute; never OK or DRAIN_CUT.
FINAL = frozenset(
    {
        *(Exit.OK, Exit.USAGE, Exit.BROKEN, Exit.BAD_MODEL, Exit.NO_GATEWAY, Exit.NO_MEMORY, Exit.DRAIN_CUT),
        *(Exit.REFUSED, Exit.FORBIDDEN, Exit.PORT_TAKEN),
    }
)

MEANINGS = {
    Exit.CRASHED: "an error that nobody expected",
    Exit.USAGE: "a setting can't be used",
    Exit.BAD_MODEL: "the model can't be used",
    Exit.NO_REDIS: "Redis did not answer",
    Exit.HUNG: "a step took too long",
    Exit.NO_MEMORY: "not enough memory",
    Exit.DRAINED: "an admin had it drained",
    Exit.PORT_TAKEN: "the port is in use",
}
SIGNALS = {
    signal.SIGKILL: "killed, as the system does where memory runs out",
    signal.SIGABRT: "llama.cpp gave up",
    signal.SIGSEGV: "it used memory that it does not have",
    signal.SIGBUS: "a page of a file could not be read",
    signal.SIGILL: "the processor lacks an instruction",
}


def in_words(code: int) -> str:
    """Return what the end of a process with this exit code (negative: a signal) means."""
    try:
        if code < 0:
            number = signal.Signals(-code)
            return f"{number.name} ({SIGNALS[number]})" if number in SIGNALS else number.name
        meaning = MEANINGS.get(Exit(code))
    except ValueError:
        return f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"exit code {code} ({meaning})" if meaning else f"exit code {code}"
