"""What a worker tells of its caches, against what the next call finds there: real models and the true engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.integration.engine.listener import ONE_THREAD
from tests.integration.engine.test_disk_tier import tier
from tests.integration.service.test_thinking import DEMO
from tests.support.calls import generate_calls
from tests.support.small_models import write_small_model
from workers.chat.answers import Answers
from workers.chat.prompts import Prompts
from workers.chat.template import ChatTemplate
from workers.chat.tools.json_calls import HERMES
from workers.engine.cache.prompt import BLOCK_TOKENS
from workers.engine.counters import EngineCounters
from workers.engine.disk.tier import DiskTier
from workers.engine.engine import Engine
from workers.llama.context import Context
from workers.llama.model import Model
from workers.metrics.worker import WorkerMetrics
from workers.protocol.events import Finished, Text, decode_step
from workers.protocol.framing import FrameReader
from workers.protocol.prefixes import prefix_of
from workers.protocol.requests import Cancel, GenerateRequest, Message, Sampling, Submit
from workers.service.calls.stream import Mailbox
from workers.service.lifecycle import Lifecycle
from workers.service.registration.prefix_adverts import PrefixAdverts

TEMPLATE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
WORDS = (
    *("a", "gate", "horse", "dog", "field", "small", "never", "slept", "stands", "by", "the", "river"),
    *("and", "keeps", "what", "it", "was", "told", "while", "others", "wait"),
)
STORY = " ".join(random.Random(7).choices(WORDS, k=2500))
"""Always the same: how much of it is cached hangs on where its tokens end."""
RAM_BYTES = 64 << 20

Turn = tuple[Message, ...]


@dataclass(frozen=True)
class Said:
    text: str
    cached: int
    prompt: int


class Bench:
    """A worker without HTTP and Redis."""

    def __init__(self, model: Model, context: Context, ram_bytes: int, disk: DiskTier | None) -> None:
        life = Lifecycle()
        mailbox = Mailbox(asyncio.get_running_loop(), life.crashed)
        n_ctx = min(2048, context.kv_tokens)
        self.engine = Engine(model, context, slots=2, n_ctx=n_ctx, emit=mailbox.put, ram_bytes=ram_bytes, disk=disk)
        self.book = PrefixAdverts(self.engine.cache_report)
        self.calls, _, hub = generate_calls(
            self.engine,
            Prompts(ChatTemplate(TEMPLATE), model),
            WorkerMetrics(CollectorRegistry(), "m", self.engine.load, EngineCounters),
            Sampling(),
            answers=Answers(HERMES, model.vocab),
            adverts=self.book,
            mailbox=mailbox,
            life=life,
        )
        self._feed = hub.attach("g", None)
        self._num_calls = 0

    async def say(self, messages: Turn, *, team: str = "t", max_tokens: int = 8, cache_prompt: bool = True) -> Said:
        self._num_calls += 1
        request = GenerateRequest(
            messages=messages, max_tokens=max_tokens, sampling=Sampling(temperature=0), cache_prompt=cache_prompt
        )
        await self.calls.submit(Submit(gateway="g", call=self._num_calls, request=request, tenant=team))
        async with asyncio.timeout(20):
            await self.calls.idle.wait()
        frames = FrameReader().feed(self._feed.take(1 << 20))
        events = [event for frame in frames for event in decode_step(frame.data)]
        last = events[-1]
        assert isinstance(last, Finished), last
        text = "".join(event.text for event in events if isinstance(event, Text))
        return Said(text, last.usage.cached_tokens, last.usage.prompt_tokens)

    def known(self, messages: Turn, team: str = "t") -> int:
        """What a gateway would think is cached of this call's prompt."""
        prefix = prefix_of(GenerateRequest(messages=messages), team, {})
        return next((self.book.published[head] for head in reversed(prefix.digests) if head in self.book.published), 0)

    async def until(self, condition: Callable[[], object]) -> None:
        """As the publishing of news does, looks now and then."""
        until = time.monotonic() + 5
        while True:
            self.book.take()
            self.book.check_integrity()
            if condition():
                return
            assert time.monotonic() < until, "it did not come to that"
            await asyncio.sleep(0.01)

    async def at_rest(self) -> None:
        """The engine has looked everything up."""
        await asyncio.to_thread(self.engine.check_integrity)
        await asyncio.sleep(0.05)
        self.book.take()


@asynccontextmanager
async def worker(
    path: Path, *, kv_tokens: int = 4096, ram_bytes: int = RAM_BYTES, disk: DiskTier | None = None
) -> AsyncIterator[Bench]:
    with (
        Model.load(path, ONE_THREAD) as model,
        Context(model, ONE_THREAD, slots=2, kv_tokens=kv_tokens) as context,
    ):
        bench = Bench(model, context, ram_bytes, disk)
        bench.engine.start()
        try:
            yield bench
            bench.engine.check_integrity()
        finally:
            await asyncio.to_thread(bench.engine.stop)


