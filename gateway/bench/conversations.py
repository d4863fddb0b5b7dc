"""Makes conversations that re-send their history, as chat clients do.

A call that is due goes on with a conversation whose last answer has come, or begins a new one; the preset's number of
turns sets the proportion. So calls come when they are due, whatever the server does, and the histories are true.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from gateway.bench.asks import Ask, Message
from gateway.bench.lengths import Preset
from gateway.bench.words import Words


@dataclass(slots=True)
class _Talk:
    messages: list[Message] = field(default_factory=list)
    tokens: int = 0
    """Tokens of the conversation, about, answers included."""


class Conversations:
    """A source without end. `most_tokens` bounds prompt and answer together: a conversation beyond it is over."""

    def __init__(self, preset: Preset, words: Words, most_tokens: int, seed: int) -> None:
        self._preset = preset
        self._words = words
        self._most = most_tokens
        self._chance = Random(seed)
        self._mark = f"{Random(seed).getrandbits(32):x}"
        self._number = 0
        self._resting: deque[_Talk] = deque()
        lengths = [min(preset.system.draw(self._chance), most_tokens // 2) for _ in range(preset.systems)]
        self._systems = [(self._text(length, f"system {at}"), length) for at, length in enumerate(lengths)]

    def next(self) -> Ask:
        prompt, answer = self._preset.prompt.draw(self._chance), self._preset.answer.draw(self._chance)
        # The same number of draws for each call whichever way it goes, so that a seed asks the same of every server.
        goes_on, system = self._chance.random() < 1 - 1 / self._preset.turns, self._chance.randrange(len(self._systems))
        talk = self._going_on(prompt, answer) if goes_on else None
        if talk is None:
            text, tokens = self._systems[system]
            talk = _Talk([{"role": "system", "content": text}], tokens)
        prompt = max(1, min(prompt, self._most - talk.tokens - 1))
        answer = max(1, min(answer, self._most - talk.tokens - prompt))
        self._number += 1
        talk.messages.append({"role": "user", "content": self._text(prompt, f"{self._number}")})
        talk.tokens += prompt + answer
        return Ask(talk.messages, answer, talk)

    def ended(self, ask: Ask, answer: str, *, good: bool) -> None:
        talk = ask.talk
        if good and answer and isinstance(talk, _Talk):
            talk.messages.append({"role": "assistant", "content": answer})
            self._resting.append(talk)

    def _going_on(self, prompt: int, answer: int) -> _Talk | None:
        while self._resting:
            talk = self._resting.popleft()
            if talk.tokens + prompt + answer <= self._most:
                return talk
        return None

    def _text(self, tokens: int, mark: str) -> str:
        return self._words.text(tokens, self._chance, f"[{self._mark} {mark}]")
