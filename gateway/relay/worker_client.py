"""Makes the requests to one worker process: submits and cancels calls, and asks questions that have one answer each.

Every outcome is an answer or a `CallFailed`. The answer to a submit only says that the call is accepted; its events
come on the worker's event stream (`gateway.relay.worker_stream`).

`Payloads` encodes the messages: short ones at once, long ones on a thread, a few at a time, with teams taking turns. A
long message is encoded in slices, since a thread that encodes 32 MiB in one call holds the interpreter's lock and all
streams wait for 135 ms. Each slice's memory is freed when the slice is sent: there may be several copies of a long
prompt, one for each answer to the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from gateway.dispatch.request_size import INLINE_CHARS, num_chars
from gateway.dispatch.team_turns import TeamTurns, Turn
from gateway.relay.posts import Posts
from workers.protocol.control import access_token, proof
from workers.protocol.events import CallFailed, Failure, FailureCode
from workers.protocol.framing import CANCEL_PATH, SUBMIT_PATH, encode, marked_parts
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import POOL_PATH
from workers.protocol.queries import DETOKENIZE_PATH, RENDER_PATH, TEAM_HEADER, TOKENIZE_PATH
from workers.protocol.requests import MAX_PROMPT_CHARS, Accepted, Cancel, Submit

AT_ONCE = 2
"""Maximum number of long messages that are encoded and sent to one worker at the same time; the others wait."""
SLICE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class Payload:
    """A body."""

    data: bytes | AsyncIterator[bytes] | None
    num_bytes: int

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that an HTTP client library needs to be told for the body."""
        return {} if self.data is None or isinstance(self.data, bytes) else {"Content-Length": str(self.num_bytes)}


class Payloads:
    """Encodes messages to one worker process."""

    def __init__(self) -> None:
        self._turns = TeamTurns(AT_ONCE)

    @asynccontextmanager
    async def encode(self, message: msgspec.Struct | None) -> AsyncIterator[Payload]:
        """Encode a message and yield the body. Leave the block once the worker has answered the message."""
        if message is None or num_chars(message) <= INLINE_CHARS:
            data = None if message is None else encode(message)
            yield Payload(data, len(data or b""))
            return
        team: str = getattr(message, "tenant", "")
        turn = await self._turns.enter(team)
        try:
            parts = await asyncio.to_thread(deque, marked_parts(message))
            yield Payload(_slices(parts, turn), sum(map(len, parts)))
        finally:
            turn.leave()


async def _slices(parts: deque[bytes], turn: Turn) -> AsyncIterator[bytes]:
    while parts:
        part = parts.popleft()
        for start in range(0, len(part), SLICE_BYTES):
            yield part[start : start + SLICE_BYTES]
    turn.leave()


log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
SUBMIT_TIMEOUT_S = 60.0
"""Seconds for a submit: a worker tokenises the prompt before it answers. A dead worker's event stream ends sooner."""
CANCEL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 60.0

MAX_ACCEPTED_BYTES = 64 << 10
"""Maximum bytes of the answer to a submit or a cancel: a few numbers, or a failure. A longer answer counts as none."""
MAX_SETTINGS_BYTES = (6 * MAX_PROMPT_CHARS) + (1 << 20)
"""Maximum bytes of an answer with a call's settings and its prompt's text; a character can take six bytes."""
MAX_REPLY_BYTES = 4 << 20
"""Maximum bytes of an answer about a model, its slots or its adapters."""
INLINE_BYTES = 256 << 10
"""A reply of at most so many bytes is joined and decoded on the event loop, others on a thread."""
MAX_LONG_REPLY_BYTES = 128 << 20
"""Maximum bytes of a reply whose size depends on the request: 2,048 vectors of 8,192 numbers, or 8 million tokens."""
LONG_REPLIES = frozenset({POOL_PATH, TOKENIZE_PATH, DETOKENIZE_PATH, RENDER_PATH})

NO_SUCH_ROUTE = (404, 405)
"""HTTP statuses of a worker of a kind that lacks the route: a worker for pooled work has no routes for adapters."""

_decode_accepted = msgspec.json.Decoder(Accepted).decode
_decode_failure = msgspec.json.Decoder(Failure).decode

ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class ReplyTooLong(aiohttp.ClientError):
    """A worker's answer is longer than any answer to the request can be."""