def user(number: int, length: int = 400) -> Message:
    return Message("user", STORY[number * length : (number + 1) * length])


async def talk(bench: Bench, turns: int, first: int = 0) -> list[tuple[int, Said]]:
    """-> before each turn but the first, what was told, and what the turn then found."""
    messages: Turn = ()
    found = []
    for number in range(first, first + turns):
        messages = (*messages, user(number))
        told = bench.known(messages)
        said = await bench.say(messages)
        found.append((told, said))
        messages = (*messages, Message("assistant", said.text))
        await bench.at_rest()
    return found[1:]


@pytest.fixture(params=["demo", "window", "recurrent", "hybrid"])
def model_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return DEMO if request.param == "demo" else write_small_model(tmp_path, request.param)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small_model(tmp_path, "attention")


async def test_the_next_turn_finds_what_was_told(model_file: Path) -> None:
    async with worker(model_file) as bench:
        for told, said in await talk(bench, 5):
            assert said.cached > 200
            assert said.cached == pytest.approx(told, rel=0.04)


async def test_a_conversation_that_branches_off_finds_about_what_was_told(small: Path) -> None:
    async with worker(small) as bench:
        trunk = (Message("system", STORY[5000:5800]), user(0), Message("assistant", "Fine."))
        await bench.say((*trunk, user(1)))
        await bench.at_rest()
        branch = (*trunk, user(2))
        told = bench.known(branch)
        said = await bench.say(branch)
        assert said.cached == pytest.approx(told, rel=0.2)
        other = (trunk[0], user(3))
        told = bench.known(other)
        # Between the ends of requests and answers tokens are reckoned by bytes: texts differ in how many make one.
        assert (await bench.say(other)).cached == pytest.approx(told, rel=0.2)


async def test_nothing_is_told_to_another_team_and_nothing_of_calls_that_are_not_kept(small: Path) -> None:
    async with worker(small) as bench:
        await bench.say((user(0),))
        await bench.say((user(1),), cache_prompt=False)
        await bench.at_rest()
        assert bench.known((user(0),)) > 0
        assert bench.known((user(0),), "another team") == 0
        assert bench.known((user(1),)) == 0


async def test_what_is_evicted_is_told_as_gone(small: Path) -> None:
    async with worker(small, kv_tokens=1024, ram_bytes=0) as bench:
        first = (user(0, 800),)
        await bench.say(first)
        await bench.at_rest()
        assert bench.known(first) > 0
        for number in range(2, 7):
            await bench.say((user(number, 800),))
        await bench.until(lambda: not bench.known(first))
        assert (await bench.say(first)).cached < 40


async def test_what_moved_to_ram_is_still_told(small: Path) -> None:
    async with worker(small, kv_tokens=1024) as bench:
        first = (user(0, 800),)
        await bench.say(first)
        for number in range(2, 7):
            await bench.say((user(number, 800),))
        await bench.at_rest()
        told = bench.known(first)
        said = await bench.say(first)
        assert bench.engine.counters.num_restored > 0
        assert said.cached == pytest.approx(told, rel=0.05)
        assert told > 0


async def test_what_lies_on_disk_only_is_still_told(small: Path, tmp_path: Path) -> None:
    with tier(tmp_path / "cache") as disk:
        async with worker(small, kv_tokens=1024, ram_bytes=400 << 10, disk=disk) as bench:
            first = (user(0, 800),)
            await bench.say(first)
            for number in range(2, 9):
                await bench.say((user(number, 800),))
            await bench.at_rest()
            told = bench.known(first)
            said = await bench.say(first)
            assert bench.engine.counters.num_fetched > 0
            assert said.cached == pytest.approx(told, abs=BLOCK_TOKENS)
            assert told > 4 * BLOCK_TOKENS


async def test_heads_of_a_call_that_nobody_waits_for_any_more_are_what_was_computed(small: Path) -> None:
    async with worker(small) as bench:
        await bench.say((user(0),))
        request = GenerateRequest(messages=(user(0), Message("assistant", "Yes."), user(1)), max_tokens=500)
        await bench.calls.submit(Submit(gateway="g", call=99, request=request, tenant="t"))
        bench.calls.cancel(Cancel("g", (99,)))
        await bench.at_rest()
        told = bench.known(request.messages)
        said = await bench.say(request.messages)
        assert said.cached == pytest.approx(told, rel=0.1)
