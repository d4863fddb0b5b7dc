"""Writes calls as Parquet. Imported where such an export is asked for, as pyarrow takes much memory."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

GROUP_ROWS = 50_000
"""Calls of one row group: what is held in memory at a time."""
TYPES = {
    "started_at": pyarrow.timestamp("us", tz="UTC"),
    "ended_at": pyarrow.timestamp("us", tz="UTC"),
    "id": pyarrow.int64(),
    "cost": pyarrow.decimal128(24, 9),
    **dict.fromkeys(("status", "prompt_tokens", "cached_tokens", "completion_tokens", "media_tokens"), pyarrow.int32()),
    **dict.fromkeys(("queue_ms", "compute_ms"), pyarrow.int32()),
}
"""Columns that are no texts."""


class _Output(io.RawIOBase):
    """Keeps what was written until it is taken."""

    def __init__(self) -> None:
        self._written = bytearray()
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._written += data
        self._position += size
        return size

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        data = bytes(self._written)
        self._written.clear()
        return data


def write(columns: Sequence[str], pages: Iterable[Sequence[Sequence[Any]]]) -> Iterator[bytes]:
    """Yield the pieces of a Parquet file. `pages`: rows with a value for each column."""
    schema = pyarrow.schema([(name, TYPES.get(name, pyarrow.string())) for name in columns])
    output = _Output()
    held: list[Any] = []
    with pyarrow.parquet.ParquetWriter(output, schema, compression="zstd") as writer:
        for page in pages:
            if page:
                held.append(_batch(schema, page))
            if sum(batch.num_rows for batch in held) >= GROUP_ROWS:
                writer.write_table(pyarrow.Table.from_batches(held, schema))
                held = []
                yield output.take()
        if held:
            writer.write_table(pyarrow.Table.from_batches(held, schema))
    yield output.take()


def _batch(schema: Any, rows: Sequence[Sequence[Any]]) -> Any:
    columns = zip(*rows, strict=True)
    arrays = [pyarrow.array(values, type=field.type) for field, values in zip(schema, columns, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