class NotReached(CallFailed):
    """No connection to the worker could be made. It has not got the question, so another worker can be asked."""


class ReplyReader(Protocol[ReplyT_co]):
    """Reads one reply piece by piece."""

    def add(self, piece: bytes) -> None:
        """Take in the next piece. Raises msgspec.DecodeError."""
        ...

    def result(self) -> ReplyT_co:
        """Return the decoded reply, once all pieces have been added; of a long one on a thread. Raises
        msgspec.DecodeError, UnicodeDecodeError."""
        ...


class WholeReply(Generic[ReplyT]):
    """Collects a reply, and decodes it in one call."""

    def __init__(self, decode: Callable[[bytes], ReplyT]) -> None:
        self._pieces: list[bytes] = []
        self._decode = decode

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def result(self) -> ReplyT:
        return self._decode(b"".join(self._pieces))


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials between a gateway and a worker process: the gateway's access token and the worker's proof."""

    secret: str
    at: WorkerAddress

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request: a token that only this worker process accepts."""
        return {"Authorization": f"Bearer {access_token(self.secret, self.at.worker, self.at.boot)}"}

    def proof(self, challenge: str) -> str:
        """Return the answer that proves, for this challenge, that the worker knows the secret."""
        return proof(self.secret, self.at.worker, self.at.boot, challenge)


