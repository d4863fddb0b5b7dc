"""Computes heads, the prefix hashes of requests. Gateways and workers compute them alike, to find shared prefixes.

A request is written out as bytes in one canonical order: first the scope (team, salt and adapters, within which caches
are shared), then what precedes the conversation (tools, template values), then each message. A head is the hash of all
bytes up to a certain place: requests with one head in common share that whole prefix. Nothing is rendered or tokenised.
A gateway looks a request's heads up among those that workers publish; only the worker knows what really is cached.

Ids of tool calls, earlier thoughts, and blanks in arguments are left out: clients change them when they send a
conversation back, and most templates do not show them again. A head is an estimate for placement, never a cache key.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from workers.protocol.requests import AdapterUse, GenerateRequest, Infill, Medium, Message, Prompt, ToolCall

BLOCK_BYTES = 1024
"""Bytes between two prefix hashes in a long text, some 256 tokens; doubled after each `HEADS_PER_SIZE` hashes."""
HEADS_PER_SIZE = 64
"""Number of prefix hashes after which the distance between two doubles: 64 hashes reach 16k tokens, 256 reach 240k."""
MAX_HEADS = 256
LEAST_BYTES = 128
"""At the end of a text a prefix hash is made only if at least this many bytes have come since the last one."""
MEDIUM_BYTES = 1024
"""Bytes that stand for a picture or a sound: about as many as a text has of as many tokens as it takes cells."""

DIGEST_BYTES = 8

FEW_VALUES, VALUE_CHARS = 64, 8
MAX_READ_CHARS = 64 << 10
"""A tool call's arguments are parsed if they are no longer than this and have few values: at most `FEW_VALUES`, or one
per `VALUE_CHARS` characters if that is more. Others are hashed unparsed, without blanks: parsing a quarter of a
megabyte of empty lists holds the interpreter for 10 ms."""

_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(float_hook=str).decode
"""Decodes JSON, but leaves floats as text: parsing a float can take ten microseconds, and floats are only hashed."""
_BLANKS = b" \t\r\n"
_END = b"\x00"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The heads of one request, shortest prefix first: `digests[i]` is the hash of scope and first `ends[i]` bytes."""

    digests: tuple[int, ...]
    """Unsigned numbers of 64 bits."""
    ends: tuple[int, ...]
    """Number of bytes before each head, without the scope; ascending."""
    num_bytes: int
    """Number of bytes of the whole request, without the scope; some may lie behind the last head."""


NOTHING = Prefix((), (), 0)


def prefix_of(request: GenerateRequest, tenant: str, adapters: Mapping[str, str]) -> Prefix:
    """Return a request's prefix hashes. `adapters`: name -> hash of contents. Others count by name."""
    chain = chain_of(request, tenant, adapters)
    chain.end()
    return chain.prefix()


def chain_of(request: GenerateRequest, tenant: str, adapters: Mapping[str, str]) -> Chain:
    """Return a chain of all the request's texts; the last text is still open, so that the answer can be added to it.

    The parameters are those of `prefix_of`."""
    chain = Chain(_scope(request, tenant, adapters))
    for number, text in enumerate(_texts(request)):
        if number:
            chain.end()
        chain.write(text)
    return chain


def prefix_after(chain: Chain, request: GenerateRequest, text: str, calls: tuple[ToolCall, ...]) -> Prefix:
    """Return the heads of the request with its answer (`text`, `calls`), as a client sends both in its next request.

    `chain` is the request's (`chain_of`) and is changed here. For infill the heads are those of the request alone: no
    client sends such an answer back."""
    if request.prompt is not None:
        chain.write(text.encode())
    elif request.infill is None:
        chain.end()
        chain.write(_message(Message("assistant", text, tool_calls=calls), iter(())))
    chain.end()
    return chain.prefix()


def _scope(request: GenerateRequest, tenant: str, adapters: Mapping[str, str]) -> bytes:
    uses = sorted(_use(use, adapters) for use in request.adapters if use.scale)
    return _encode([tenant, request.cache_salt, uses])


def _use(use: AdapterUse, adapters: Mapping[str, str]) -> tuple[str, float]:
    return adapters.get(use.name, use.name), use.scale


def _texts(request: GenerateRequest) -> Iterator[bytes]:
    """Yield the texts of a request as canonical bytes, in the order in which templates write them."""
    media = iter(request.media)
    if request.prompt is not None:
        prompt = request.prompt
        yield from _prompt(_with_media(prompt, request.prompt_media, media) if isinstance(prompt, str) else prompt)
    elif request.infill is not None:
        yield from _infill(request.infill)
    else:
        opening = [request.tools, request.template_values, request.thinking.enabled, request.thinking.effort]
        yield _encode(opening) if any(opening) else b""
        for message in request.messages:
            yield _message(message, media)


