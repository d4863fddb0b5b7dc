"""What one call is at: its prompt, its place in the KV cache, its answer so far."""

from __future__ import annotations

import numpy as np

from workers.engine.request import EngineRequest
from workers.engine.text import AnswerText
from workers.llama.batch import Tokens
from workers.llama.samplers import SamplerChain
from workers.llama.vocab import Vocab
from workers.protocol.events import CallEvent, Finished, FinishReason, Started, Text, Timings, Usage

NO_SLOT = -1


class Sequence:
    """Made by `submit` on any thread, from then on the engine thread's own. Times are `time.perf_counter` seconds."""

    __slots__ = (
        "_eog",
        "_num_untold",
        "_piece",
        "_text",
        "chain",
        "first_token_at",
        "key",
        "limit",
        "num_cells",
        "num_predicted",
        "num_prompt",
        "num_prompt_left",
        "prompt",
        "request",
        "row",
        "slot",
        "started_at",
        "token",
    )

    def __init__(self, request: EngineRequest, chain: SamplerChain, vocab: Vocab, n_ctx: int) -> None:
        self.request = request
        self.key = request.key
        self.chain = chain
        self.prompt: Tokens = np.asarray(request.tokens, dtype=np.int32)
        self.num_prompt = len(request.tokens)
        self.num_prompt_left = self.num_prompt
        room = n_ctx - self.num_prompt
        self.limit = room if request.max_tokens is None else min(request.max_tokens, room)
        self.num_cells = 0
        self.slot = NO_SLOT
        self.row = 0
        self.token = 0
        self.num_predicted = 0
        self.started_at = 0.0
        self.first_token_at = 0.0
        self._eog = vocab.eog
        self._piece = vocab.piece
        self._text = AnswerText(request.stop)
        self._num_untold = 0

    @property
    def reservation(self) -> int:
        """KV cells that the call can need at most."""
        return self.num_prompt + self.limit

    def start(self, slot: int, now: float) -> Started:
        self.slot = slot
        self.started_at = now
        return Started(self.key, slot, self.num_prompt, 0)

    def take_chunk(self, num_tokens: int) -> Tokens:
        """The next tokens of the prompt; they count as cached from here on."""
        chunk = self.prompt[self.num_cells : self.num_cells + num_tokens]
        self.num_cells += num_tokens
        self.num_prompt_left -= num_tokens
        return chunk

    def accept(self, token: int, events: list[CallEvent]) -> FinishReason | None:
        """The model said `token`: add the text that may leave to `events` -> why this was the last token, if it was."""
        self.token = token
        self.num_predicted += 1
        self._num_untold += 1
        reason: FinishReason | None = None
        if token in self._eog:
            text = self._text.finish()
            reason = FinishReason.STOP
        else:
            text = self._text.push(self._piece(token))
            if self.num_predicted >= self.limit:
                text += self._text.finish()
                reason = FinishReason.LENGTH
            if self._text.stop is not None:
                reason = FinishReason.STOP
        if text:
            events.append(Text(self.key, text, self._num_untold))
            self._num_untold = 0
        return reason

    def finished(self, reason: FinishReason, now: float) -> Finished:
        """The last event of a call that ended."""
        first = self.first_token_at or now
        timings = Timings(
            cache_n=0,
            prompt_n=self.num_prompt,
            prompt_ms=(first - self.started_at) * 1e3,
            predicted_n=self.num_predicted,
            predicted_ms=(now - first) * 1e3,
        )
        usage = Usage(self.num_prompt, self.num_predicted, 0)
        return Finished(self.key, reason, usage, timings, self._text.stop)
