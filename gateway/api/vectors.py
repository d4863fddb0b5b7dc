"""The matrix of a pooled answer, row by row, in the forms that dialects write."""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import AsyncIterator

from workers.protocol.pooled import PoolResult

FLOAT_BYTES = 4
TURN_NUMBERS = 1 << 15
"""After so many numbers other calls get a turn: a number takes about 0.1 us to become JSON."""


async def rows_of(result: PoolResult) -> AsyncIterator[array[float]]:
    """Rows of float32 in order."""
    row_bytes = result.width * FLOAT_BYTES
    rows_per_turn = max(1, TURN_NUMBERS // max(1, result.width))
    for number, start in enumerate(range(0, len(result.vectors), row_bytes)):
        if number and number % rows_per_turn == 0:
            await asyncio.sleep(0)
        row = array("f")
        row.frombytes(result.vectors[start : start + row_bytes])
        if sys.byteorder == "big":
            row.byteswap()
        yield row


def base64_of(row: array[float]) -> str:
    """Little-endian float32."""
    if sys.byteorder == "big":
        row = row[:]
        row.byteswap()
    return base64.b64encode(row.tobytes()).decode("ascii")


def shortened(row: array[float], width: int) -> array[float]:
    """The first `width` numbers, at length 1 again."""
    head = row[:width]
    length = math.sqrt(sum(number * number for number in head))
    return array("f", [number / length for number in head]) if length else head
