"""Sends a worker questions with one answer each: about texts, properties, slots and adapters, and pooled work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import aiohttp
import msgspec

from gateway.relay.fanin import CONNECT_TIMEOUT_S, Place
from gateway.relay.payload import Payloads
from workers.protocol.failures import CallFailed, Failure, FailureCode
from workers.protocol.pooled import POOL_PATH
from workers.protocol.text import DETOKENIZE_PATH, RENDER_PATH, TOKENIZE_PATH

MAX_REPLY_BYTES = 4 << 20
"""Most bytes of an answer about a model, its slots or its adapters."""
MAX_LONG_REPLY_BYTES = 128 << 20
"""Most bytes of an answer whose length follows the question's: 2,048 vectors of 8,192 numbers, 8 million tokens."""
LONG_REPLIES = frozenset({POOL_PATH, TOKENIZE_PATH, DETOKENIZE_PATH, RENDER_PATH})

NO_SUCH_ROUTE = (404, 405)
"""Statuses of a worker of another kind: one for pooled work has no adapters."""

JSON_HEADERS = {"Content-Type": "application/json"}

_decode_failure = msgspec.json.Decoder(Failure).decode

ReplyT = TypeVar("ReplyT")
ReplyT_co = TypeVar("ReplyT_co", covariant=True)


class ReplyTooLong(aiohttp.ClientError):
    """A worker's answer is longer than any honest one."""


class NotReached(CallFailed):
    """The worker took no connection: it has not got the question, so another one may be asked."""


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body. Raises as `read_pieces`."""
    pieces: list[bytes] = []
    await read_pieces(response, max_bytes, pieces.append)
    return b"".join(pieces)


async def read_pieces(response: aiohttp.ClientResponse, max_bytes: int, add: Callable[[bytes], None]) -> None:
    """Pass the body to `add` as it comes, some 128 KiB at a time.

    Raises ReplyTooLong, with the connection closed, as soon as it is longer than `max_bytes`, and what `add` raises.
    """
    left = max_bytes
    async for piece in response.content.iter_any():
        left -= len(piece)
        if left < 0:
            response.close()
            raise ReplyTooLong(f"more than {max_bytes} bytes")
        add(piece)


class Reading(Protocol[ReplyT_co]):
    """Reads one reply as it comes."""

    def add(self, piece: bytes) -> None:
        """Take in the next piece. Raises msgspec.DecodeError."""
        ...

    def result(self) -> ReplyT_co:
        """Return the reply when all of it has come. Raises msgspec.DecodeError."""
        ...


class AtOnce(Generic[ReplyT]):
    """Reads a reply that is decoded in one call."""

    def __init__(self, decode: Callable[[bytes], ReplyT]) -> None:
        self._pieces: list[bytes] = []
        self._decode = decode

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def result(self) -> ReplyT:
        return self._decode(b"".join(self._pieces))


async def ask(
    session: aiohttp.ClientSession,
    payloads: Payloads,
    headers: Mapping[str, str],
    place: Place,
    method: str,
    path: str,
    message: msgspec.Struct | None,
    reading: Reading[ReplyT],
    timeout_s: float,
) -> ReplyT:
    """Send one question to a worker and return its answer. `headers`: those of every request to this worker.

    Raises CallFailed: the worker's own failure, WORKER_LOST when it does not answer (NotReached: it has not got the
    question either), INTERNAL when its answer is of another version, INVALID_REQUEST where more vectors were asked
    for than one answer holds.
    """
    try:
        async with (
            payloads.of(message) as payload,
            session.request(
                method,
                place.address + path,
                data=payload.data,
                headers={**JSON_HEADERS, **headers, **payload.headers},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
                allow_redirects=False,
            ) as response,
        ):
            if response.status != 200:
                refused = await read_bounded(response, MAX_REPLY_BYTES)
                raise CallFailed(failure_in(place, response.status, refused))
            max_bytes = MAX_LONG_REPLY_BYTES if path in LONG_REPLIES else MAX_REPLY_BYTES
            await read_pieces(response, max_bytes, reading.add)
        return reading.result()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if isinstance(error, ReplyTooLong) and path == POOL_PATH:
            # The number of vectors follows the request: every worker's answer would be as long, and none is at fault.
            told = f"The vectors of this request have {error}. Send fewer inputs at once."
            raise CallFailed(Failure(FailureCode.INVALID_REQUEST, told)) from None
        message_ = f"The worker {place.worker} did not answer ({type(error).__name__}). Send the request again."
        unheard = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        kind = NotReached if unheard else CallFailed
        raise kind(Failure(FailureCode.WORKER_LOST, message_)) from error
    except msgspec.DecodeError as error:
        raise CallFailed(unreadable(place)) from error


def unreadable(place: Place) -> Failure:
    message = f"The worker {place.worker} answered what this gateway can't read. Run the same version of both."
    return Failure(FailureCode.INTERNAL, message)


def failure_in(place: Place, status: int, body: bytes) -> Failure:
    """Return why a worker refused: the failure in its body, else one made from its status."""
    try:
        return _decode_failure(body)
    except msgspec.DecodeError:
        if status in NO_SUCH_ROUTE:
            message = f"The worker {place.worker} does other work: it can't do this for its model. Ask another model."
            return Failure(FailureCode.UNSUPPORTED, message, "model")
        message = f"The worker {place.worker} answered the call with HTTP {status} and no reason."
        return Failure(FailureCode.INTERNAL, message)
