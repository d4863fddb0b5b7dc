"""The usage of one gateway process: records its calls and sends the records on."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.call import Call
from gateway.store.usage import UsageStream
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import UNMETERED, Meter, RequestLog
from gateway.usage.journal import OwnJournal
from gateway.usage.recorder import UsageRecorder
from gateway.usage.recovery import Price
from gateway.usage.sender import UsageSender

FOLDER = "usage"
PROCESS_BYTES = 8
"""Random bytes of a process's id: it must never be that of another process, as the ledger would take records of one
for those of the other."""


class Usage:
    """Records the usage of calls, and sends it to the ledger."""

    def __init__(self, recorder: UsageRecorder | None, sender: UsageSender | None) -> None:
        """None: no usage is kept."""
        self._recorder = recorder
        self._sender = sender

    def begin(self, call: Call, request_log: RequestLog) -> Meter:
        """Return the meter of a call that begins."""
        return UNMETERED if self._recorder is None else self._recorder.begin(call, request_log)

    async def run(self) -> None:
        """Send usage until cancelled."""
        if self._sender is not None:
            await self._sender.run()

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Send what is left, and give the journals up, at the block's end: no call is under way by then."""
        try:
            yield
        finally:
            if self._sender is not None:
                await self._sender.close()


def open_usage(state_dir: Path, max_bytes: int, stream: UsageStream, metrics: Metrics, price: Price) -> Usage:
    """Return what keeps the usage of this process. `max_bytes`: maximum bytes on disk. A disk that can't be used is
    logged, not raised."""
    folder = state_dir.expanduser() / FOLDER
    process = secrets.token_hex(PROCESS_BYTES)
    journal = OwnJournal(folder, process, max_bytes, lambda what: metrics.usage_records.labels(what).inc())
    return Usage(UsageRecorder(journal, price), UsageSender(folder, journal, stream, price, metrics))
