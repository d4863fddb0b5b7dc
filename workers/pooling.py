"""Opens the parts of a worker that does pooled work: embeddings, or ranking documents."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from workers.chat.prompts import Prompts
from workers.contexts import make_pooled_context
from workers.engine.pooled import PooledEngine
from workers.engine.watchdog import Watchdog
from workers.llama.devices import Devices
from workers.llama.inputs import PooledInputs
from workers.llama.model import Model
from workers.llama.pooling import PooledContext, Pooling, pooling_of
from workers.llama.tokenizer import GuardedTokenizer, TokenProcesses
from workers.protocol.requests import Sampling
from workers.served_text import text_routes
from workers.service.lanes import prompt_lane, prompts_at_once
from workers.service.memory import free_bytes
from workers.service.pooled import PooledDesk, TextRefused
from workers.service.server import Emit, OnCrash
from workers.service.services import Services
from workers.wishes import Wishes


@dataclass(frozen=True, slots=True)
class PooledParts:
    model: Model
    context: PooledContext
    watchdog: Watchdog
    tokenizer: GuardedTokenizer
    inputs: PooledInputs
    pooling: Pooling
    slots: int
    name: str

    def services(self) -> Services:
        """Make the services; called on the loop that serves them."""
        lane = prompt_lane()
        desk = PooledDesk(self.inputs, pooling=self.pooling, width=self.context.width, lane=lane)
        prompts = Prompts(None, self.tokenizer, num_tokens=self.model.facts.n_vocab)
        texts = text_routes(
            self.model,
            prompts,
            lane,
            None,
            Sampling(),
            name=self.name,
            kind=desk.kind,
            slots=self.slots,
            n_ctx=self.context.longest,
        )
        return Services(prompts=prompts, lane=lane, texts=texts, devices=Devices(free_bytes).memory, pool=desk)

    def engine(self, services: Services, emit: Emit, on_crash: OnCrash) -> TextRefused:
        """Return a new engine, connected to the desk (which takes the calls)."""
        desk = services.pool
        if desk is None:
            raise ValueError("a pooled engine needs the desk that takes its calls")
        return desk.connect(
            PooledEngine(self.context, slots=self.slots, tell=desk.tell, on_crash=on_crash, watchdog=self.watchdog)
        )


def pooled_parts(
    opened: contextlib.ExitStack, model: Model, wishes: Wishes, watchdog: Watchdog, name: str
) -> PooledParts:
    """Open the parts. Whatever is opened closes with `opened`. `name`: the pool that the worker is in.

    Raises ModelError, ModelTooLarge.
    """
    pooling = pooling_of(model, wishes.llama)
    processes = opened.enter_context(contextlib.closing(TokenProcesses(wishes.path, number=prompts_at_once())))
    tokenizer = GuardedTokenizer(model.vocab, processes)
    inputs = PooledInputs(model, pooling, tokenizer)
    context = opened.enter_context(make_pooled_context(model, wishes.settings, wishes.llama, pooling))
    context.warm_up()
    return PooledParts(model, context, watchdog, tokenizer, inputs, pooling, wishes.settings.slots, name)
