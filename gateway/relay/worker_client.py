"""Submits a call to a worker and cancels many. Every outcome is an answer or a `CallFailed`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from gateway.relay.fanin import CONNECT_TIMEOUT_S, Place
from gateway.relay.payload import Payloads
from gateway.relay.worker_asks import JSON_HEADERS, failure_in, read_bounded, unreadable
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.framing import CANCEL_PATH, SUBMIT_PATH
from workers.protocol.requests import MAX_PROMPT_CHARS, Accepted, Cancel, Submit

log = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 60.0
"""Seconds for a submit. A worker tokenises the prompt before it answers; the event stream notices its death sooner."""
CANCEL_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 64 << 10
"""Most bytes of an answer with the few numbers of an accepted call, or of a failure."""
MAX_TOLD_BYTES = (6 * MAX_PROMPT_CHARS) + (1 << 20)
"""Most bytes of an answer with the prompt's text, of which a character may take six, and the call's settings."""

_encode = msgspec.json.Encoder().encode
_decode_accepted = msgspec.json.Decoder(Accepted).decode


class WorkerClient:
    """Makes the two POSTs to one worker process, submit and cancel, over a session that all clients share."""

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str], gateway_id: str) -> None:
        """`headers`: those of every request to this worker."""
        self._session = session
        self._headers = {**JSON_HEADERS, **headers}
        self._gateway_id = gateway_id
        self.payloads = Payloads()

    async def submit(self, place: Place, submit: Submit, known_bytes: int = 0) -> Accepted:
        """Submit a call. `known_bytes` as in `Payloads.of`. Raises CallFailed as `gateway.relay.worker_asks.ask`."""
        try:
            async with (
                self.payloads.of(submit, known_bytes) as payload,
                self._session.post(
                    place.address + SUBMIT_PATH,
                    data=payload.data,
                    headers={**self._headers, **payload.headers},
                    timeout=aiohttp.ClientTimeout(total=SUBMIT_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
                    allow_redirects=False,
                ) as response,
            ):
                is_told = "settings" in submit.request.tell
                body = await read_bounded(response, MAX_TOLD_BYTES if is_told else MAX_REPLY_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = (
                f"The worker {place.worker} did not take the call ({type(error).__name__}). Send the request again."
            )
            raise CallFailed(Failure(FailureCode.WORKER_LOST, message)) from error
        if response.status != 202:
            raise CallFailed(failure_in(place, response.status, body))
        try:
            accepted = _decode_accepted(body)
        except msgspec.DecodeError as error:
            raise CallFailed(unreadable(place)) from error
        if accepted.boot != place.boot:
            message = f"The worker {place.worker} restarted as the call was placed. Send the request again."
            raise CallFailed(Failure(FailureCode.WORKER_LOST, message))
        return accepted

    async def cancel(self, place: Place, calls: list[int]) -> bool:
        """Cancel calls. Return whether the worker took it; if not, its grace period or its death ends the calls."""
        try:
            async with self._session.post(
                place.address + CANCEL_PATH,
                data=_encode(Cancel(self._gateway_id, tuple(calls))),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=CANCEL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                await read_bounded(response, MAX_REPLY_BYTES)
                return response.status < 300
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False


@dataclass(slots=True)
class Cancellations:
    """The calls to cancel on one worker: the first is sent at once, those that come meanwhile go together next."""

    client: WorkerClient
    place: Place
    group: asyncio.TaskGroup
    """The parent of the sending task."""
    pending: list[int] = field(default_factory=list)
    sending: bool = False

    async def send(self) -> None:
        """Send until nothing is left. What fails stays pending, for the next call or the next connection."""
        self.sending = True
        try:
            while self.pending:
                batch, self.pending = self.pending, []
                if not await self.client.cancel(self.place, batch):
                    self.pending = batch + self.pending
                    log.info(
                        "cancel not delivered", extra={"fields": {"worker": self.place.worker, "calls": len(batch)}}
                    )
                    return
        finally:
            self.sending = False

    def add(self, calls: list[int]) -> None:
        """Cancel calls, without waiting; with an empty list, send those that are still pending."""
        self.pending += calls
        if self.pending and not self.sending:
            self.sending = True
            self.group.create_task(self.send())
