"""Yields the matrix of a pooled answer row by row, in the forms that dialects write."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterator

from workers.protocol.pooled import PoolResult

FLOAT_BYTES = 4
PART_BYTES = 256 << 10
"""Bytes, about, of the parts in which an answer is written; other calls get a turn after each."""
NUM_PARTS = 3
"""Parts of an answer in memory while it is sent: in the connection, about to go there, and the next."""
DECIMAL_BYTES = 24
"""Most bytes of a number in JSON."""


def answer_bytes(result: PoolResult) -> int:
    """Return the bytes of memory that an answer takes while it is sent: its vectors, and the parts being written."""
    num_bytes = len(result.vectors)
    written = DECIMAL_BYTES * num_bytes // FLOAT_BYTES
    # The last row of a part may reach beyond its bytes.
    return num_bytes + min(written, NUM_PARTS * (PART_BYTES + DECIMAL_BYTES * result.width))


def rows_of(result: PoolResult) -> Iterator[array[float]]:
    """Yield rows of float32 in order."""
    row_bytes = result.width * FLOAT_BYTES
    for start in range(0, len(result.vectors), row_bytes):
        row = array("f")
        row.frombytes(result.vectors[start : start + row_bytes])
        if sys.byteorder == "big":
            row.byteswap()
        yield row


def base64_of(row: array[float]) -> str:
    """Return the row as little-endian float32 in base64."""
    if sys.byteorder == "big":
        row = row[:]
        row.byteswap()
    return base64.b64encode(row.tobytes()).decode("ascii")


def shortened(row: array[float], width: int) -> array[float]:
    """Return the first `width` numbers, scaled to length 1 again."""
    head = row[:width]
    length = math.sqrt(sum(number * number for number in head))
    return array("f", [number / length for number in head]) if length else head