def _with_media(text: str, places: Sequence[int], media: Iterator[Medium]) -> str:
    """Return a text with the hash of the next medium at each of these places, so that other media make other heads."""
    if not places:
        return text
    parts: list[str] = []
    start = 0
    for place, one in zip(places, media, strict=False):
        parts += text[start:place], _name_of(one).ljust(MEDIUM_BYTES, ".")
        start = place
    return "".join((*parts, text[start:]))


def media_ends(request: GenerateRequest) -> tuple[int, ...]:
    """Return for each medium of a request the number of bytes, as `Prefix.ends` counts them, after which its name has
    been hashed: a head that reaches so far holds for requests with the same medium only."""
    if not request.media:
        return ()
    ends: list[int] = []
    before, left = 0, list(reversed(request.media))
    for text in _texts(request):
        start = 0
        while left:
            name = _name_of(left[-1]).encode()
            found = text.find(name, start)
            if found < 0:
                break
            start = found + len(name)
            ends.append(before + start)
            left.pop()
        before += len(text)
    return (*ends, *(before for _ in left))


def _name_of(medium: Medium) -> str:
    return f"\0{medium.kind} {medium.sha256.hex()}\0"


def _prompt(prompt: Prompt) -> Iterator[bytes]:
    # As one text, so that a later prompt that begins with this one and its answer has the same heads.
    parts: Sequence[Any] = (prompt,) if isinstance(prompt, str) else prompt
    if sys.byteorder == "little" and (isinstance(parts, array) or set(map(type, parts)) == {int}):
        yield array("i", parts).tobytes()
        return
    yield b"".join(
        part.encode() if isinstance(part, str) else part.to_bytes(4, "little", signed=True) for part in parts
    )


def _infill(infill: Infill) -> Iterator[bytes]:
    yield from (_encode([file.name, file.text]) for file in infill.files)
    yield infill.prefix.encode()
    yield _encode([infill.suffix, infill.prompt])


def _message(message: Message, media: Iterator[Medium]) -> bytes:
    """Return a message's canonical bytes. `media`: those of the request that no earlier message has."""
    content = _with_media(message.content or "", message.media, media).encode()
    if message.role == "assistant":  # clients trim an answer, and join its parts with line ends
        content = content.translate(None, _BLANKS)
    calls = b"".join(call.name.encode() + _END + _arguments(call) + _END for call in message.tool_calls)
    return _END.join([message.role.encode(), (message.name or "").encode(), content, calls])


def _arguments(call: ToolCall) -> bytes:
    """Return a call's arguments in a canonical form: some clients parse them, and serialise them again differently."""
    num_values = sum(map(call.arguments.count, "[{,"))
    if len(call.arguments) > MAX_READ_CHARS or num_values > max(FEW_VALUES, len(call.arguments) // VALUE_CHARS):
        return call.arguments.encode().translate(None, _BLANKS)
    try:
        text = _encode(_decode(call.arguments or "{}"))
    except (msgspec.DecodeError, RecursionError):
        text = call.arguments.encode()
    return text.translate(None, _BLANKS)


class Chain:
    """Hashes a request's texts as `write` adds them, and makes prefix hashes on the way. `end` ends the open text."""

    def __init__(self, scope: bytes) -> None:
        self._hash = sha256(scope)
        self._digests: list[int] = []
        self._ends: list[int] = []
        self._num_bytes = 0
        self._num_open = 0
        """Bytes of the open text since its beginning, or since the last head within it."""

    def write(self, text: bytes) -> None:
        """Add `text` to the end of the text that is still open."""
        view = memoryview(text)
        while len(view) >= (left := self._block_bytes() - self._num_open):
            self._put(view[:left])
            self._head()
            self._num_open = 0
            view = view[left:]
        self._put(view)
        self._num_open += len(view)

    def end(self) -> None:
        """End the open text, which may be empty, and open the next one."""
        self._hash.update(_END)
        self._num_open = 0
        if self._num_bytes - (self._ends[-1] if self._ends else 0) >= LEAST_BYTES:
            self._head()

    def ended(self) -> Prefix:
        """Return the heads as if the open text ended here; the chain itself stays as it is."""
        chain = Chain(b"")
        chain._hash = self._hash.copy()
        chain._digests, chain._ends, chain._num_bytes = self._digests.copy(), self._ends.copy(), self._num_bytes
        chain.end()
        return chain.prefix()

    def prefix(self) -> Prefix:
        """Return the heads made so far."""
        return Prefix(tuple(self._digests), tuple(self._ends), self._num_bytes)

    def _block_bytes(self) -> int:
        return BLOCK_BYTES << (len(self._digests) // HEADS_PER_SIZE)

    def _put(self, piece: memoryview) -> None:
        self._hash.update(piece)
        self._num_bytes += len(piece)

    def _head(self) -> None:
        if len(self._digests) < MAX_HEADS:
            self._digests.append(int.from_bytes(self._hash.copy().digest()[:DIGEST_BYTES], "little"))
            self._ends.append(self._num_bytes)
