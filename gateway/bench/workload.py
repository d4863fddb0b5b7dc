"""Makes the requests of a run and the times at which they are due, from made-up conversations or a recorded trace."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate, repeat
from math import log
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec


def arrivals(rate: float, variation: float, chance: Random) -> Iterator[float]:
    """Yield the times at which to send calls, `rate` per second. `variation`: coefficient of variation of the gaps.

    0: even gaps; 1: a Poisson process, as of many independent people; above 1: bursts (gamma-distributed gaps)."""
    return accumulate(_gaps(rate, variation, chance))


def _gaps(rate: float, variation: float, chance: Random) -> Iterable[float]:
    if variation == 0:
        return repeat(1 / rate)
    shape = variation**-2
    return (chance.gammavariate(shape, 1 / (rate * shape)) for _ in repeat(None))


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths in tokens. `sigma`: standard deviation of the logarithm; 0: always the median."""

    median: float
    sigma: float

    def draw(self, chance: Random) -> int:
        return max(1, round(chance.lognormvariate(log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload. Each conversation has one of `systems` system prompts, and on average `turns` turns.

    Lengths are log-normal, numbers of turns geometric. The medians follow published traces: Azure's chats have on
    average 1,155 tokens in and 211 out, its code completions 2,047 and 28 (Splitwise, ISCA 2024); Mooncake's agents
    re-send long histories and answer briefly (FAST'25)."""

    name: str
    summary: str
    systems: int
    system: Length
    prompt: Length
    """Tokens of the user's message in each turn."""
    answer: Length
    turns: float

    def scaled(self, by: float) -> Preset:
        """Return the preset with all lengths multiplied by `by`, for models with a small context."""
        system, prompt, answer = (
            replace(length, median=max(1.0, length.median * by)) for length in (self.system, self.prompt, self.answer)
        )
        return replace(self, system=system, prompt=prompt, answer=answer)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("chat", "people who talk", 4, Length(250, 0.3), Length(60, 1.0), Length(180, 0.7), 4.0),
        Preset("code", "completions in an editor", 2, Length(400, 0.2), Length(1_500, 0.7), Length(30, 0.9), 1.5),
        Preset("rag", "a question with documents", 2, Length(300, 0.2), Length(3_000, 0.5), Length(220, 0.5), 1.2),
        Preset("agent", "tools called in a loop", 2, Length(2_500, 0.2), Length(300, 1.0), Length(80, 0.8), 10.0),
    )
}


_TEXT = """
the of and to in is that it was for on are as with his they at be this have from or one had by word but not
what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new
sound take only little work know place year live me back give most very after thing our just name good
sentence man think say great where help through much before line right too mean old any same tell boy follow
came want show also around form three small set
"""
_WORDS = _TEXT.split()
_KEPT = 60_000
TOKENS_PER_WORD = 1.25
"""Tokens per word until the server has been probed (`Words.calibrated`)."""


class Words:
    """Makes texts from slices of a long random text. `tokens_per_word`: TOKENS_PER_WORD until `calibrated` sets it."""

    def __init__(self, seed: int) -> None:
        chance = Random(seed)
        words = chance.choices(_WORDS, k=_KEPT)
        self.tokens_per_word = TOKENS_PER_WORD
        self._text = " ".join(words)
        self._starts = [0, *accumulate(len(word) + 1 for word in words)]

    def calibrated(self, words: int, tokens: int) -> None:
        """Set the tokens per word. The server counted `tokens` tokens in a text of `words` words."""
        self.tokens_per_word = max(0.2, tokens / words)

    def text(self, tokens: int, chance: Random, mark: str = "") -> str:
        """Return a text of about `tokens` tokens that begins with `mark`."""
        count = max(1, round(tokens / self.tokens_per_word))
        parts = [mark] if mark else []
        while count > 0:
            piece = min(count, _KEPT // 2)
            start = chance.randrange(_KEPT - piece)
            parts.append(self._text[self._starts[start] : self._starts[start + piece] - 1])
            count -= piece
        return " ".join(parts)


Message = dict[str, str]


@dataclass(slots=True)
class Prompt:
    """The prompt of one call. `conversation`: set by the `Source`, so that `ended` finds the prompt's conversation."""

    messages: list[Message]
    answer_tokens: int
    conversation: object = None


class Source(Protocol):
    """Makes the requests of a run. Its methods never block; only one task at a time may call them."""

    def next(self) -> Prompt | None:
        """Return the next request; None: there are no more."""

    def ended(self, prompt: Prompt, answer: str, *, good: bool) -> None:
        """Record that a call has ended. `answer`: the answer's text. `good`: whether the call succeeded."""


@dataclass(slots=True)
class _Conversation:
    messages: list[Message] = field(default_factory=list)
    tokens: int = 0
    """Approximate tokens of the conversation, answers included."""


class Conversations:
    """Makes an endless series of calls that belong to conversations and re-send their history, as chat clients do.

    Each call continues a conversation whose last answer has come, or begins a new one; the preset's `turns` sets the
    proportion. So no call has to wait for the answer to another, and histories contain the server's real answers. A
    conversation ends when prompt and answer together would exceed `most_tokens`."""

    def __init__(self, preset: Preset, words: Words, most_tokens: int, seed: int) -> None:
        self._preset = preset
        self._words = words
        self._most = most_tokens
        self._chance = Random(seed)
        self._mark = f"{Random(seed).getrandbits(32):x}"
        self._number = 0
        self._resting: deque[_Conversation] = deque()
        lengths = [min(preset.system.draw(self._chance), most_tokens // 2) for _ in range(preset.systems)]
        self._systems = [(self._text(length, f"system {at}"), length) for at, length in enumerate(lengths)]

    def next(self) -> Prompt:
        prompt, answer = self._preset.prompt.draw(self._chance), self._preset.answer.draw(self._chance)
        # Each call takes the same number of draws on either path, so that a seed gives the same calls on any server.
        goes_on, system = self._chance.random() < 1 - 1 / self._preset.turns, self._chance.randrange(len(self._systems))
        conversation = self._going_on(prompt, answer) if goes_on else None
        if conversation is None:
            text, tokens = self._systems[system]
            conversation = _Conversation([{"role": "system", "content": text}], tokens)
        prompt = max(1, min(prompt, self._most - conversation.tokens - 1))
        answer = max(1, min(answer, self._most - conversation.tokens - prompt))
        self._number += 1
        conversation.messages.append({"role": "user", "content": self._text(prompt, f"{self._number}")})
        conversation.tokens += prompt + answer
        return Prompt(conversation.messages, answer, conversation)

    def ended(self, prompt: Prompt, answer: str, *, good: bool) -> None:
        conversation = prompt.conversation
        if good and answer and isinstance(conversation, _Conversation):
            conversation.messages.append({"role": "assistant", "content": answer})
            self._resting.append(conversation)

    def _going_on(self, prompt: int, answer: int) -> _Conversation | None:
        while self._resting:
            conversation = self._resting.popleft()
            if conversation.tokens + prompt + answer <= self._most:
                return conversation
        return None

    def _text(self, tokens: int, mark: str) -> str:
        return self._words.text(tokens, self._chance, f"[{self._mark} {mark}]")


BLOCK_TOKENS = 512
_COLUMNS = {
    "at": ("timestamp",),
    "prompt": ("contexttokens", "request tokens", "input_length", "input_tokens"),
    "answer": ("generatedtokens", "response tokens", "output_length", "output_tokens"),
}


class TraceUnusable(ValueError):
    """The file can't be read as a trace; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call of a trace. `at_s`: seconds after the first call. Lengths are in tokens."""

    at_s: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read(path: Path) -> list[Recorded]:
    """Read a trace file, and return its calls in order of time. Raises TraceUnusable.

    The file is either Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`: an id per
    512 tokens of the prompt) or CSV with a header, as in Azure's LLM inference traces and BurstGPT."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        calls = list(_json_lines(text) if text.lstrip().startswith("{") else _csv(text.splitlines()))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, ValueError) as error:
        raise TraceUnusable(f"--trace: {path}: {error}") from None
    if not calls:
        raise TraceUnusable(f"--trace: {path}: there is no call in it")
    first = min(call.at_s for call in calls)
    moved = [Recorded(call.at_s - first, call.prompt, call.answer, call.blocks) for call in calls]
    return sorted(moved, key=lambda call: call.at_s)


def _json_lines(text: str) -> Iterator[Recorded]:
    for line in msgspec.json.Decoder(_Line).decode_lines(text):
        yield Recorded(line.timestamp / 1000, line.input_length, max(1, line.output_length), line.hash_ids)


def _csv(lines: Sequence[str]) -> Iterator[Recorded]:
    rows = csv.reader(lines)
    names = [name.strip().lower() for name in next(rows, [])]
    at, prompt, answer = (_column(names, wanted) for wanted in _COLUMNS.values())
    for row in rows:
        # BurstGPT contains failed calls, which have no answer.
        if row and int(row[answer]) > 0:
            yield Recorded(_seconds(row[at]), max(1, int(row[prompt])), int(row[answer]))


def _column(names: list[str], wanted: Sequence[str]) -> int:
    found = next((names.index(name) for name in wanted if name in names), None)
    if found is None:
        raise ValueError(f"no column is called {' or '.join(wanted)}; there are {', '.join(names)}")
    return found


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()


class Replay:
    """Makes one request for each call of a trace. Equal block ids become equal texts; otherwise prompts share no text.

    All lengths are multiplied by `scale`, then cut so that prompt and answer together have at most `most_tokens`."""

    def __init__(self, calls: Sequence[Recorded], words: Words, scale: float, most_tokens: int, seed: int) -> None:
        self._calls = iter(calls)
        self._words = words
        self._scale = scale
        self._most = most_tokens
        self._seed = seed
        self._number = 0

    def next(self) -> Prompt | None:
        call = next(self._calls, None)
        if call is None:
            return None
        self._number += 1
        answer = max(1, min(round(call.answer * self._scale), self._most // 2))
        prompt = max(1, min(round(call.prompt * self._scale), self._most - answer))
        return Prompt([{"role": "user", "content": self._prompt(call, prompt)}], answer)

    def ended(self, prompt: Prompt, answer: str, *, good: bool) -> None:
        pass

    def _prompt(self, call: Recorded, tokens: int) -> str:
        if not call.blocks:
            return self._text(tokens, f"call {self._number}")
        block, parts = max(1, round(BLOCK_TOKENS * self._scale)), []
        for id in call.blocks:
            text = self._text(block, f"block {id}")
            # A partial last block is the beginning of the full block.
            parts.append(text if tokens >= block else text[: max(1, len(text) * tokens // block)])
            tokens -= block
            if tokens <= 0:
                break
        return " ".join(parts)

    def _text(self, tokens: int, mark: str) -> str:
        return self._words.text(tokens, Random(f"{self._seed} {mark}"), f"[{self._seed} {mark}]")