class WorkerClient:
    """Makes the requests to one worker process: questions over an HTTP session that all clients of a gateway share, the
    submits and cancellations of calls over connections of its own."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials, gateway_id: str) -> None:
        self._session = session
        self._at = credentials.at
        self._headers = {"Content-Type": "application/json", **credentials.headers}
        self._gateway_id = gateway_id
        self._payloads = Payloads()
        self._posts = Posts(self._at.url, self._headers, CONNECT_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections that are kept for calls."""
        self._posts.close()

    async def submit(self, submit: Submit) -> Accepted:
        """Submit a call. Raises CallFailed as `ask`."""
        at = self._at
        try:
            async with self._payloads.encode(submit) as payload:
                max_bytes = MAX_SETTINGS_BYTES if "settings" in submit.request.tell else MAX_ACCEPTED_BYTES
                status, body = await self._posts.post(
                    SUBMIT_PATH, payload.data or b"", payload.num_bytes, SUBMIT_TIMEOUT_S, max_bytes
                )
        except (TimeoutError, OSError) as error:
            message = f"The worker {at.worker} did not take the call ({type(error).__name__}). Send the request again."
            raise CallFailed(Failure(FailureCode.WORKER_LOST, message)) from error
        if status != 202:
            raise CallFailed(failure_in(at, status, body))
        try:
            accepted = _decode_accepted(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CallFailed(_unreadable(at)) from error
        if accepted.boot != at.boot:
            message = f"The worker {at.worker} restarted as the call was placed. Send the request again."
            raise CallFailed(Failure(FailureCode.WORKER_LOST, message))
        return accepted

    async def cancel(self, calls: list[int]) -> bool:
        """Cancel calls. Return whether the worker accepted; if not, they end when it dies or gives this gateway up."""
        try:
            body = encode(Cancel(self._gateway_id, tuple(calls)))
            reply = await self._posts.post(CANCEL_PATH, body, len(body), CANCEL_TIMEOUT_S, MAX_ACCEPTED_BYTES)
        except (TimeoutError, OSError):
            return False
        return reply.status < 300

    async def ask(
        self, method: str, path: str, message: msgspec.Struct | None, reading: ReplyReader[ReplyT], timeout_s: float
    ) -> ReplyT:
        """Send one question and return its answer.

        Raises NotReached if no connection can be made; CallFailed with the worker's own failure, WORKER_LOST if it does
        not answer, INTERNAL if its answer can't be decoded (another version), or INVALID_REQUEST if the request asks
        for more vectors than one answer can hold."""
        at = self._at
        try:
            async with (
                self._payloads.encode(message) as payload,
                self._session.request(
                    method,
                    at.url + path,
                    data=payload.data,
                    headers={**self._headers, **_team_header(message), **payload.headers},
                    timeout=_timeout(timeout_s),
                    allow_redirects=False,
                ) as response,
            ):
                if response.status != 200:
                    refused = await read_bounded(response, MAX_REPLY_BYTES)
                    raise CallFailed(failure_in(at, response.status, refused))
                max_bytes = MAX_LONG_REPLY_BYTES if path in LONG_REPLIES else MAX_REPLY_BYTES
                num_bytes = await read_pieces(response, max_bytes, reading.add)
            # Joining 43 MiB takes 25 ms, without the interpreter's lock.
            return reading.result() if num_bytes <= INLINE_BYTES else await asyncio.to_thread(reading.result)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, ReplyTooLong) and path == POOL_PATH:
                # The request decides how many vectors there are: every worker's answer would be as long.
                why = f"The vectors of this request have {error}. Send fewer inputs at once."
                raise CallFailed(Failure(FailureCode.INVALID_REQUEST, why)) from None
            why = f"The worker {at.worker} did not answer ({type(error).__name__}). Send the request again."
            not_sent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            kind = NotReached if not_sent else CallFailed
            raise kind(Failure(FailureCode.WORKER_LOST, why)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CallFailed(_unreadable(at)) from error


@dataclass(slots=True)
class Cancellations:
    """Cancels calls on one worker, one request at a time. Calls added meanwhile are sent together in the next one."""

    client: WorkerClient
    worker: str
    group: asyncio.TaskGroup
    """The task group in which the task that sends cancellations runs."""
    pending: list[int] = field(default_factory=list)
    sending: bool = False

    async def send(self) -> None:
        """Have the worker cancel pending calls. If that fails, they stay pending until the next `add` or connection."""
        self.sending = True
        try:
            while self.pending:
                batch, self.pending = self.pending, []
                try:
                    is_told = await self.client.cancel(batch)
                except Exception:  # the edge of this task: it would end the gateway with it
                    log.exception("calls could not be cancelled", extra={"fields": {"worker": self.worker}})
                    is_told = False
                if not is_told:
                    self.pending = batch + self.pending
                    log.info("cancel not delivered", extra={"fields": {"worker": self.worker, "calls": len(batch)}})
                    return
        finally:
            self.sending = False

    def add(self, calls: list[int]) -> None:
        """Cancel calls without waiting. An empty list only sends the cancellations that are still pending."""
        self.pending += calls
        if self.pending and not self.sending:
            self.sending = True
            self.group.create_task(self.send())


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the whole body. Raises ReplyTooLong if it is longer than `max_bytes`."""
    pieces: list[bytes] = []
    await read_pieces(response, max_bytes, pieces.append)
    return b"".join(pieces)


async def read_pieces(response: aiohttp.ClientResponse, max_bytes: int, add: Callable[[bytes], None]) -> int:
    """Pass the body to `add` as it comes, some 128 KiB at a time. Return the number of its bytes.

    As soon as the body exceeds `max_bytes`, closes the connection and raises ReplyTooLong. Raises what `add` raises."""
    left = max_bytes
    async for piece in response.content.iter_any():
        left -= len(piece)
        if left < 0:
            response.close()
            raise ReplyTooLong(f"more than {max_bytes} bytes")
        add(piece)
    return max_bytes - left


def failure_in(at: WorkerAddress, status: int, body: bytes) -> Failure:
    """Return why a worker refused: the failure in its body or, without one, a failure made from its status."""
    try:
        return _decode_failure(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if status in NO_SUCH_ROUTE:
            message = f"The worker {at.worker} does other work: it can't do this for its model. Ask another model."
            return Failure(FailureCode.UNSUPPORTED, message, "model")
        message = f"The worker {at.worker} answered the call with HTTP {status} and no reason."
        return Failure(FailureCode.INTERNAL, message)


def _unreadable(at: WorkerAddress) -> Failure:
    message = f"The worker {at.worker} answered what this gateway can't read. Run the same version of both."
    return Failure(FailureCode.INTERNAL, message)


def _team_header(message: msgspec.Struct | None) -> Mapping[str, str]:
    """Return the header that tells a worker whose question it is, before it decodes a long body; none if nobody's."""
    team: str = getattr(message, "tenant", "")
    return {TEAM_HEADER: quote(team)} if team else {}


def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_TIMEOUT_S)
