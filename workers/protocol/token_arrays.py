"""Collects tokens in arrays of 32-bit numbers, and lists them, without holding the interpreter's lock for long.

A text of megabytes has millions of tokens. In one call that makes an array or a list of them no other thread of a
worker runs: 30 ms for each million, 2 ms where the memory of an array is copied. So a run is taken at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

INT32 = "i"
"""Type code of the arrays: the numbers that llama.cpp's tokens are."""

UINT32 = "I"

RUN_TOKENS = 1 << 15
"""Maximum number of tokens to convert in one call, which takes a millisecond."""


def in_array(tokens: Sequence[int]) -> array[int]:
    """Return the tokens in an array of 32-bit numbers: the same one, if that is what they are. Raises OverflowError."""
    if isinstance(tokens, array) and tokens.typecode in (INT32, UINT32):
        return tokens
    return joined(tokens)


def joined(*parts: Sequence[int]) -> array[int]:
    """Return the tokens of all parts, one after the other, in a new array. Raises OverflowError."""
    whole = array(INT32)
    for part in parts:
        extend(whole, part)
    return whole


def extend(tokens: array[int], more: Sequence[int]) -> None:
    """Add further tokens to an array. Raises OverflowError for a number that has more than 32 bits."""
    is_same = isinstance(more, array) and more.typecode == tokens.typecode
    for start in range(0, len(more), RUN_TOKENS):
        run = more[start : start + RUN_TOKENS]
        tokens.extend(run if is_same else iter(run))  # `extend` refuses an array of another kind


def to_bytes(tokens: array[int]) -> bytes:
    """Return the memory of an array. Parts of a long one are copied, and while these are joined other threads run."""
    if len(tokens) <= RUN_TOKENS:
        return tokens.tobytes()
    return b"".join([tokens[start : start + RUN_TOKENS].tobytes() for start in range(0, len(tokens), RUN_TOKENS)])


def in_list(tokens: Sequence[int]) -> list[int]:
    """Return the tokens in a list: the same one, if that is what they are."""
    if isinstance(tokens, list):
        return tokens
    listed: list[int] = []
    for start in range(0, len(tokens), RUN_TOKENS):
        listed.extend(tokens[start : start + RUN_TOKENS])
    return listed
