"""Encodes once what the chunks of a stream have in common, and writes the chunks around the answers' own."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gateway.api.openai.stream_usage import StreamUsage
from gateway.api.openai.verbose import Verbose
from gateway.api.tallies import timings_object
from workers.protocol.events import Finished

_encode = msgspec.json.Encoder().encode


class StreamHead:
    """Wraps choices into events."""

    def __init__(self, id_: str, kind: str, model: str, usage: StreamUsage) -> None:
        """`kind`: the `object` of the chunks."""
        head = _encode({"id": id_, "object": kind, "created": int(time.time()), "model": model})
        self._start = self._head = b"data: " + head[:-1]
        self._usage = usage
        # With a chunk of usage at the end, the others have the field as well, and it is null.
        self._tail = b',"usage":null}\n\n' if usage.at_end else b"}\n\n"

    def sign(self, fingerprint: str) -> None:
        """Let chunks tell the fingerprint of what computes them from now on; empty: not known."""
        self._head = self._start + b',"system_fingerprint":' + _encode(fingerprint) if fingerprint else self._start

    def framed(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return what stands before and behind the text of a plain chunk. Its choice is `before` + text + `after`."""
        return self._head + b',"choices":[' + before, after + b"]" + self._tail

    def chunk(self, choice: dict[str, Any], extra: bytes = b"") -> bytes:
        body = self._head + b',"choices":[' + _encode(choice) + b"]" + extra
        if self._usage.always:
            return body + b',"usage":' + _encode(self._usage.so_far()) + b"}\n\n"
        return body + self._tail

    def end(self, number: int, event: Finished, verbose: Verbose) -> bytes:
        """Note the end of an answer; return the fields of its last chunk beside the choice.

        Several answers tell their own times; those of a single one stand in the stream's last chunk.
        """
        usage = self._usage
        usage.ended(number, event)
        told = verbose.fields(event)
        if not usage.at_end or len(usage.ends) > 1:
            told = {"timings": timings_object(event.timings), **told}
        return b"," + _encode(told)[1:-1] if told else b""

    def last(self) -> bytes:
        """Return the chunk of usage, where one was asked for."""
        usage = self._usage
        if not usage.at_end:
            return b""
        body = self._head + b',"choices":[],"usage":' + _encode(usage.whole())
        [end, *more] = usage.ends
        if end is not None and not more:
            body += b',"timings":' + _encode(timings_object(end.timings))
        return body + b"}\n\n"
