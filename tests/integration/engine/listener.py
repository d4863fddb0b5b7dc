"""An engine under test, and what it said of each call."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from workers.engine.cache.prompt import Prompt
from workers.engine.disk.tier import DiskTier
from workers.engine.encoder import MediaEncoder
from workers.engine.engine import Engine, EngineRequest
from workers.engine.speculation.draft_model import DraftModel
from workers.engine.step.speculator import DraftSources
from workers.llama.context import Context
from workers.llama.model import Model
from workers.models.generation import SpeculationSettings
from workers.models.spec import LlamaSettings
from workers.protocol.events import (
    CallEvent,
    Failed,
    Finished,
    Logprobs,
    Progress,
    PromptLogprobs,
    Started,
    Text,
    TimingsSoFar,
    Tokens,
)
from workers.protocol.requests import GenerateRequest, Sampling

LOOK_S = 0.02
GREEDY = Sampling(temperature=0)
ONE_THREAD = LlamaSettings(n_threads=1)
AS_IT_PAYS = SpeculationSettings()
UNDRAFTED = SpeculationSettings(ngram=False)
"""For tests that count steps, or that compare numbers which other rows in a batch change."""


@dataclass
class Heard:
    """All that was emitted."""

    steps: list[tuple[int, list[CallEvent]]] = field(default_factory=list)
    calls: dict[int, list[CallEvent]] = field(default_factory=lambda: defaultdict(list))
    on_step: Callable[[int, list[CallEvent]], None] | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def emit(self, step: int, events: list[CallEvent]) -> None:
        with self.changed:
            self.steps.append((step, events))
            for event in events:
                self.calls[event.call].append(event)
            self.changed.notify_all()
        if self.on_step is not None:
            self.on_step(step, events)

    def until(self, happened: Callable[[], object], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        with self.changed:
            while not happened():
                assert time.monotonic() < end, "it did not happen in time"
                self.changed.wait(LOOK_S)  # not all that may be waited for comes with an event

    def has_ended(self, key: int) -> bool:
        return any(isinstance(event, Finished | Failed) for event in self.calls[key])

    def text(self, key: int) -> str:
        return "".join(event.text for event in self.calls[key] if isinstance(event, Text))

    def finished(self, key: int) -> Finished:
        last = self.calls[key][-1]
        assert isinstance(last, Finished), last
        return last

    def started(self, key: int) -> Started:
        first = self.calls[key][0]
        assert isinstance(first, Started), first
        return first


def changed(request: EngineRequest, **changes: Any) -> EngineRequest:
    """The request with other values, of its own or of what its caller asked."""
    own = {name: changes.pop(name) for name in list(changes) if name in {one.name for one in fields(request)}}
    return replace(request, **{"asked": msgspec.structs.replace(request.asked, **changes), **own})


class Bench:
    """Submits calls and waits for them."""

    def __init__(self, model: Model, engine: Engine, heard: Heard) -> None:
        self.model = model
        self.engine = engine
        self.heard = heard
        self._keys = itertools.count(1)

    def request(
        self,
        prompt: str | list[int],
        max_tokens: int | None = 40,
        *,
        stop: tuple[str, ...] = (),
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
    ) -> EngineRequest:
        tokens = prompt if isinstance(prompt, list) else self.tokens(prompt)
        asked = GenerateRequest(max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)
        return EngineRequest(next(self._keys), asked, Prompt(tokens), sampling)

    def tokens(self, prompt: str) -> list[int]:
        return self.model.tokenize(prompt, add_special=True, parse_special=True)

    def submit(self, request: EngineRequest) -> int:
        self.engine.submit(request)
        return request.key

    def again(self, request: EngineRequest) -> EngineRequest:
        return replace(request, key=next(self._keys))

    def wait(self, *keys: int) -> None:
        self.heard.until(lambda: all(self.heard.has_ended(key) for key in keys))

    def answer(self, request: EngineRequest) -> str:
        """Alone, if nothing else runs."""
        key = self.submit(request)
        self.wait(key)
        return self.heard.text(key)


@contextmanager
def running(
    model: Model,
    *,
    slots: int = 4,
    n_ctx: int = 512,
    kv_tokens: int = 2048,
    llama: LlamaSettings = ONE_THREAD,
    ram_bytes: int = 64 << 20,
    disk: DiskTier | None = None,
    speculation: SpeculationSettings = AS_IT_PAYS,
    encoder: MediaEncoder | None = None,
    draft: Model | None = None,
    draft_cells: int = 0,
) -> Iterator[Bench]:
    """An engine that is checked for lost slots and cells when the test is over. `draft`: a draft model. `draft_cells`:
    its KV cells; 0: as many as the engine's."""
    heard = Heard()
    with ExitStack() as opened:
        context = opened.enter_context(
            Context(model, llama, slots=slots, kv_tokens=kv_tokens, rollback=speculation.rollback)
        )
        draft_model = None
        if draft is not None:
            beside = opened.enter_context(Context(draft, llama, slots=slots, kv_tokens=draft_cells or kv_tokens))
            draft_model = DraftModel(beside, num_tokens=model.vocab.num_tokens, ends=model.vocab.eog)
        engine = Engine(
            model,
            context,
            slots=slots,
            n_ctx=n_ctx,
            emit=heard.emit,
            ram_bytes=ram_bytes,
            disk=disk,
            speculation=DraftSources(speculation, draft_model),
            encoder=encoder,
        )
        engine.start()
        try:
            yield Bench(model, engine, heard)
            engine.check_integrity()
        finally:
            engine.stop()
        assert engine.crashed is None
        engine.check_integrity()
    assert [step for step, _ in heard.steps] == list(range(1, len(heard.steps) + 1))
    for events in heard.calls.values():
        between = Text | Logprobs | PromptLogprobs | Progress | Tokens | TimingsSoFar
        assert all(isinstance(event, between) for event in events[1:-1]), events
