"""Time to first token that the gateway adds over asking the worker itself: one caller, the demo model, paired calls.

    python -m benchmarks.ttft_added

Both ways the clock runs from the first byte of the request to the first text: through the gateway by its public API,
and at the worker by the same submit and event stream that a gateway uses. Calls alternate; the figure is the
difference of the medians. Worker on core 0; gateway, Redis and the caller on core 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time

import aiohttp
import msgspec

from benchmarks.table import Row, print_rows
from tests.support.stack import DEMO_MODEL, Stack
from tests.support.worker_access import access_headers_of
from workers.protocol import framing
from workers.protocol.events import Failed, Finished, Text, decode_step
from workers.protocol.requests import GenerateRequest, Message, Sampling, Submit

ALIAS = "paddock-demo"


class DirectCaller:
    """Asks a worker as a gateway process would: one event stream, one POST per call."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url, self._numbers = session, url, itertools.count(1)

    async def first_text_s(self, frames: asyncio.Queue[framing.Frame], prompt: str) -> float:
        call = next(self._numbers)
        request = GenerateRequest(
            messages=(Message("user", prompt),), max_tokens=4, sampling=Sampling(temperature=0.0), ignore_eos=True
        )
        submit = Submit(gateway="ttft-bench", call=call, request=request, tenant="bench")
        began, first = time.perf_counter(), 0.0
        async with self._session.post(self._url + framing.SUBMIT_PATH, data=msgspec.json.encode(submit)) as answer:
            answer.raise_for_status()
        while True:
            for event in decode_step((await frames.get()).data):
                if isinstance(event, Text) and not first:
                    first = time.perf_counter() - began
                elif isinstance(event, Failed):
                    raise RuntimeError(event.failure.message)
                elif isinstance(event, Finished):
                    return first

    async def follow(self, frames: asyncio.Queue[framing.Frame], open_: asyncio.Event) -> None:
        url = f"{self._url}{framing.EVENTS_PATH}?gateway=ttft-bench"
        reader = framing.FrameReader()
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            answer.raise_for_status()
            open_.set()
            async for chunk in answer.content.iter_any():
                for frame in reader.feed(chunk):
                    if frame.event != framing.ALIVE_EVENT:
                        frames.put_nowait(frame)


async def through_gateway_s(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    body = {"model": ALIAS, "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "stream": True}
    first, began = 0.0, time.perf_counter()
    async with session.post(
        f"{url}/v1/chat/completions", json={**body, "temperature": 0, "ignore_eos": True}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and b'"content":"' in line and b'"content":""' not in line:
                first = time.perf_counter() - began
    return first


async def paired(
    worker_url: str, gateway_url: str, secret: str, key: str, pairs: int
) -> tuple[list[float], list[float]]:
    """Seconds to first text, (direct, through the gateway), in alternation; the first ten pairs warm up."""
    direct_s, gateway_s = [], []
    async with (
        aiohttp.ClientSession(headers=access_headers_of(worker_url, secret)) as worker_session,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as gateway_session,
        asyncio.TaskGroup() as group,
    ):
        caller, open_ = DirectCaller(worker_session, worker_url), asyncio.Event()
        frames: asyncio.Queue[framing.Frame] = asyncio.Queue()
        following = group.create_task(caller.follow(frames, open_))
        await open_.wait()
        for number in range(pairs + 10):
            prompt = f"What is {number % 90 + 3} plus 4?"
            direct = await caller.first_text_s(frames, prompt)
            through = await through_gateway_s(gateway_session, gateway_url, prompt)
            if number >= 10:
                direct_s.append(direct)
                gateway_s.append(through)
        following.cancel()
    return direct_s, gateway_s


def measure(pairs: int) -> list[Row]:
    with Stack(measured=True, cores={"worker": "0", "gateway": "1", "redis": "1"}) as stack:
        worker = stack.worker(DEMO_MODEL, ALIAS)
        gateway = stack.gateway()
        direct_s, gateway_s = asyncio.run(paired(worker.url, gateway.url, stack.secret, stack.key, pairs))
    direct, through = statistics.median(direct_s) * 1000, statistics.median(gateway_s) * 1000
    added = through - direct
    return [
        Row("asking the worker itself", f"p50 {direct:.2f} ms", "", "", True),
        Row("through the gateway", f"p50 {through:.2f} ms", "", "", True),
        Row("TTFT added by the gateway, one caller", f"p50 {added:.2f} ms", "", "<= 1.5 ms", added <= 1.5),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    print_rows("TTFT added by the gateway", measure(parser.parse_args().pairs))
