"""Reads the length of an answer, which has three names."""

from __future__ import annotations

from itertools import pairwise

from gateway.errors import InvalidRequest


def read_max_tokens(given: dict[str, int | None]) -> int | None:
    """Return the one number that `given` holds under its names; None: no bound. Raises InvalidRequest if they differ.

    A negative number says that there is no bound, as llama-server has it.
    """
    told = [(name, number) for name, number in given.items() if number is not None]
    for (first, one), (second, other) in pairwise(told):
        if one != other:
            message = f"`{first}` ({one}) and `{second}` ({other}) contradict each other. Send one of them."
            raise InvalidRequest(message, param=second)
    return told[0][1] if told and told[0][1] >= 0 else None
