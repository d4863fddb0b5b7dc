"""A caller of another team, in a process of its own: streams one after the other, timed token by token.

    python -m tests.security.victim URL MODEL        (the key on standard input, which is closed when it is to end)

Prints one line of JSON (`Felt`) at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

import aiohttp
import msgspec

from tests.security.host import Pauses, Span

NUM_TOKENS = 100
STREAM_TIMEOUT_S = 600.0
BREAK_S = 0.02
SHORT_GAP_S = 0.005
NICENESS = -10
"""Of this process, where it is allowed: the attackers' process, on the same core, must not delay what is timed here."""


class Felt(msgspec.Struct, kw_only=True):
    """What the victim saw."""

    num_streams: int = 0
    """Answered whole."""
    gaps: list[Span] = []
    """Between two pieces of one answer; short ones are left out."""
    first_waits: list[Span] = []
    """From a request to the first piece of text."""
    errors: list[str] = []
    """Status or error in the stream, each with what was told."""
    pauses: list[Span] = []
    """When the host ran one of the machine's processors for others."""

    @property
    def seen_gap_s(self) -> float:
        """Return the longest gap as the victim saw it."""
        return max((end - begin for begin, end in self.gaps), default=0.0)

    @property
    def longest_gap_s(self) -> float:
        """Return the longest gap without what the host took of it."""
        pauses = Pauses(self.pauses)
        return max(map(pauses.length_without, self.gaps), default=0.0)

    @property
    def ttft_p95_s(self) -> float:
        """Return the TTFT that 95 % of the streams kept to, without what the host took; infinite without any."""
        ordered = sorted(map(Pauses(self.pauses).length_without, self.first_waits))
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] if ordered else float("inf")


decode_felt = msgspec.json.Decoder(Felt).decode


async def feel(url: str, key: str, model: str, over: Callable[[], bool]) -> Felt:
    """Stream answers until it is over; the last one is read to its end."""
    felt = Felt()
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while not over():
            try:
                await _stream(session, f"{url}/v1/chat/completions", model, felt)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                felt.errors.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(BREAK_S)
    return felt


async def _stream(session: aiohttp.ClientSession, address: str, model: str, felt: Felt) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a boat."}]
    # The same answer each time: what the worker keeps of it does not grow with the length of the trial.
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0}
    asked_at = time.monotonic()
    last_at = 0.0
    async with session.post(address, json=body) as response:
        if response.status != 200:
            felt.errors.append(f"{response.status}: {(await response.text())[:300]}")
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            if line.startswith(b'data: {"error"'):
                felt.errors.append(line[:300].decode(errors="replace"))
                return
            if line.strip() == b"data: [DONE]":
                felt.num_streams += 1
                return
            if last_at:
                if now - last_at >= SHORT_GAP_S:
                    felt.gaps.append((last_at, now))
                last_at = now
            elif b'"content":"' in line and b'"content":""' not in line:
                felt.first_waits.append((asked_at, now))
                last_at = now
    felt.errors.append("the stream broke off")


async def _feel_until_closed(url: str, key: str, model: str) -> Felt:
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    return await feel(url, key, model, closed.done)


def main() -> None:
    url, model = sys.argv[1:]
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    felt = asyncio.run(_feel_until_closed(url, sys.stdin.readline().strip(), model))
    sys.stdout.write(msgspec.json.encode(felt).decode() + "\n")


if __name__ == "__main__":
    main()
