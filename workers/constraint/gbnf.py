"""Bounds for a caller's GBNF, checked before llama.cpp sees it. They are cheap to check; `trial` finds the rest.

Source of the language: grammars/README.md of llama.cpp.
"""

from __future__ import annotations

import re

from workers.constraint.failures import Unusable

MAX_BYTES = 64 << 10
MAX_NESTING = 50
MAX_REPETITIONS = 1_000
"""Most repetitions in one {m,n}."""
MAX_ALL_REPETITIONS = 20_000
"""Most repetitions of the whole grammar; llama.cpp writes a rule for each."""

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
    """Raise Unusable for a grammar that is over a bound."""
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
    """Return whether a rule may name tokens, such as `<[1234]>` or `<think>`, and not only texts."""
    return "<" in _TOKEN.sub("", text)


def _count(digits: str) -> int:
    return int(digits or 0) if len(digits) < 7 else 10**6
